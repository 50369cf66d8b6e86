"""Made-up pipelines of any schedule, with and without FSDP beside them, and with or without ranges that name their work. All synthetic.

    PipelineJob(PipelineShape(pp=4, micro_batches=8, schedule="interleaved_1f1b", chunks=2)).write(tmp_path)

The order of work on a rank is that of ``tracekit.simulate.pipeline.order`` (ZBV: written out here); no message goes to a stage on the same
rank. With ``fsdp`` each layer's parameters are gathered on a stream of their own over the ranks of ``dp``, unpacked on the compute stream
before the layer, and gradients are packed, reduced and scattered on another one. A ``Cause`` works as in ``tests.jobs``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.builder import Trace
from tests.jobs import HOST, LOADER, Cause, MadeJob, Shape, Work
from tracekit.simulate.pipeline.order import order

GATHER, PACK, SCATTER = 60, 64, 68


@dataclass(frozen=True)
class PipelineShape(Shape):
    """``chunks``: stages a rank; ``named``: ranges such as PP:0F3 mark the work; ``phases``: else ranges name forward and backward."""

    schedule: str = "1f1b"
    chunks: int = 1
    fsdp: bool = False
    named: bool = True
    phases: bool = True
    message_us: float = 1.0

    def orders(self, place: int) -> list[tuple[str, int, int]]:
        """(F, B, I or W; stage; micro-batch) of a rank, in order."""
        if self.schedule == "zbv":
            return zbv(place, self.pp, self.micro_batches)
        if self.schedule == "forward_only":
            return [("F", place, i) for i in range(self.micro_batches)]
        spelled = {"F": "F", "BW": "B", "B": "I", "W": "W"}
        found = order(self.schedule, self.pp, self.micro_batches, self.chunks, place)
        return [(spelled[action.kind], action.chunk, action.micro_batch) for action in found]

    def holder(self, stage: int) -> int:
        """The place that holds a stage."""
        if self.schedule == "zbv":
            return min(stage, 2 * self.pp - 1 - stage)
        return stage % self.pp

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * (2 if self.schedule == "zbv" else self.chunks)


def zbv(place: int, p: int, m: int) -> list[tuple[str, int, int]]:
    """An order that two stages a rank in the form of a V can run: each piece as early as a greedy plan lets it; backward in two parts."""
    done: set[tuple[str, int, int]] = set()
    plans: list[list[tuple[str, int, int]]] = [[] for _ in range(p)]
    last = 2 * p - 1
    while any(len(plan) < 6 * m for plan in plans):
        now = []
        for rank in range(p):
            pieces = [(kind, stage, i) for kind in "IFW" for stage in (last - rank, rank) for i in range(m)]
            open_ = [piece for piece in pieces if piece not in done and _may(piece, done, last)]
            in_flight = len([x for x in done if x[0] == "F" and x[1] == rank]) - len([x for x in done if x[0] == "W" and x[1] == rank])
            open_ = [piece for piece in open_ if piece[:2] != ("F", rank) or in_flight < 2 * p]
            if open_:
                now.append((rank, open_[0]))
        for rank, piece in now:
            plans[rank].append(piece)
            done.add(piece)
    return plans[place]


def _may(piece: tuple[str, int, int], done: set[tuple[str, int, int]], last: int) -> bool:
    kind, stage, batch = piece
    if batch and (kind, stage, batch - 1) not in done:
        return False
    if kind == "F":
        return stage == 0 or ("F", stage - 1, batch) in done
    if kind == "I":
        return ("F", stage, batch) in done and (stage == last or ("I", stage + 1, batch) in done)
    return ("I", stage, batch) in done


class PipelineJob(MadeJob):
    """A job whose ranks work in the order of a schedule."""

    shape: PipelineShape

    def __init__(self, shape: PipelineShape, cause: Cause | None = None, seed: int = 1) -> None:
        super().__init__(shape, cause, seed)

    def _step(self, rank: int, step: int) -> None:
        shape, place = self.shape, self.shape.place(rank)
        self._host(rank, step, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", LOADER + self._stop("loader", rank, step))
        gradients: list[Work] = []
        for kind, stage, batch in shape.orders(place["pp"]):
            self._stage(rank, step, kind, stage, batch, gradients)
            if (kind, batch) == ("F", shape.micro_batches // 2) and self._stop("pause", rank, step):
                self._host(rank, step, "Garbage collection", self._stop("pause", rank, step))
        self._kernel(rank, step, "multi_tensor_adam", 150, ("opt",), "Optimizer.step#AdamW.step", gradients)
        self._host(rank, step, "cudaDeviceSynchronize", 3, [w for (r, lane), w in self.last.items() if r == rank and lane != HOST])

    def _stage(self, rank: int, step: int, kind: str, stage: int, batch: int, gradients: list[Work]) -> None:
        shape, pipeline = self.shape, self.groups[rank, "pp"]
        up, last = kind == "F", shape.stages - 1
        source, target = (stage - 1, stage + 1) if up else (stage + 1, stage - 1)
        received, around = [], self._around(kind, stage, batch)
        if kind != "W" and 0 <= source <= last and shape.holder(source) != shape.holder(stage):
            received = [self._message(rank, step, kind, batch, pipeline[shape.holder(source)], rank, stage)]
        more = round(shape.layers * (self.cause.factor - 1)) if self.cause.name == "stage" and self.cause.stage == stage else 0
        for layer in range(shape.layers + more):
            key = (kind, stage, batch, layer)
            if shape.fsdp and kind != "W":
                self._gather(rank, step, key, around)
            self._work(rank, step, key, around, received if layer == 0 else [])
            if shape.fsdp and kind in "BW" and batch == shape.micro_batches - 1:
                gradients.append(self._scatter(rank, step, key, around))
        if kind != "W" and 0 <= target <= last and shape.holder(target) != shape.holder(stage):
            self._message(rank, step, kind, batch, rank, pipeline[shape.holder(target)], stage)

    def _around(self, kind: str, stage: int, batch: int) -> str:
        if self.shape.named:
            return f"PP:{stage}{kind}{batch}"
        if not self.shape.phases:
            return ""
        return "forward" if kind == "F" else "backward"

    def _work(self, rank: int, step: int, key: tuple[Any, ...], around: str, received: list[Work]) -> None:
        shape = self.shape
        us = shape.kernel_us * (2.0 if key[0] == "B" else 1.0)
        for number in range(shape.kernels):
            self._kernel(rank, step, f"gemm_{key[0]}_{number}", us, (*key, number), around, received if number == 0 else [])
        if shape.tp > 1:
            self._collective(rank, step, "tp", "allreduce", key, 2_000_000, waited=True, around=around)

    def _message(self, rank: int, step: int, kind: str, batch: int, source: int, target: int, stage: int) -> Work:
        name = "recv" if rank == target else "send"
        upward = kind == "F"
        boundary = stage if name == "send" else stage + (-1 if upward else 1)  # the stage that sends
        peer = self.shape.place(source if name == "recv" else target)["pp"]
        lane = 100 + 4 * (4 * peer + 2 * upward + (name == "recv"))  # a stream a peer and direction, as NCCL has for each pair of ranks
        meta = {"axis": "pp", "members": tuple(self.groups[rank, "pp"]), "size": 500_000, "waited": False}
        around = f"PP:{stage}{name.upper()}_{kind}{batch}" if self.shape.named else ""
        meta |= {"source": source, "target": target, "around": around}
        join = (step, "pp", boundary, source, target, kind, batch)
        return self._joined(rank, step, lane, name, self.shape.message_us, join, meta, hold=False)

    def _gather(self, rank: int, step: int, key: tuple[Any, ...], around: str) -> None:
        """The next layer's parameters, beside the compute before it; unpacked on the compute stream."""
        launch = self._host(rank, step, "cudaLaunchKernelExC", 6)
        members = tuple(self.groups[rank, "dp"])
        meta = {"axis": "dp", "members": members, "size": 2_000_000, "waited": False, "around": around}
        gathered = self._add(Work(rank, GATHER, "_allgather_base", 60, [], step, launch, (step, "fsdp", members, key), meta))
        self._kernel(rank, step, "split_with_sizes_copy_out", 4, (*key, "unpack"), around, [gathered])

    def _scatter(self, rank: int, step: int, key: tuple[Any, ...], around: str) -> Work:
        before = [self.last[rank, 7]]
        launch = self._host(rank, step, "cudaLaunchKernel", 6)
        packed = self._add(Work(rank, PACK, "chunk_cat", 10, before, step, launch, meta={"around": around}))
        members = tuple(self.groups[rank, "dp"])
        meta = {"axis": "dp", "members": members, "size": 2_000_000, "waited": False, "around": around}
        launch = self._host(rank, step, "cudaLaunchKernelExC", 6)
        return self._add(Work(rank, SCATTER, "_reduce_scatter_base", 60, [packed], step, launch, (step, "rs", members, key), meta))

    def write(self, folder: Path, without: tuple[int, ...] = ()) -> Path:
        """As in MadeJob."""
        return super().write(folder, without)

    def _event(self, trace: Trace, work: Work, seqs: dict[str, int]) -> None:
        if work.lane == PACK:
            start, us = self._at(work.start), round(self._at(work.end) - self._at(work.start), 3)
            assert work.launch is not None
            trace.kernel(work.name, start, us, PACK, launch=self._at(work.launch.start + 1))
            return
        super()._event(trace, work, seqs)
