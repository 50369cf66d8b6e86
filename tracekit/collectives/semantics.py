"""What each collective does to tensors: sizes before and after, and what a rank has to send.

A collective over x ranks is defined by what each rank holds before and after it, whatever algorithm runs. With S the FULL tensor:

    kind            before                          after                           full tensor S         sent by a rank (ring)
    broadcast       root: S                         every rank: S                   the tensor            S (all but the last of the chain)
    scatter         root: S                         every rank: its S/x             the root's input      root: S - S/x
    gather          every rank: S/x                 root: S                         the root's output     others: S/x
    reduce          every rank: its own S           root: the sum, S                the tensor            S (all but the root)
    all_gather      every rank: its S/x             every rank: S                   the output            (x-1)/x S
    reduce_scatter  every rank: its own S           every rank: its S/x of the sum  the input             (x-1)/x S
    all_reduce      every rank: its own S           every rank: the sum, S          the tensor            2 (x-1)/x S
    all_to_all      every rank: x pieces, S in all  piece i of every rank           the send buffer       (x-1)/x S
    send, recv      sender: S                       receiver: S                     the message           send: S, recv: 0
    barrier         nothing                         nothing                         nothing               0

The ring figures of all_gather, reduce_scatter and all_reduce are the lower bound of any algorithm that every rank shares equally
(Patarasu and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002). A root is not always recorded, so broadcast, scatter, gather and reduce count the
most that one rank sends.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from tracekit.trace.events import BoolArray, Int64Array
from tracekit.units import NULL

_FROM_OUTPUT = ("all_gather", "gather")
_FROM_INPUT = ("reduce_scatter", "all_to_all", "scatter", "send", "broadcast", "reduce", "all_reduce")
_SHARED = ("all_gather", "reduce_scatter", "all_to_all", "scatter")


def _is(kind: pd.Series | pd.Categorical, *names: str) -> BoolArray:
    return np.asarray(pd.Series(kind).isin(names), np.bool_)


def full_elements(
    kind: pd.Series | pd.Categorical, in_elements: Int64Array, out_elements: Int64Array, size: Int64Array
) -> Int64Array:
    """Elements of the full tensor of each operation; NULL where not recorded. ``size``: ranks of the group, 0 unknown.

    all_gather and gather: the output, else input times size (exact only for even shards, so only used where no output is recorded).
    Other kinds: the input, else the output. A barrier moves 0.
    """
    ingoing, outgoing = np.asarray(in_elements, np.int64), np.asarray(out_elements, np.int64)
    first = np.where(_is(kind, *_FROM_OUTPUT), outgoing, ingoing)
    result: Int64Array = np.where(first != NULL, first, np.where(_is(kind, *_FROM_OUTPUT), NULL, outgoing))
    sizes = np.asarray(size, np.int64)
    scaled = _is(kind, *_FROM_OUTPUT) & (result == NULL) & (ingoing != NULL) & (sizes > 0)
    result = np.where(scaled, np.where(scaled, ingoing, 0) * np.where(scaled, sizes, 1), result)
    # A rank that is not the root of a scatter puts nothing in.
    away = _is(kind, "scatter", "recv") & (outgoing != NULL)
    even = np.where(_is(kind, "scatter"), np.where(away, outgoing, 0) * np.maximum(sizes, 1), np.where(away, outgoing, 0))
    result = np.where(away & ((ingoing == NULL) | (ingoing == 0)), even, result)
    return np.where(_is(kind, "barrier"), 0, result)


def sent_bytes(kind: pd.Series | pd.Categorical, full_bytes: Int64Array, size: Int64Array) -> Int64Array:
    """Bytes that one rank sends for each operation under the ring algorithm; NULL where the full size or the group's size is unknown.

    A group of one sends nothing. Where S does not divide by x the ring moves unequal chunks; then (x-1)/x S is taken as S - floor(S/x), the
    most that a rank sends. For uneven shards (all_gather, all_to_all with splits) the figure is the mean over the ranks, rounded up.
    """
    full, sizes = np.asarray(full_bytes, np.int64), np.asarray(size, np.int64)
    known = (full != NULL) & (sizes > 0)
    s, x = np.where(known, full, 0), np.where(known, sizes, 1)
    result = np.full(len(full), NULL, np.int64)
    for chosen, value in (
        (known & _is(kind, *_SHARED), s - s // x),
        (known & _is(kind, "all_reduce"), 2 * (s - s // x)),
        (known & _is(kind, "broadcast", "reduce"), np.where(x > 1, s, 0)),
        (known & _is(kind, "gather"), np.where(x > 1, -(-s // x), 0)),
        ((full != NULL) & _is(kind, "send"), full),
        (_is(kind, "recv", "barrier"), np.zeros(len(full), np.int64)),
    ):
        result[chosen] = value[chosen]
    return result
