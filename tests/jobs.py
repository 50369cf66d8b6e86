"""Whole jobs made up: any mesh, one planted cause, the traces of every rank, and how long a step takes without the cause.

    job = MadeJob(Shape(pp=2, dp=2, tp=2), Cause("throttled", rank=5))
    job.write(tmp_path)
    job.step_us, job.healthy_us

Every rank's program is laid out as pieces of work (on its host or on a stream) with what each waits for; all start as early as they
can, and a collective ends for all of its members a transfer after the last has come. Everything here is synthetic.

Causes: ``more_work`` (a rank runs more kernels), ``throttled`` (its kernels take longer), ``loader`` (its host is late every step),
``pause`` (its host stops once), ``rotating`` (another replica has long sequences each step), ``stage`` (a stage holds more layers),
``expert`` (the experts of one rank get more tokens), ``link`` (transfers of the rank's group of an axis are slow), ``drift`` (the clock of
the second half of the ranks is ahead and drifts), ``none``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.builder import Trace, group

AXES = ("pp", "dp", "ep", "tp")
COMPUTE, STREAMS = 7, {"tp": 20, "dp": 24, "ep": 28, "pp": 32}
HOST = -1
#: Us: a launch, the call of a communication, from its return to the earliest start, the loader of a step.
LAUNCH, CALL, LATENCY, LOADER = 6.0, 24.0, 4.0, 200.0


@dataclass(frozen=True)
class Shape:
    """Sizes of the axes, outermost first, and what a step holds."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1
    layers: int = 3
    micro_batches: int = 4
    steps: int = 4
    kernels: int = 2  # of a layer's forward, and of its backward
    kernel_us: float = 100.0
    hosts: int = 1
    jitter: float = 0.01

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.ep * self.tp

    def place(self, rank: int) -> dict[str, int]:
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def members(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from this one along one axis only, in order."""
        stride = 1
        for other in reversed(AXES):
            if other == axis:
                first = rank - self.place(rank)[axis] * stride
                return [first + i * stride for i in range(getattr(self, axis))]
            stride *= getattr(self, other)
        raise KeyError(axis)


@dataclass(frozen=True)
class Cause:
    """What is wrong: ``factor`` says how many times longer something takes, ``us`` how long a host stops."""

    name: str = "none"
    rank: int = 0
    stage: int = 0
    axis: str = "dp"
    factor: float = 1.5
    us: float = 3000.0


@dataclass
class Work:
    """One piece: on the host (``lane`` HOST) or a stream. ``join`` names the collective or message it is a member of."""

    rank: int
    lane: int
    name: str
    us: float
    waits: list[Work]
    step: int
    launch: Work | None = None
    join: Any = None
    meta: dict[str, Any] = field(default_factory=dict)
    start: float = -1.0
    end: float = -1.0


class MadeJob:
    """Lays the job out twice, with its cause and without; ``step_us`` and ``healthy_us`` are the mean steps."""

    def __init__(self, shape: Shape, cause: Cause | None = None, seed: int = 1) -> None:
        self.shape, self.seed, self.cause = shape, seed, Cause("none")
        self.groups = {(rank, axis): shape.members(rank, axis) for rank in range(shape.world) for axis in AXES}
        self.healthy_us = self._run()
        self.cause = cause or Cause("none")
        self.step_us = self._run() if self.cause.name != "none" else self.healthy_us

    def _run(self) -> float:
        self.work: list[Work] = []
        self.last: dict[tuple[int, int], Work] = {}
        self.waited_for: dict[int, list[Work]] = {}  # communications that the next kernel of a rank waits for
        for rank in range(self.shape.world):
            for step in range(self.shape.steps):
                self._step(rank, step)
        _set_off(self.work)
        return (max(w.end for w in self.work) - min(w.start for w in self.work)) / self.shape.steps

    # ---- the program of a rank ----

    def _step(self, rank: int, step: int) -> None:
        shape, place = self.shape, self.shape.place(rank)
        self._host(rank, step, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", LOADER + self._stop("loader", rank, step))
        gradients: list[Work] = []
        for kind, batch in one_f_one_b(place["pp"], shape.pp, shape.micro_batches):
            self._piece(rank, step, kind, batch, place["pp"], gradients)
            if (kind, batch) == ("F", shape.micro_batches // 2) and self._stop("pause", rank, step):
                self._host(rank, step, "Garbage collection", self._stop("pause", rank, step))
        self._kernel(rank, step, "multi_tensor_adam", 150, ("opt",), "Optimizer.step#AdamW.step", gradients)
        self._host(rank, step, "cudaDeviceSynchronize", 3, [w for (r, lane), w in self.last.items() if r == rank and lane != HOST])

    def _piece(self, rank: int, step: int, kind: str, batch: int, stage: int, gradients: list[Work]) -> None:
        shape, pipeline = self.shape, self.groups[rank, "pp"]
        source, target = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        received = []
        if 0 <= source < shape.pp:
            received = [self._message(rank, step, kind, batch, pipeline[source], rank, stage)]
        around = f"PP:{stage}{kind}{batch}" if shape.pp > 1 else {"F": "forward", "B": "backward"}[kind]
        more = round(shape.layers * (self.cause.factor - 1)) if self.cause.name == "stage" and self.cause.stage == stage else 0
        for layer in range(shape.layers + more):
            self._layer(rank, step, (kind, batch, layer), around, received if layer == 0 else [])
            if kind == "B" and batch == shape.micro_batches - 1 and shape.dp > 1 and layer < shape.layers:
                gradients.append(self._collective(rank, step, "dp", "allreduce", ("grad", layer), 4_000_000, waited=False))
        if 0 <= target < shape.pp:
            self._message(rank, step, kind, batch, rank, pipeline[target], stage)

    def _layer(self, rank: int, step: int, key: tuple[Any, ...], around: str, received: list[Work]) -> None:
        shape, cause = self.shape, self.cause
        long = 2.0 if key[0] == "B" else 1.0
        extra = max(1, round(shape.kernels * (cause.factor - 1))) if cause.name == "more_work" and cause.rank == rank else 0
        for number in range(shape.kernels + extra):
            name = f"gemm_{key[0]}_{min(number, shape.kernels - 1)}"
            self._kernel(rank, step, name, long * shape.kernel_us, (*key, number), around, received if number == 0 else [])
        if shape.ep > 1:
            self._collective(rank, step, "ep", "all_to_all", (*key, "dispatch"), 1_000_000, waited=True, around=around)
            self._kernel(rank, step, f"expert_{key[0]}", long * shape.kernel_us, (*key, "expert"), around)
            self._collective(rank, step, "ep", "all_to_all", (*key, "combine"), 1_000_000, waited=True, around=around)
        if shape.tp > 1:
            self._collective(rank, step, "tp", "allreduce", key, 2_000_000, waited=True, around=around)

    # ---- pieces of work ----

    def _vary(self, *key: Any) -> float:
        """The same noise with and without the cause."""
        return 1 + self.shape.jitter * (2 * random.Random(repr((self.seed, key))).random() - 1)

    def _stop(self, name: str, rank: int, step: int) -> float:
        hit = self.cause.name == name and self.cause.rank == rank and (name == "loader" or step == self.shape.steps // 2)
        return self.cause.us if hit else 0.0

    def _add(self, work: Work) -> Work:
        before = self.last.get((work.rank, work.lane))
        work.waits = [w for w in [*work.waits, before, work.launch] if w is not None]
        self.last[work.rank, work.lane] = work
        self.work.append(work)
        return work

    def _host(self, rank: int, step: int, name: str, us: float, waits: list[Work] | None = None) -> Work:
        return self._add(Work(rank, HOST, name, us, list(waits or []), step))

    def _kernel(
        self, rank: int, step: int, name: str, us: float, key: tuple[Any, ...], around: str, waits: list[Work] | None = None
    ) -> None:
        cause, place = self.cause, self.shape.place(rank)
        slow = cause.name == "throttled" and cause.rank == rank
        slow |= cause.name == "rotating" and place["dp"] == step % self.shape.dp and name.startswith("gemm")
        hot = self.groups[cause.rank, "tp"] if cause.name == "expert" and cause.axis == "tp" else [cause.rank]  # its tensor-parallel mates
        slow |= cause.name == "expert" and name.startswith("expert") and rank in hot
        us *= self._vary(rank, step, key) * (cause.factor if slow else 1.0)
        held = self.waited_for.pop(rank, [])
        launch = self._host(rank, step, "cudaLaunchKernel", LAUNCH)
        self._add(Work(rank, COMPUTE, name, us, [*(waits or []), *held], step, launch, meta={"around": around}))

    def _collective(
        self, rank: int, step: int, axis: str, name: str, key: tuple[Any, ...], size: int, waited: bool, around: str = ""
    ) -> Work:
        members = tuple(self.groups[rank, axis])
        slow = self.cause.name == "link" and self.cause.axis == axis and self.cause.rank in members
        us = (15 + size / 50_000 * (self.cause.factor if slow else 1.0)) * self._vary(members, step, key)
        meta = {"axis": axis, "members": members, "size": size, "waited": waited, "around": around}
        return self._joined(rank, step, STREAMS[axis], name, us, (step, axis, members, key), meta, hold=waited)

    def _message(self, rank: int, step: int, kind: str, batch: int, source: int, target: int, stage: int) -> Work:
        name = "recv" if rank == target else "send"
        lane = STREAMS["pp"] + 4 * ("FB".index(kind) * 2 + (name == "recv"))
        meta = {"axis": "pp", "members": tuple(self.groups[rank, "pp"]), "size": 500_000, "waited": False}
        meta |= {"source": source, "target": target, "around": f"PP:{stage}{name.upper()}_{kind}{batch}"}
        us = 30 * self._vary(source, target, step, kind, batch)
        return self._joined(rank, step, lane, name, us, (step, "pp", source, target, kind, batch), meta, hold=False)

    def _joined(self, rank: int, step: int, lane: int, name: str, us: float, join: Any, meta: dict[str, Any], hold: bool) -> Work:
        """A communication: it waits for what was launched on the compute stream before it, as torch does."""
        launch = self._host(rank, step, "cudaLaunchKernelExC", CALL)
        before = [w for w in [self.last.get((rank, COMPUTE))] if w is not None] + self.waited_for.get(rank, [])
        work = self._add(Work(rank, lane, name, us, before, step, launch, join, meta))
        if hold:
            self.waited_for.setdefault(rank, []).append(work)
        return work

    # ---- traces ----

    def write(self, folder: Path, without: tuple[int, ...] = ()) -> Path:
        """One trace a rank (but for the ranks ``without``)."""
        lanes: dict[int, list[Work]] = {}
        for work in self.work:
            lanes.setdefault(work.rank, []).append(work)
        for rank, works in lanes.items():
            if rank not in without:
                self._trace(rank, works).write(folder / f"rank{rank}.json")
        return folder

    def _trace(self, rank: int, works: list[Work]) -> Trace:
        shape = self.shape
        sizes = [axis for axis in AXES if getattr(shape, axis) > 1]
        groups = [group("0", "default_pg", list(range(shape.world)))]
        groups += [group(str(1 + AXES.index(a)), f"mesh_{a}", self.groups[rank, a]) for a in sizes]
        hosts = max(shape.hosts, 2) if self.cause.name == "drift" else shape.hosts
        host = rank * hosts // shape.world
        trace = Trace(rank, shape.world, groups, host_name=f"node{host}")
        self._clock = (2_000.0, 1 + 2e-5) if self.cause.name == "drift" and rank >= shape.world // 2 else (0.0, 1.0)
        for step in range(shape.steps):
            own = [w for w in works if w.step == step and w.lane == HOST]
            begin, end = self._at(own[0].start), self._at(own[-1].end)
            trace.step(step + 1, begin, end - begin)
        seqs: dict[str, int] = {}
        for name, start, end in _ranges(works):
            trace.annotation(name, self._at(start), round(self._at(end) - self._at(start), 3))
        for work in works:
            self._event(trace, work, seqs)
        return trace

    def _at(self, us: float) -> float:
        ahead, pace = self._clock
        return round(us * pace + ahead, 3)

    def _event(self, trace: Trace, work: Work, seqs: dict[str, int]) -> None:
        start, us = self._at(work.start), round(self._at(work.end) - self._at(work.start), 3)
        if work.lane == HOST:
            if work.name.startswith("cudaDevice"):
                trace.launch(trace.next_id(), start, us, work.name)
            elif not work.name.startswith("cuda"):
                trace.annotation(work.name, start, us)
            return
        assert work.launch is not None
        at = self._at(work.launch.start + (6 if work.join else 1))
        if work.join is None:
            trace.kernel(work.name, start, us, COMPUTE, launch=at)
            return
        meta = work.meta
        axis, size = meta["axis"], meta["size"]
        seqs[axis] = seqs.get(axis, 0) + 1
        own = {"Is asynchronized op": str(not meta["waited"]), "size": len(meta["members"])}
        if work.name in ("send", "recv"):
            own |= {"Src Rank": meta["source"], "Dst Rank": meta["target"]} | {"In msg nelems": size}
        trace.collective(
            work.name, start, us, size, group=str(1 + AXES.index(axis)), description=f"mesh_{axis}", ranks=list(meta["members"]),
            seq=None if work.name in ("send", "recv") else seqs[axis], stream=work.lane, launch=at, **own,
        )  # fmt: skip


def _ranges(works: list[Work]) -> list[tuple[str, float, float]]:
    """(name, start, end) of the program's ranges on the host: around all launches of one piece that follow each other."""
    found: list[tuple[str, float, float]] = []
    for work in works:
        around = work.meta.get("around")
        if work.launch is None or not around:
            continue
        if found and found[-1][0] == around and work.launch.start - found[-1][2] < LAUNCH:
            found[-1] = (around, found[-1][1], work.launch.end)
        else:
            found.append((around, work.launch.start, work.launch.end))
    return found


def one_f_one_b(stage: int, stages: int, batches: int) -> list[tuple[str, int]]:
    """The order of 1F1B on one stage: (F or B, micro-batch)."""
    ahead = min(batches, stages - stage - 1)
    order = [("F", i) for i in range(ahead)]
    for i in range(batches - ahead):
        order += [("F", ahead + i), ("B", i)]
    return order + [("B", batches - ahead + i) for i in range(ahead)]


def _set_off(work: list[Work]) -> None:
    """Start everything as early as what it waits for lets it."""
    lacks = {id(w): len(w.waits) for w in work}
    behind: dict[int, list[Work]] = {}
    members: dict[Any, list[Work]] = {}
    for w in work:
        for cause in w.waits:
            behind.setdefault(id(cause), []).append(w)
        if w.join is not None:
            members.setdefault(w.join, []).append(w)
    open_members = {join: len(all_of) for join, all_of in members.items()}
    ready = [w for w in work if not w.waits]
    done = 0
    while ready:
        w = ready.pop()
        latency = LATENCY if w.launch is not None else 0.0
        held = max((c.end + (latency if c is w.launch else 0.0) for c in w.waits), default=0.0)
        w.start = held
        ended = [w]
        if w.join is not None:
            open_members[w.join] -= 1
            ended = members[w.join] if not open_members[w.join] else []
        last = max((m.start for m in ended), default=0.0)
        for m in ended:
            m.end = last + m.us
            done += 1
            for follower in behind.get(id(m), []):
                lacks[id(follower)] -= 1
                if not lacks[id(follower)]:
                    ready.append(follower)
    assert done == len(work), "the made-up job hangs"
