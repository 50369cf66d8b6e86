"""Kinds of work, for what is compared with what: forward, backward, optimizer, one kind a collective, axis and size.

Compute is compared in portions: what a rank computes for one micro-batch of a stage (``PP:0F3``) or, outside a pipeline, between two
communications of one phase. The ideal of a portion is the mean over all of its kind; of a communication the median of the transfers of
its kind. By *kind* a portion's peers are those of all stages, by *role* only those of its own stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit.collectives.purpose import role_of_axis
from tracekit.graph.local import PIECE_KINDS
from tracekit.graph.step_graph import StepGraph
from tracekit.job.activity import Work
from tracekit.job.model import Job
from tracekit.trace.events import BoolArray, Int32Array, Int64Array
from tracekit.trace.steps import PHASE_NAMES
from tracekit.units import NULL

_OF_PIECES = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


@dataclass(frozen=True)
class Places:
    """Where each rank stands. ``stage`` is -1 where the job has no pipeline; ``replica`` numbers its place on all other axes."""

    ranks: Int64Array
    stage: Int64Array
    replica: Int64Array

    def of(self, rank: Int32Array, column: Int64Array) -> Int64Array:
        """A column by rank for each node."""
        found: npt.NDArray[np.int64] = column[np.searchsorted(self.ranks, rank)]
        return found

    @property
    def stages(self) -> list[int]:
        """The stages that are there, in order."""
        return sorted(set(self.stage.tolist()) - {-1})


def places_of(job: Job, graph: StepGraph) -> Places:
    """Stage and replica of each rank: from the mesh, else from pipeline ranges and the order of ranks in the pipeline's groups."""
    ranks = np.unique(graph.rank).astype(np.int64)
    axes = [axis.name for axis in job.mesh.axes]
    at = next((i for i, name in enumerate(axes) if role_of_axis(name) == "pipeline"), -1)
    coordinates = [job.mesh.coordinates.get(int(rank)) for rank in ranks]
    if at >= 0 and all(place is not None for place in coordinates):
        table = np.array(coordinates, np.int64)
        rest = np.delete(table, at, axis=1)
        replica = np.unique(rest, axis=0, return_inverse=True)[1].reshape(-1) if rest.shape[1] else np.zeros(len(ranks), np.int64)
        return Places(ranks, table[:, at], replica.astype(np.int64))
    stage = _stages_of_pieces(graph, ranks)
    if (stage < 0).any():
        stage = _stages_of_groups(job, ranks)
    if (stage < 0).any():
        return Places(ranks, np.full(len(ranks), -1, np.int64), np.arange(len(ranks)))
    return Places(ranks, stage, pd.Series(stage).groupby(stage).cumcount().to_numpy().astype(np.int64))


