"""What each collective does to tensors: sizes before and after, and what a rank has to send.

A collective over x ranks is defined by what each rank holds before and after it, whatever algorithm runs. With S the FULL tensor:

    kind            before                          after                           full tensor S     sent by a rank (ring)
    broadcast       root: S                         every rank: S                   the tensor        S: the root and whoever hands it on
    scatter         root: S                         every rank: its S/x             the root's input  (x-1)/x S: the root
    gather          every rank: its S/x             root: S                         the root's output S/x: a rank that is not the root
    reduce          every rank: its own S           root: the sum, S                the tensor        S: every rank but the root
    all_gather      every rank: its S/x             every rank: S                   the output        (x-1)/x S
    reduce_scatter  every rank: its own S           every rank: its S/x of the sum  the input         (x-1)/x S
    all_reduce      every rank: its own S           every rank: the sum, S          the tensor        2 (x-1)/x S
    all_to_all      every rank: x pieces, S in all  piece i of every rank           the send buffer   (x-1)/x S; with splits S - own piece
    send, recv      sender: S                       receiver: S                     the message       send: S, recv: 0
    barrier         nothing                         nothing                         nothing           0

The ring figures of all_gather, reduce_scatter and all_reduce are the least that any algorithm can do if all ranks share the work equally
(Patarasu and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002). Roots are not always recorded, so for broadcast, scatter, gather and reduce the
figure is the most that one rank sends, the same for every rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit.trace.events import BoolArray, Int64Array
from tracekit.units import NULL

_FROM_OUTPUT = ("all_gather", "gather")
_SAME = ("broadcast", "reduce", "all_reduce", "send", "recv")
_SHARED = ("all_gather", "reduce_scatter", "all_to_all", "scatter")
#: A count of elements or bytes beyond this is no size of a tensor, and would not fit the arithmetic.
_MOST = 2**55

Kinds = pd.Series | pd.Categorical | npt.NDArray[np.object_]


def _is(kind: Kinds, *names: str) -> BoolArray:
    return np.asarray(pd.Series(kind).isin(names), np.bool_)


def _known(values: Int64Array) -> BoolArray:
    return (values >= 0) & (values <= _MOST)


def full_elements(kind: Kinds, in_elements: Int64Array, out_elements: Int64Array, size: Int64Array) -> Int64Array:
    """Elements of the full tensor of each operation; NULL where not recorded. All arrays have one entry an operation.

    ``in_elements``, ``out_elements``: what this rank puts in and gets out; ``size``: ranks of the group, 0 unknown. Where the side with
    the full tensor is not recorded, it is the other side times ``size`` (exact for even shards; a rank that is not the root of a scatter or
    gather shows nothing else). A barrier moves 0; ``send_recv`` and ``unknown`` say nothing of the full tensor: NULL.
    """
    ingoing, outgoing = np.asarray(in_elements, np.int64), np.asarray(out_elements, np.int64)
    sizes = np.asarray(size, np.int64)
    result = np.full(len(ingoing), NULL, np.int64)
    for chosen, buffer, shard in (
        (_is(kind, *_FROM_OUTPUT), outgoing, ingoing),
        (_is(kind, "reduce_scatter", "scatter"), ingoing, outgoing),
    ):
        # 0 in the full tensor beside a shard that holds something: a rank that is not the root.
        away = (buffer == 0) & (shard > 0) & _is(kind, "scatter", "gather")
        direct = chosen & _known(buffer) & ~away
        result[direct] = buffer[direct]
        scaled = chosen & ~direct & _known(shard) & (sizes > 0) & (sizes <= _MOST // np.maximum(shard, 1))
        result[scaled] = shard[scaled] * sizes[scaled]
    same = _is(kind, *_SAME)
    for values in (outgoing, ingoing):  # the input where both are recorded
        use = same & _known(values)
        result[use] = values[use]
    received = _is(kind, "recv") & (ingoing == 0) & _known(outgoing)
    result[received] = outgoing[received]
    exchanged = _is(kind, "all_to_all") & _known(ingoing)
    result[exchanged] = ingoing[exchanged]
    result[_is(kind, "barrier")] = 0
    return result


def sent_bytes(kind: Kinds, full_bytes: Int64Array, size: Int64Array, own_bytes: Int64Array | None = None) -> Int64Array:
    """Bytes that one rank sends for each operation under the ring algorithm; NULL where the full size or the group's size is unknown.

    ``own_bytes``: of an all_to_all with splits the piece that a rank keeps for itself (``kept_elements``), NULL where the pieces are even
    or not known. A group of one sends nothing. Integers are exact; where S does not divide by x, a share S/x is rounded down, so (x-1)/x S
    is rounded up: the most that a rank of the ring sends. Of uneven shards (an all_gather of different inputs, an all_to_all whose own
    piece is not known) the figure is the mean over the ranks, rounded up.
    """
    full, sizes = np.asarray(full_bytes, np.int64), np.asarray(size, np.int64)
    known = _known(full) & (sizes > 0)
    s, x = np.where(known, full, 0), np.where(known, sizes, 1)
    result = np.full(len(full), NULL, np.int64)
    for chosen, value in (
        (known & _is(kind, *_SHARED), s - s // x),
        (known & _is(kind, "all_reduce"), 2 * (s - s // x)),
        (known & _is(kind, "broadcast", "reduce"), s),
        (known & _is(kind, "gather"), -(-s // x)),
    ):
        result[chosen] = value[chosen]
    if own_bytes is not None:
        own = np.asarray(own_bytes, np.int64)
        uneven = _is(kind, "all_to_all") & _known(full) & (own >= 0) & (own <= full)
        result[uneven] = full[uneven] - own[uneven]
    collective = ~_is(kind, "send", "recv", "send_recv", "unknown")
    result[collective & (sizes == 1)] = 0
    sends = _is(kind, "send") & _known(full)
    result[sends] = full[sends]
    result[_is(kind, "recv", "barrier")] = 0
    return result


def kept_elements(splits: Kinds, elements: Int64Array, size: Int64Array, position: Int64Array) -> Int64Array:
    """Elements of an all_to_all's send buffer that a rank keeps for itself; NULL where its splits are even, cut or make no sense.

    ``splits`` as recorded (``"[4, 8]"``: one number a member, in elements or in rows of the tensor), ``elements`` of the whole buffer,
    ``size`` of the group, ``position`` of the rank among its members (-1 unknown). The rows of one buffer are equally long, so the piece is
    ``elements * split[position] / sum(splits)``, exact.
    """
    texts = pd.Categorical(splits)
    lists = [_numbers(str(text)) for text in texts.categories] + [[]]
    count = np.array([len(pieces) for pieces in lists], np.int64)
    total = np.array([sum(pieces) for pieces in lists], np.int64)
    begin = np.cumsum(count) - count
    flat = np.array([piece for pieces in lists for piece in pieces] or [0], np.int64)
    code, buffer, member = texts.codes.astype(np.int64), np.asarray(elements, np.int64), np.asarray(position, np.int64)
    usable = _known(buffer) & (member >= 0) & (member < count[code]) & (count[code] == np.asarray(size, np.int64)) & (total[code] > 0)
    usable &= np.where(usable, buffer, 0) % np.maximum(total[code], 1) == 0
    result = np.full(len(buffer), NULL, np.int64)
    code, buffer = code[usable], buffer[usable]
    result[usable] = buffer // total[code] * flat[begin[code] + member[usable]]
    return result


def _numbers(text: str) -> list[int]:
    """The numbers of a recorded list; [] where it is cut (``...``) or is no list of counts."""
    words = [word.strip() for word in text.strip().removeprefix("[").removesuffix("]").split(",")]
    numbers = [int(w) for w in words if w.isascii() and w.isdecimal() and len(w) < 19]
    return numbers if len(numbers) == len(words) and sum(numbers) <= _MOST else []
