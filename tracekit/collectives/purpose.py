"""What a collective is for: gradient_sync, parameter_gather, ... by the axis of its group, the program's own ranges, phase and kind.

Rules are tried in order; the first that fits decides. What none fits is ``unknown``: a purpose is never guessed from a kernel.
An axis has a role (``role_of_axis``): tensor, context, expert, pipeline, sharding, data, loss, whole (the world, or not known), mixed.

    where                                     kind -> purpose
    ranges ``benchmark NAME``                 everything -> metrics: it is called only to be measured
    anywhere                                  barrier -> setup
    expert axis, expert library, a range      all_to_all -> expert_dispatch, expert_combine (see ``_expert_turns``)
      named dispatch or combine
    Transformer Engine's userbuffers          everything -> tensor_parallel
    loss axis, or a range named loss          all_reduce -> loss
    of integers                               all_reduce -> metrics: counts of tokens, DDP's list of parameters that were used
    at most 64 bytes, not in backward         all_reduce -> loss in forward on a data axis or the world; else metrics
    context or expert axis; backward,         all_reduce -> gradient_sync (of the weights that all its ranks hold alike)
      optimizer phase, DDP ranges
    context axis                              everything -> context_parallel (on an axis called sp: all_gather, reduce_scatter ->
                                              sequence_parallel)
    pipeline axis, ``PP:`` ranges             send, recv, send_recv, broadcast -> pipeline; send, recv anywhere else as well, but not
                                              where all ranks send as much as they receive in forward: a pipeline has two ends, so that is
                                              a ring or an exchange with neighbours, and what for is unknown
    tensor axis                               all_gather, reduce_scatter -> sequence_parallel where the group shows both, else
                                              tensor_parallel; there all_reduce in backward or optimizer -> gradient_sync (of norms, that
                                              saw a share of the tokens); everything else -> tensor_parallel
    FSDP ranges                               all_gather -> parameter_gather, reduce_scatter -> gradient_scatter,
                                              all_reduce -> gradient_sync, broadcast -> parameter_sync
    embedding group of a pipeline             all_reduce -> gradient_sync (first and last stage share the weight)
    integers on data or sharding axis, world  gather, scatter, broadcast, all_gather of at most 64 bytes -> setup in a range that names a
      (Python objects)                          checkpoint, else metrics
    optimizer phase                           all_gather, broadcast -> parameter_sync, reduce_scatter, reduce -> gradient_scatter,
                                              all_reduce -> gradient_sync
    DDP ranges                                broadcast, all_gather -> parameter_sync, all_reduce -> gradient_sync
    backward; data or sharding axis, world    all_reduce -> gradient_sync, reduce_scatter, reduce -> gradient_scatter
    sharding axis, or the group scatters in   all_gather -> parameter_gather, reduce_scatter -> gradient_scatter
      backward and never in forward
    data axis                                 all_reduce -> gradient_sync
    outside every step                        broadcast, scatter, gather, all_gather -> setup
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tracekit.collectives.kinds import EXPERT_LIBRARIES
from tracekit.mesh.names import parts
from tracekit.schema import categorical
from tracekit.trace.events import BoolArray, Int64Array
from tracekit.units import NULL
from tracekit.vocabulary import PURPOSES, AxisRole

#: A scalar or a handful of them: a loss, a norm, a counter.
TINY_BYTES = 64

_INTEGERS = ("int64", "int32", "int16", "uint8", "int8")

_TENSOR = {"tp", "etp", "tensor", "model", "mp"}
_CONTEXT = {"cp", "sp", "context", "ring", "ulysses"}
_EXPERT = {"ep", "expert"}
_SHARDING = {"dp_shard", "fsdp", "efsdp", "shard", "zero", "dp_shard_mod_ep", "dp_shard_in_ep", "distributed_optimizer"}
_DATA = {"dp", "dp_replicate", "replicate", "ddp", "edp", "dp_mod_ep", "data", "batch"}


def role_of_axis(axis: str) -> AxisRole:
    """Role of an axis by its name; of a flattened one (``dp_shard_cp``) by its parts: sharding wins over data, and data over context
    and experts.

    ``whole``: the world or no known axis. ``mixed``: parts that have nothing in common, or a name of the user's own.
    """
    base = re.sub(r"_l\d+$", "", axis)
    if base in ("", "world"):
        return "whole"
    if base == "loss":
        return "loss"
    if base == "embedding":
        return "embedding"
    names = {base} if base in _SHARDING | _DATA else set(parts(base))
    roles: tuple[tuple[AxisRole, set[str], set[str]], ...] = (
        ("tensor", _TENSOR, set()),
        ("context", _CONTEXT, set()),
        ("expert", _EXPERT, {"etp"}),
        ("pipeline", {"pp", "pipeline"}, set()),
        ("sharding", _SHARDING, _DATA | _CONTEXT | _EXPERT),
        ("data", _DATA, _CONTEXT | _EXPERT),
    )
    for role, wanted, beside in roles:
        if names & wanted and names <= wanted | beside:
            return role
    return "mixed"


@dataclass(frozen=True)
class _Seen:
    """One combination of what a rule may look at."""

    kind: str
    axis: str
    phase: str
    context: str
    implementation: str
    tiny: bool
    integers: bool
    outside: bool
    gathers_and_scatters: bool
    scatters_backward_only: bool
    exchanges: bool

    @property
    def role(self) -> str:
        return role_of_axis(self.axis)

    @property
    def data(self) -> bool:
        return self.role in ("data", "sharding", "whole")


def _in_fsdp(seen: _Seen) -> bool:
    return seen.context.startswith(("FSDP::", "FSDP.", "FullyShardedDataParallel")) or "fully_shard" in seen.context


def _in_ddp(seen: _Seen) -> bool:
    return seen.context.startswith(("DistributedDataParallel", "torch.distributed.ddp", "torch::distributed::reducer"))


def _in_experts(seen: _Seen) -> bool:
    return seen.role == "expert" or seen.implementation in EXPERT_LIBRARIES or _named_turn(seen.context) != ""


def _named_turn(text: str) -> str:
    """The purpose that a range's or kernel's name tells of an exchange of experts; '' where it tells none or both."""
    own = text.partition("(")[0]
    words = {word for word in ("dispatch", "combine") if re.search(rf"(?<![A-Za-z]){word}|{word.title()}", own)}
    return f"expert_{words.pop()}" if len(words) == 1 else ""


def _replicated(seen: _Seen) -> bool:
    """Where ranks that work on other tokens with the same weights bring their gradients together."""
    return seen.role in ("context", "expert") and (seen.phase in ("backward", "optimizer") or _in_ddp(seen))


def _named_loss(seen: _Seen) -> bool:
    return seen.role == "loss" or re.search(r"(?<![a-z])loss(?![a-z])", seen.context, re.I) is not None


def _by(**purposes: str) -> Callable[[_Seen], str | None]:
    return lambda seen: purposes.get(seen.kind)


def _context(seen: _Seen) -> str:
    return "sequence_parallel" if seen.axis == "sp" and seen.kind in ("all_gather", "reduce_scatter") else "context_parallel"


def _tensor(seen: _Seen) -> str:
    if seen.gathers_and_scatters and seen.kind in ("all_gather", "reduce_scatter"):
        return "sequence_parallel"
    if seen.gathers_and_scatters and seen.kind == "all_reduce" and seen.phase in ("backward", "optimizer"):
        return "gradient_sync"
    return "tensor_parallel"


def _tiny(seen: _Seen) -> str | None:
    if seen.role == "tensor" and seen.phase == "forward":
        return None  # a softmax over a split vocabulary, not a figure for the log
    return "loss" if seen.phase == "forward" and seen.data else "metrics"


def _objects(seen: _Seen) -> bool:
    """Python objects that are gathered or handed out: their sizes, then their bytes. Larger all-gathers may be quantised parameters."""
    kinds = ("gather", "scatter", "broadcast", *(("all_gather",) if seen.tiny else ()))
    return seen.integers and seen.data and seen.kind in kinds and not _in_ddp(seen)


_PIPELINE = _by(send="pipeline", recv="pipeline", send_recv="pipeline", broadcast="pipeline")
_GRADIENTS = {"all_reduce": "gradient_sync", "reduce_scatter": "gradient_scatter", "reduce": "gradient_scatter"}

_RULES: tuple[tuple[Callable[[_Seen], bool], Callable[[_Seen], str | None]], ...] = (
    (lambda s: re.fullmatch(r"benchmark \w+", s.context) is not None, lambda _: "metrics"),
    (lambda s: s.kind == "barrier", lambda _: "setup"),
    (_in_experts, _by(all_to_all="expert_dispatch")),
    (lambda s: s.implementation == "userbuffers", lambda _: "tensor_parallel"),
    (_named_loss, _by(all_reduce="loss")),
    (lambda s: s.kind == "all_reduce" and s.tiny and s.phase != "backward", _tiny),
    (lambda s: s.kind == "all_reduce" and s.integers and s.role != "tensor", lambda _: "metrics"),
    (_replicated, _by(all_reduce="gradient_sync")),
    (lambda s: s.role == "context", _context),
    (lambda s: s.role == "pipeline" or s.context.startswith("PP:"), _PIPELINE),
    (lambda s: s.kind in ("send", "recv"), lambda s: "unknown" if s.exchanges else "pipeline"),
    (lambda s: s.role == "tensor", _tensor),
    (_in_fsdp, _by(all_gather="parameter_gather", broadcast="parameter_sync", **_GRADIENTS)),
    (lambda s: s.role == "embedding", _by(all_reduce="gradient_sync")),
    (_objects, lambda s: "setup" if "checkpoint" in s.context else "metrics"),
    (lambda s: s.phase == "optimizer" and s.data, _by(all_gather="parameter_sync", broadcast="parameter_sync", **_GRADIENTS)),
    (_in_ddp, _by(broadcast="parameter_sync", all_gather="parameter_sync", all_reduce="gradient_sync")),
    (lambda s: s.phase == "backward" and s.data, _by(**_GRADIENTS)),
    (
        lambda s: s.role == "sharding" or (s.scatters_backward_only and s.data and s.phase in ("forward", "backward")),
        _by(all_gather="parameter_gather", reduce_scatter="gradient_scatter"),
    ),
    (lambda s: s.role in ("data", "sharding"), _by(all_reduce="gradient_sync")),
    (lambda s: s.outside, _by(broadcast="setup", scatter="setup", gather="setup", all_gather="setup")),
)


def _purpose(seen: _Seen) -> str:
    for fits, gives in _RULES:
        if fits(seen):
            purpose = gives(seen)
            if purpose is not None:
                return purpose
    return "unknown"


def purposes(operations: pd.DataFrame) -> pd.Categorical:
    """Purpose of each operation (categories PURPOSES).

    ``operations`` has rank, group, kind, axis, phase, context, dtype, full_bytes, step_number and start_ns; launch_step_number,
    implementation and kernel are used where present.
    """
    if not len(operations):
        return categorical(np.empty(0, np.int64), PURPOSES)
    key = _keys(operations)
    number = key.groupby(list(key.columns), sort=False).ngroup().to_numpy()
    distinct = key.iloc[np.unique(number, return_index=True)[1]]
    words = [_purpose(_Seen(*row)) for row in distinct.itertuples(index=False)]
    codes = np.array([PURPOSES.index(word) for word in words], np.int64)[number]
    _expert_turns(operations, codes)
    return categorical(codes, PURPOSES)


def _text(operations: pd.DataFrame, name: str) -> pd.Series:
    return operations[name].astype("str") if name in operations else pd.Series("", index=operations.index)


def _keys(operations: pd.DataFrame) -> pd.DataFrame:
    """What the rules look at, one row an operation (columns as the fields of ``_Seen``)."""
    step = operations["step_number"]
    launch = operations.get("launch_step_number", step)
    full = operations["full_bytes"]
    kind, phase, group = _text(operations, "kind"), _text(operations, "phase"), operations["group"]
    gathers = set(group[kind == "all_gather"])
    forward = set(group[(kind == "reduce_scatter") & (phase == "forward")])
    backward = set(group[(kind == "reduce_scatter") & (phase == "backward")])
    return pd.DataFrame(
        {
            "kind": kind,
            "axis": _text(operations, "axis"),
            "phase": phase,
            "context": _text(operations, "context"),
            "implementation": _text(operations, "implementation"),
            "tiny": (full != NULL) & (full <= TINY_BYTES),
            "integers": _text(operations, "dtype").isin(_INTEGERS),
            "outside": bool((step != NULL).any()) & (step == NULL) & (launch == NULL),
            "gathers_and_scatters": group.isin(gathers & set(group[kind == "reduce_scatter"])),
            "scatters_backward_only": group.isin(gathers & (backward - forward)),
            "exchanges": group.isin(_exchanging(operations, kind, phase)),
        }
    )


def _exchanging(operations: pd.DataFrame, kind: pd.Series, phase: pd.Series) -> list[int]:
    """Groups in which every rank sends as often as it receives in the forward of a step.

    Only where backward is told apart: a pipeline of two ranks does so over both.
    """
    sent = kind == "send"
    messages = sent | (kind == "recv")
    told_apart = operations["group"].isin(set(operations["group"][messages & (phase == "backward")]))
    chosen = messages & (phase == "forward") & (operations["group"] >= 0) & told_apart
    if not chosen.any():
        return []
    part = operations.loc[chosen, ["group", "rank"]].assign(balance=np.where(sent[chosen], 1, -1))
    balance = part.groupby(["group", "rank"])["balance"].sum()
    told = balance.eq(0).groupby("group").agg(["all", "size"])
    return [int(group) for group in told.index[told["all"] & (told["size"] > 1)]]


def _expert_turns(operations: pd.DataFrame, codes: Int64Array) -> None:
    """Which exchanges of experts bring the results back: those are changed from dispatch to combine.

    A range or kernel that is named so decides. Counts of tokens (an exchange of integers) go ahead of a dispatch and belong to it. The rest
    of a group's exchanges on one rank in one step are taken in the order of their start: forward dispatch, combine, ...; backward mirrors
    it, the combine's gradient first. Where backward shows twice as many as forward it runs each layer's forward again: dispatch, combine,
    then the gradients of combine and dispatch.
    """
    rows = np.flatnonzero(codes == PURPOSES.index("expert_dispatch"))
    if not len(rows):
        return
    part = operations.iloc[rows]
    combine, named = _named_combine(part)
    counts = _text(part, "dtype").isin(_INTEGERS).to_numpy()
    backward = (_text(part, "phase") == "backward").to_numpy()
    frame = pd.DataFrame(
        {
            "rank": part["rank"].to_numpy(),
            "group": part["group"].to_numpy(),
            "step": part["step_number"].to_numpy(),
            "backward": backward,
            "start": part["start_ns"].to_numpy(),
        }
    )[~named & ~counts]
    keys = ["rank", "group", "step"]
    nth = frame.sort_values("start", kind="stable").groupby([*keys, "backward"]).cumcount().reindex(frame.index)
    number_backward = frame.groupby(keys)["backward"].transform("sum")
    number_forward = frame.groupby(keys)["backward"].transform("size") - number_backward
    again = frame["backward"] & (number_forward > 0) & (number_backward == 2 * number_forward)
    turn = np.where(again, nth % 4 % 3 != 0, (nth % 2 == 1) != frame["backward"])
    combine[frame.index.to_numpy()] = turn
    codes[rows[combine]] = PURPOSES.index("expert_combine")


def _named_combine(part: pd.DataFrame) -> tuple[BoolArray, BoolArray]:
    """(is a combine by its name, has such a name) of each exchange."""
    combine, named = np.zeros(len(part), np.bool_), np.zeros(len(part), np.bool_)
    for column in ("kernel", "context"):  # the range around the call counts more than the kernel's name
        words = pd.Categorical(_text(part, column))
        turns = np.array([_named_turn(str(word)) for word in words.categories] + [""])[words.codes]
        combine = np.where(turns != "", turns == "expert_combine", combine)
        named |= turns != ""
    return combine, named