def _stages_of_pieces(graph: StepGraph, ranks: Int64Array) -> Int64Array:
    """The first stage that each rank's pipeline ranges name; -1 without any."""
    own = graph.piece >= 0
    stage = pd.Series(graph.piece[own] // (4 * 10**6)).groupby(graph.rank[own]).min()
    return stage.reindex(ranks, fill_value=-1).to_numpy(np.int64)


def _stages_of_groups(job: Job, ranks: Int64Array) -> Int64Array:
    """Each rank's place in the group along the pipeline's axis; -1 without one."""
    result = dict.fromkeys(ranks.tolist(), -1)
    for group in job.groups.groups:
        if group.ranks is not None and role_of_axis(group.axis) == "pipeline":
            result.update({rank: place for place, rank in enumerate(group.ranks) if rank in result})
    return np.array([result[rank] for rank in ranks.tolist()], np.int64)


@dataclass(frozen=True)
class Kinds:
    """``kind`` of each node (into ``names``), ``portion`` a number for what is compared as one (compute only, -1 elsewhere), ``place`` of
    the portion among those of its rank and step (-1: the ranks differ in how many they have), ``segment``: how many communications its
    host had called before it in the step.
    """

    kind: Int32Array
    names: list[str]
    portion: Int64Array
    place: Int64Array
    segment: Int64Array


def kinds_of(job: Job, graph: StepGraph, places: Places) -> Kinds:
    """What kind of work each node is."""
    compute = ~graph.comm
    words = np.full(len(graph), "", dtype=object)
    words[compute] = _of_compute(graph)[compute]
    words[~compute] = _of_communication(job, graph, places)
    codes, names = pd.factorize(words)
    segment = _segments(graph)
    alike = _same_count(graph, segment)
    piece = np.where(graph.piece >= 0, graph.piece + 1, 0)
    # A piece of a pipeline is one portion however many collectives run inside it.
    within = np.where(graph.piece >= 0, 0, segment)
    keys = pd.DataFrame({"w": graph.window, "s": graph.step, "k": codes, "p": piece, "n": within})
    portion = np.where(compute, keys.groupby(list(keys.columns), sort=False).ngroup().to_numpy(), -1)
    place = np.where(compute & (graph.piece < 0) & alike, segment, -1)
    return Kinds(codes.astype(np.int32), [str(name) for name in names], portion.astype(np.int64), place.astype(np.int64), segment)


def _of_compute(graph: StepGraph) -> npt.NDArray[np.object_]:
    pipeline = bool((graph.piece >= 0).any())
    kinds = np.array([*(_OF_PIECES[letter] for letter in PIECE_KINDS)], dtype=object)
    phases = np.array(["other" if pipeline and name in ("forward", "backward") else name or "other" for name in PHASE_NAMES], dtype=object)
    words = phases[graph.phase]
    inside = graph.piece >= 0
    words[inside] = kinds[graph.piece[inside] // 10**6 % 4]
    words[graph.work == Work.COPY] = "copy"
    return words


def _of_communication(job: Job, graph: StepGraph, places: Places) -> list[str]:
    """One word a communication: what it is, along which axis and of how many bytes; messages by direction."""
    rows = graph.operation[graph.comm]
    table = job.operations.iloc[np.maximum(rows, 0)]
    stage_of = dict(zip(places.ranks.tolist(), places.stage.tolist(), strict=True))
    words = []
    columns = (table[name].tolist() for name in ("kind", "axis", "full_bytes", "context", "rank"))
    peers = _peers(graph)
    for kind, axis, size, context, rank, peer in zip(*columns, peers, strict=True):
        if kind in ("send", "recv"):
            words.append(f"{_direction(str(kind), str(context), stage_of.get(rank, -1), stage_of.get(peer, -1))}_{kind}")
        else:
            words.append(f"{kind}:{axis or 'unknown'}" + (f":{size}" if size != NULL else ""))
    return words


def _peers(graph: StepGraph) -> list[int]:
    """The other rank of each message that joins two; -1 elsewhere."""
    frame = pd.DataFrame({"join": graph.join[graph.comm], "rank": graph.rank[graph.comm]})
    total = frame.groupby("join")["rank"].transform("sum")
    both = frame.groupby("join")["rank"].transform("size") == 2
    peers: list[int] = np.where((frame["join"] >= 0) & both, total - frame["rank"], -1).tolist()
    return peers


def _direction(kind: str, context: str, own: int, peer: int) -> str:
    """Forward or backward, by the name of the range around the call, else by the stages at both ends."""
    for mark, word in (("_F", "forward"), ("_B", "backward")):
        if mark in context and ("SEND" in context or "RECV" in context):
            return word
    if own < 0 or peer < 0 or own == peer:
        return "message"
    upward = (peer > own) == (kind == "send")
    return "forward" if upward else "backward"


def _segments(graph: StepGraph) -> Int64Array:
    """How many communications the host had called before each node, in its window and step."""
    count = np.cumsum(graph.comm)
    opens = np.append(True, (graph.window[1:] != graph.window[:-1]) | (graph.step[1:] != graph.step[:-1]))
    before = np.where(opens, count - graph.comm, 0)
    base = np.maximum.accumulate(before)
    segment: npt.NDArray[np.int64] = count - base
    return segment


def _same_count(graph: StepGraph, segment: Int64Array) -> bool:
    """Whether every rank and step has equally many segments."""
    most = pd.Series(segment).groupby([graph.window, graph.step]).max()
    return bool(most.nunique() <= 1)


def ideal(graph: StepGraph, kinds: Kinds, places: Places, by_stage: bool) -> Int64Array:
    """What each node costs in the ideal step [ns]: its portion scaled to the mean of its peers, its transfer the median of its kind's."""
    result = graph.cost.copy()
    stage = places.of(graph.rank, places.stage) if by_stage else np.zeros(len(graph), np.int64)
    compute = kinds.portion >= 0
    if compute.any():
        columns = {"portion": kinds.portion, "kind": kinds.kind, "place": kinds.place, "stage": stage, "cost": graph.cost}
        frame = pd.DataFrame(columns)[compute]
        portions = frame.groupby("portion").agg({"kind": "first", "place": "first", "stage": "first", "cost": "sum"})
        mean = portions.groupby(["kind", "place", "stage"])["cost"].transform("mean")
        factor = (mean / portions["cost"]).where(portions["cost"] > 0, 1.0).reindex(frame["portion"]).to_numpy()
        result[compute] = np.rint(frame["cost"].to_numpy() * factor).astype(np.int64)
    if graph.comm.any():
        frame = pd.DataFrame({"kind": kinds.kind, "stage": stage, "cost": graph.cost})[graph.comm]
        result[graph.comm] = np.rint(frame.groupby(["kind", "stage"])["cost"].transform("median").to_numpy()).astype(np.int64)
    return result


def together(names: list[str]) -> list[str]:
    """Kinds under the name that a reader is shown: a send and its receive are one, sizes are left out."""
    shown = []
    for name in names:
        word = name.split(":")
        for direction in ("forward", "backward", "message"):
            if name in (f"{direction}_send", f"{direction}_recv"):
                word = [f"{direction}_messages"]
        shown.append(":".join(word[:2]))
    return shown


def of_kind(kinds: Kinds, name: str) -> BoolArray:
    """The nodes that a reader is shown under this name."""
    wanted = [i for i, shown in enumerate(together(kinds.names)) if shown == name]
    found: BoolArray = np.isin(kinds.kind, wanted)
    return found
