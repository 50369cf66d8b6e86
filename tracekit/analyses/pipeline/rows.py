"""Pieces of pipeline work of all ranks on one clock: which ranks make up one pipeline, and where the time of each of them goes.

A replica is a set of ranks that hold the stages of one pipeline once; with data or tensor parallelism a job has several. One run of the
schedule on one replica lasts from its first to its last piece on any of its ranks. For each rank of it, with U the union of its pieces:

    run     = last end - first start over the replica       [ns]
    bubble  = run - |U| = fill + waiting + other + drain    [ns], exactly
    fill    before the rank's first piece, drain behind its last
    waiting in the gap before a piece: until the piece on another stage that it depends on is done
    other   the rest of the gaps: messages, the host, work that is no stage's (optimizer steps between two runs)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses.pipeline.order import Orders, Piece
from tracekit.analyses.pipeline.ranges import BACKWARD, FORWARD, INPUT, KINDS, NO_STAGE, WEIGHT, Pieces
from tracekit.graph.stages import places, stages_of
from tracekit.job.model import Job
from tracekit.schema import Column, table
from tracekit.units import NULL

PIECES = table(
    "pipeline_pieces",
    ("rank", "int32", "", "global rank"),
    ("replica", "int32", "", "which pipeline of the job, from 0"),
    ("step", "int64", "", "number of the step; NULL where the trace marks none"),
    ("turn", "int64", "", "which run of the schedule within its step, from 0"),
    ("stage", "int64", "", "stage of the model"),
    ("kind", "int64", "", "index into KINDS"),
    ("micro_batch", "int64", "", "micro-batch"),
    ("start_ns", "int64", "ns", "start of the work, aligned; NULL where nothing ran on the device"),
    ("end_ns", "int64", "ns", "its end, aligned; NULL"),
)
NOT_ALIGNED = "the clocks of the hosts are not aligned, or the first stage was not read"
NOT_NUMBERED = f"{NOT_ALIGNED}; or nothing tells which stage and micro-batch a piece of work is"
RUNS = table(
    "pipeline_runs",
    Column("rank", "int32", "", "global rank", "", "rank"),
    Column("replica", "int32", "", "which pipeline of the job", "", "pipeline"),
    Column("step", "int64", "", "number of the step", "", "step", "the trace marks no steps"),
    Column("turn", "int64", "", "which run of the schedule within its step", "", "turn"),
    Column("busy_ns", "int64", "ns", "some piece of the rank is at work", "", "busy_us"),
    Column("run_ns", "int64", "ns", "the whole run on all ranks of the pipeline: `busy_us` + `bubble_us`", "", "run_us", NOT_ALIGNED),
    Column("bubble_ns", "int64", "ns", "the sum of the parts that follow, exactly in nanoseconds", "", "bubble_us", NOT_ALIGNED),
    Column("fill_ns", "int64", "ns", "before the rank's first piece", "", "fill_us", NOT_ALIGNED),
    Column("waiting_ns", "int64", "ns", "another stage had not finished what comes next", "", "waiting_us", NOT_NUMBERED),
    Column("other_ns", "int64", "ns", "messages, the host and everything else", "", "other_us", NOT_NUMBERED),
    Column("drain_ns", "int64", "ns", "behind the rank's last piece", "", "drain_us", NOT_ALIGNED),
)
_NO_PIECE, _NO_BACKWARD = "the stage has no such pieces", "no backward was recorded"
STAGES = table(
    "pipeline_stages",
    Column("stage", "int64", "", "number of the stage", "Stage", "stage"),
    Column("ranks", "object", "", "the ranks that hold it", "", "ranks"),
    Column("members", "str", "", "the ranks in short", "Ranks"),
    Column("forward_ns", "float64", "ns", "mean of its pieces", "Forward, mean", "forward_us", _NO_PIECE),
    Column("backward_ns", "float64", "ns", "mean of its pieces", "Backward, mean", "backward_us", _NO_PIECE),
    Column("input_ns", "float64", "ns", "mean of its pieces", "Backward for the input, mean", "input_backward_us", _NO_PIECE),
    Column("weight_ns", "float64", "ns", "mean of its pieces", "Backward for the weights, mean", "weight_backward_us", _NO_PIECE),
    Column(
        "in_flight_peak",
        "int64",
        "",
        "most micro-batches in flight at once",
        "Most micro-batches in flight",
        "in_flight_peak",
        _NO_BACKWARD,
    ),
    Column(
        "in_flight_until_input_peak",
        "int64",
        "",
        "the same, until the gradient of the input is there",
        "",
        "in_flight_until_input_peak",
        _NO_BACKWARD,
    ),
    Column("bubble_share", "float64", "share", "mean of its ranks", "Bubble", "bubble_share", NOT_ALIGNED),
)
RUN = ["replica", "step", "turn"]
_RANK_RUN = ["rank", *RUN]
_RANK_TURN = ["rank", "step", "turn"]


def pieces_of(job: Job, analysis: str, axis: str) -> tuple[pd.DataFrame, int, bool]:
    """(table PIECES, each rank's in the order of its host; runs that were not recorded whole and are left out; all on a device).

    Pieces that name no stage get the place of their rank in the pipeline; where that is not known they are left out.
    """
    stage_of = places(job, axis)
    parts, devices = [], []
    ranges = [(rank, index, found) for rank, index, found in job.reduced(analysis) if found is not None]
    for rank, index, found in ranges or _by_messages(job, stage_of):
        named = np.where(found.stage == NO_STAGE, stage_of.get(rank, NO_STAGE), found.stage)
        found = found.where(named != NO_STAGE)
        if len(found.stage):
            parts.append(_frame(job, rank, index, found, named[named != NO_STAGE]))
            devices.append(found.on_device)
    if not parts:
        return PIECES.empty(), 0, False
    frame = pd.concat(parts, ignore_index=True)
    whole = _whole(frame)
    left_out = len(frame[~whole][_RANK_TURN].drop_duplicates())
    frame = frame[whole]
    frame = frame.assign(replica=frame["rank"].map(_replicas(job, axis, frame)))
    together = frame.groupby(RUN)["rank"].transform("nunique")
    everywhere = together == together.groupby(frame["replica"]).transform("max")
    left_out += len(frame[~everywhere][_RANK_TURN].drop_duplicates())
    frame = frame[everywhere]
    return PIECES.frame({name: frame[name] for name in PIECES.names}).reset_index(drop=True), left_out, all(devices)


def _by_messages(job: Job, stage_of: dict[int, int]) -> list[tuple[int, int, Pieces]]:
    """The same of a job whose ranges name no pieces: what its messages show.

    Where they show no numbers the micro-batch is NULL and the stage its rank's place: what is left is when each rank works.
    """
    numbered, result = stages_of(job), []
    for rank, index, own in numbered.parts if numbered.batches else ():
        if index in numbered.codes:
            code, batch = np.divmod(numbered.codes[index], 10**6)
            stage, kind = np.divmod(code, len(KINDS))
        else:
            kind, batch = np.where(own.forward, FORWARD, BACKWARD), np.full(len(own.step), NULL)
            stage = np.full(len(own.step), stage_of.get(rank, NO_STAGE))
        turn = np.zeros(len(kind), np.int64)
        result.append((rank, index, Pieces(stage, kind, batch, own.step, turn, own.start, own.end, not job.windows[index].on_cpu)))
    return result


def _frame(job: Job, rank: int, index: int, found: Pieces, stage: Any) -> pd.DataFrame:
    start, end = (np.where(value == NULL, NULL, job.aligned(index, value)) for value in (found.start, found.end))
    same = {name: getattr(found, name) for name in ("step", "turn", "kind", "micro_batch")}
    return pd.DataFrame({"rank": rank, **same, "stage": stage, "start_ns": start, "end_ns": end})


def is_numbered(pieces: pd.DataFrame) -> bool:
    """Whether pieces say which micro-batch they are of."""
    return bool((pieces["micro_batch"] != NULL).all())


def _whole(frame: pd.DataFrame) -> Any:
    """Whether each row belongs to a run that its rank recorded whole.

    Every stage has the forward of every micro-batch, its backward too if any run of the rank has one, and a W for every I. Pieces without
    numbers are those of whole steps.
    """
    if not is_numbered(frame):
        return np.ones(len(frame), np.bool_)
    kind = pd.get_dummies(frame["kind"]).reindex(columns=range(len(KINDS)), fill_value=False).astype(np.int64)
    count = kind.groupby([frame[c] for c in [*_RANK_TURN, "stage"]]).sum()
    batches = frame.groupby(_RANK_TURN)["micro_batch"].max() + 1
    runs = count.index.to_frame(index=False)[_RANK_TURN]
    wanted = batches.reindex(pd.MultiIndex.from_frame(runs)).to_numpy()
    backward = count[BACKWARD] + count[INPUT]
    trains = backward.groupby("rank").transform("max") > 0
    odd = (count[FORWARD] != wanted) | (trains & (backward != wanted)) | (count[INPUT] != count[WEIGHT])
    good = ~odd.groupby(_RANK_TURN).any()
    return good.reindex(pd.MultiIndex.from_frame(frame[_RANK_TURN])).to_numpy(np.bool_)


def _replicas(job: Job, axis: str, frame: pd.DataFrame) -> dict[int, int]:
    """Rank -> replica: by the mesh; without one, ranks of the same stages belong to one replica each, in order."""
    ranks = sorted(set(frame["rank"].tolist()))
    names = [a.name for a in job.mesh.axes]
    if axis and all(rank in job.mesh.coordinates for rank in ranks):
        at = names.index(axis)
        keys: dict[int, Any] = {r: (*job.mesh.coordinates[r][:at], *job.mesh.coordinates[r][at + 1 :]) for r in ranks}
    else:
        held = frame.groupby("rank")["stage"].unique()
        seen: Counter[tuple[int, ...]] = Counter()
        keys = {}
        for rank in ranks:
            stages = tuple(sorted(held[rank].tolist()))
            keys[rank] = seen[stages]
            seen[stages] += 1
    order = {key: number for number, key in enumerate(dict.fromkeys(keys[rank] for rank in ranks))}
    return {rank: order[key] for rank, key in keys.items()}


def gaps_of(pieces: pd.DataFrame) -> pd.DataFrame:
    """Timed pieces by rank, run and start, with ``before`` (end of the rank's work so far; NULL for the first), ``gap`` before it [ns],
    ``waited`` of it for ``for_stage`` [ns], and ``works``: what the piece adds to the rank's busy time [ns].
    """
    timed = pieces[pieces["start_ns"] != NULL].sort_values([*_RANK_RUN, "start_ns"], kind="stable").reset_index(drop=True)
    so_far = timed.groupby(_RANK_RUN)["end_ns"].cummax()
    before = so_far.groupby([timed[c] for c in _RANK_RUN]).shift(fill_value=NULL).to_numpy(np.int64)
    start, end = timed["start_ns"].to_numpy(np.int64), timed["end_ns"].to_numpy(np.int64)
    first = before == NULL
    gap = np.where(first, 0, np.maximum(start - np.where(first, start, before), 0))
    works = np.maximum(end - np.where(first, start, np.maximum(start, before)), 0)
    forward = timed["kind"].to_numpy() == FORWARD
    needs = np.where(forward, timed["stage"] - 1, np.where(timed["kind"] == WEIGHT, NO_STAGE, timed["stage"] + 1))
    needs = np.where(timed["micro_batch"] == NULL, NO_STAGE, needs)
    timed = timed.assign(before=before, gap=gap, works=works, forward=forward, for_stage=needs)
    ready = _ready(timed)
    waited = np.where(ready == NULL, 0, np.clip(np.minimum(ready, start) - np.where(first, start, before), 0, gap))
    return timed.assign(waited=waited)


def _ready(timed: pd.DataFrame) -> Any:
    """When what each piece needs from another stage was done; NULL where it needs nothing, or nothing that was recorded."""
    key = [*RUN, "stage", "forward", "micro_batch"]
    done = timed[timed["kind"] != WEIGHT].groupby(key)["end_ns"].max()
    at = done.index.get_indexer(pd.MultiIndex.from_frame(timed[[*RUN, "for_stage", "forward", "micro_batch"]], names=key))
    return np.where(at >= 0, np.append(done.to_numpy(np.int64), NULL)[at], NULL)  # in integers: a float does not hold a time of day


def runs_of(gaps: pd.DataFrame, aligned: bool) -> pd.DataFrame:
    """Table RUNS: of every rank and run the busy time and, where ``aligned``, the bubble and its parts.

    A run begins with its first stage: where that was not read, nobody knows how long the run is.
    """
    if not len(gaps):
        return RUNS.empty()
    own = gaps.groupby(_RANK_RUN).agg(
        busy=("works", "sum"),
        waiting=("waited", "sum"),
        gap=("gap", "sum"),
        first=("start_ns", "min"),
        last=("end_ns", "max"),
        stage=("stage", "min"),
    )
    whole = own.groupby(RUN)
    low, high = whole["first"].transform("min"), whole["last"].transform("max")
    columns = {
        "run_ns": high - low,
        "bubble_ns": high - low - own["busy"],
        "fill_ns": own["first"] - low,
        "waiting_ns": own["waiting"],
        "other_ns": own["gap"] - own["waiting"],
        "drain_ns": high - own["last"],
    }
    begins = aligned & (whole["stage"].transform("min") == 0).to_numpy()
    measured = {name: np.where(begins, value.to_numpy(), NULL) for name, value in columns.items()}
    if not is_numbered(gaps):  # what a piece waits for is not known
        measured |= {name: np.full(len(own), NULL) for name in ("waiting_ns", "other_ns")}
    keys = own.index.to_frame(index=False)
    return RUNS.frame({**{c: keys[c] for c in _RANK_RUN}, "busy_ns": own["busy"].to_numpy(), **measured})


def in_flight(pieces: pd.DataFrame, by: str, until_weight: bool) -> dict[int, int]:
    """Most micro-batches (with several stages a rank, of all its stages together) whose activations ``by`` rank or stage holds at once.

    Counted in the order of work: one more with every forward, one less with its backward; ``until_weight``: with its last part.
    """
    frees = (BACKWARD, WEIGHT if until_weight else INPUT)
    change = np.where(pieces["kind"] == FORWARD, 1, np.where(pieces["kind"].isin(frees), -1, 0))
    keys = [pieces[c] for c in ([*_RANK_RUN, "stage"] if by == "stage" else _RANK_RUN)]
    now = pd.Series(change, index=pieces.index).groupby(keys).cumsum()
    return {int(str(key)): int(most) for key, most in now.groupby(pieces[by]).max().items()}


def orders_of(pieces: pd.DataFrame) -> Iterator[Orders]:
    """The order of work of every run, one with the most ranks first."""
    size = pieces.groupby(RUN)["rank"].nunique().sort_values(ascending=False, kind="stable")
    for key in size.index:
        chosen = pieces[(pieces[RUN].to_numpy() == np.array(key)).all(axis=1)]
        yield {
            int(str(rank)): [
                Piece(KINDS[kind], stage, batch)
                for kind, stage, batch in zip(own["kind"].tolist(), own["stage"].tolist(), own["micro_batch"].tolist(), strict=True)
            ]
            for rank, own in chosen.groupby("rank")
        }
