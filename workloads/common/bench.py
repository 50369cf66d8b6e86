"""Collectives one at a time: buffers with known content, the call, what must have come of it, and its time as nccl-tests takes it.

S is the size of the full tensor (``tracekit.collectives.semantics``), x the number of ranks. Data are small whole numbers, so that sums are
exact in every element type whatever the order in which ranks are added.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tracekit.collectives.cost import busbw_factor

#: torch renames these two.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
#: Sums stay below 2 x, copies below this.
_SMALL, _LARGE = 3, 101


def nobody_owns(tensor: Tensor, category: str) -> None:
    """Nothing is recorded."""


@dataclass(frozen=True)
class Where:
    """The group in which a collective runs, this rank's place in it, and what its tensors are. ``own`` is told of every tensor made."""

    group: dist.ProcessGroup
    place: int
    size: int
    device: torch.device
    dtype: torch.dtype
    own: Callable[[Tensor, str], None] = nobody_owns

    def data(self, place: int, elements: int, modulus: int = _LARGE) -> Tensor:
        """What the rank at ``place`` puts in."""
        numbers = torch.arange(elements, dtype=torch.int32, device=self.device)
        self.own(numbers, "temporaries")
        result = numbers.mul_(7).add_(place * 13).remainder_(modulus).to(self.dtype)
        self.own(result, "communication_buffers")
        return result

    def total(self, elements: int) -> Tensor:
        """The sum of what all ranks put in."""
        return torch.stack([self.data(place, elements, _SMALL).long() for place in range(self.size)]).sum(0).to(self.dtype)

    def shares(self, elements: int) -> Tensor:
        """One behind the other what all ranks put in, together so many elements."""
        result = torch.cat([self.data(place, elements // self.size) for place in range(self.size)])
        self.own(result, "communication_buffers")
        return result

    def empty(self, elements: int) -> Tensor:
        """Room for a result."""
        result = torch.zeros(elements, dtype=self.dtype, device=self.device)
        self.own(result, "communication_buffers")
        return result


@dataclass(frozen=True)
class Case:
    """One collective of one size: ``call`` runs it (on a GPU: queues it); afterwards ``result`` must equal ``right()``.

    ``summed`` is the buffer in which sums replace what was summed: it has to be set to zero before the call is repeated.
    """

    call: Callable[[], object]
    result: Tensor
    right: Callable[[], Tensor]
    summed: Tensor | None = None


def broadcast(w: Where, elements: int) -> Case:
    """The first rank's tensor S to all."""
    tensor = w.data(0, elements) if w.place == 0 else w.empty(elements)
    return Case(lambda: dist.broadcast(tensor, group=w.group, group_src=0), tensor, lambda: w.data(0, elements))


def scatter(w: Where, elements: int) -> Case:
    """A share of the first rank's tensor S to each."""
    result = w.empty(elements // w.size)
    shares = list(w.data(0, elements).chunk(w.size)) if w.place == 0 else None
    return Case(
        lambda: dist.scatter(result, shares, group=w.group, group_src=0),
        result,
        lambda: w.data(0, elements).chunk(w.size)[w.place],
    )


def gather(w: Where, elements: int) -> Case:
    """The shares of all ranks, together S, to the first."""
    own, whole = w.data(w.place, elements // w.size), w.empty(elements if w.place == 0 else 0)
    shares = list(whole.chunk(w.size)) if w.place == 0 else None
    right = w.shares if w.place == 0 else w.empty
    return Case(lambda: dist.gather(own, shares, group=w.group, group_dst=0), whole, lambda: right(len(whole)))


def reduce(w: Where, elements: int) -> Case:
    """The sum of all ranks' tensors S to the first; those of the others are left undefined."""
    tensor = w.data(w.place, elements, _SMALL)
    result = tensor if w.place == 0 else tensor[:0]
    return Case(
        lambda: dist.reduce(tensor, group=w.group, group_dst=0),
        result,
        lambda: w.total(elements)[: len(result)],
        tensor,
    )


def all_gather(w: Where, elements: int) -> Case:
    """The shares of all ranks, together S, to all."""
    own, result = w.data(w.place, elements // w.size), w.empty(elements)
    return Case(lambda: _ALL_GATHER(result, own, group=w.group), result, lambda: w.shares(elements))


def reduce_scatter(w: Where, elements: int) -> Case:
    """A share of the sum of all ranks' tensors S to each."""
    tensor, result = w.data(w.place, elements, _SMALL), w.empty(elements // w.size)
    return Case(
        lambda: _REDUCE_SCATTER(result, tensor, group=w.group),
        result,
        lambda: w.total(elements).chunk(w.size)[w.place],
    )


def all_reduce(w: Where, elements: int) -> Case:
    """The sum of all ranks' tensors S to all."""
    tensor = w.data(w.place, elements, _SMALL)
    return Case(lambda: dist.all_reduce(tensor, group=w.group), tensor, lambda: w.total(elements), tensor)


def all_to_all(w: Where, elements: int) -> Case:
    """Piece i of every rank's tensor S to rank i."""
    tensor, result = w.data(w.place, elements), w.empty(elements)
    return Case(
        lambda: dist.all_to_all_single(result, tensor, group=w.group),
        result,
        lambda: torch.cat([w.data(place, elements).chunk(w.size)[w.place] for place in range(w.size)]),
    )


def pieces(place: int, size: int) -> list[int]:
    """Sizes of what rank ``place`` sends to each rank in an uneven exchange, as multiples of the smallest: 1 to x, each once."""
    return [1 + (place + other) % size for other in range(size)]


def all_to_all_v(w: Where, elements: int) -> Case:
    """Uneven pieces of every rank's tensor S: 1 to x parts of S/(1 + 2 + ... + x), so that all ranks send and receive as much."""
    part = elements // sum(pieces(0, w.size))
    splits = [part * weight for weight in pieces(w.place, w.size)]  # weights are symmetric: sent to a rank and received from it
    tensor, result = w.data(w.place, elements), w.empty(elements)

    def sent(place: int) -> Tensor:
        return w.data(place, elements).split([part * weight for weight in pieces(place, w.size)])[w.place]

    return Case(
        lambda: dist.all_to_all_single(result, tensor, splits, splits, group=w.group),
        result,
        lambda: torch.cat([sent(place) for place in range(w.size)]),
    )


def send_recv(w: Where, elements: int) -> Case:
    """Every rank's tensor S to the next, round and round."""
    tensor, result = w.data(w.place, elements), w.empty(elements)
    behind, ahead = (w.place - 1) % w.size, (w.place + 1) % w.size

    def call() -> None:
        operations = [
            dist.P2POp(dist.isend, tensor, group=w.group, group_peer=ahead),
            dist.P2POp(dist.irecv, result, group=w.group, group_peer=behind),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return Case(call, result, lambda: w.data(behind, elements))


def barrier(w: Where, elements: int) -> Case:  # noqa: ARG001
    """Nothing but waiting for each other."""
    return Case(lambda: dist.barrier(w.group), w.empty(0), lambda: w.empty(0))


#: name -> (kinds it shows in a trace, how to make it).
COLLECTIVES: dict[str, tuple[tuple[str, ...], Callable[[Where, int], Case]]] = {
    "broadcast": (("broadcast",), broadcast),
    "scatter": (("scatter",), scatter),
    "gather": (("gather",), gather),
    "reduce": (("reduce",), reduce),
    "all_gather": (("all_gather",), all_gather),
    "reduce_scatter": (("reduce_scatter",), reduce_scatter),
    "all_reduce": (("all_reduce",), all_reduce),
    "all_to_all": (("all_to_all",), all_to_all),
    "all_to_all_v": (("all_to_all",), all_to_all_v),
    "send_recv": (("send", "recv"), send_recv),
    "barrier": (("barrier",), barrier),
}
_IN_SHARES = ("scatter", "gather", "all_gather", "reduce_scatter", "all_to_all")


def elements_of(name: str, size_bytes: int, ranks: int, itemsize: int) -> int:
    """Elements of the full tensor for about ``size_bytes``: the next lower number that divides into the pieces, at least one a piece."""
    if name == "barrier":
        return 0
    unit = ranks if name in _IN_SHARES else sum(pieces(0, ranks)) if name == "all_to_all_v" else 1
    return max(1, size_bytes // itemsize // unit) * unit


def count_of(name: str, elements: int, ranks: int) -> int:
    """The column ``count`` of nccl-tests: elements of a share where the collective has shares, else of the tensor."""
    return elements // ranks if name in _IN_SHARES else elements


def wrong_elements(case: Case) -> int:
    """Run the collective once; how many elements of this rank's result are not what they have to be."""
    case.call()
    wrong = int((case.result != case.right()).sum())  # waits for the device
    reset(case)
    return wrong


def reset(case: Case) -> None:
    """Make ready for any number of calls."""
    if case.summed is not None:
        case.summed.zero_()


def seconds(case: Case, w: Where, warm_up: int, calls: int) -> float:
    """Time of one call: of many back to back between two looks at the host's clock, the mean over the ranks, as nccl-tests does it."""
    for _ in range(warm_up):
        case.call()
    _finish(w)
    dist.barrier(w.group)
    start = time.perf_counter()
    for _ in range(calls):
        case.call()
    _finish(w)
    mean = torch.tensor((time.perf_counter() - start) / calls, dtype=torch.float64, device=w.device)
    dist.all_reduce(mean, group=w.group)
    return float(mean) / w.size


def _finish(w: Where) -> None:
    if w.device.type == "cuda":
        torch.cuda.synchronize(w.device)


def bandwidths(name: str, size_bytes: int, ranks: int, time_s: float) -> tuple[float | None, float | None]:
    """(algbw, busbw) in 10^9 bytes a second; None for a barrier. An uneven exchange counts as an even one, which it is on average."""
    factor = busbw_factor(COLLECTIVES[name][0][0], ranks)
    if not size_bytes or factor is None or time_s <= 0:
        return None, None
    algbw = size_bytes / time_s / 1e9
    return algbw, algbw * factor
