"""What a collective is for: gradient_sync, parameter_gather, ... by the axis of its group, the program's own ranges, phase and kind.

Rules are tried in order; the first that fits decides. What none fits is ``unknown``: a purpose is never guessed from a kernel.

    barrier                                                          setup
    send, recv on a context axis / elsewhere                         context_parallel / pipeline
    anything on a context axis                                       context_parallel
    all_to_all on an expert axis                                     expert_dispatch and expert_combine in turn (backward: reversed)
    all_reduce on a tensor axis                                      tensor_parallel
    all_gather, reduce_scatter on a tensor axis                      sequence_parallel where both occur, else tensor_parallel
    inside FSDP ranges: all_gather / reduce_scatter / all_reduce     parameter_gather / gradient_scatter / gradient_sync
    all_reduce up to 64 bytes outside backward                       loss in forward or on an axis called loss, else metrics
    optimizer phase: all_gather, broadcast / all_reduce              parameter_sync / gradient_sync
    inside DDP ranges: broadcast, all_gather / all_reduce            parameter_sync / gradient_sync
    backward on a data axis: all_reduce / reduce_scatter             gradient_sync / gradient_scatter
    on a sharding axis: all_gather / reduce_scatter                  parameter_gather / gradient_scatter
    outside every step: broadcast, scatter, all_gather               setup
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tracekit.trace.events import Int64Array
from tracekit.units import NULL

PURPOSES = (
    "parameter_gather",
    "gradient_sync",
    "gradient_scatter",
    "parameter_sync",
    "tensor_parallel",
    "sequence_parallel",
    "context_parallel",
    "pipeline",
    "expert_dispatch",
    "expert_combine",
    "loss",
    "metrics",
    "setup",
    "unknown",
)
#: A scalar or a handful of them: a loss, a norm, a counter.
TINY_BYTES = 64

_TENSOR = {"tp", "etp", "tensor", "model", "mp", "tp_pp"}
_CONTEXT = {"cp", "sp", "context", "ring", "ulysses"}
_EXPERT = {"ep", "expert"}
_SHARDING = {"dp_shard", "fsdp", "dp_shard_cp", "shard", "dp_cp", "dp_shard_mod_ep", "dp_shard_in_ep", "zero"}
_DATA = {"", "world", "dp", "dp_replicate", "replicate", "ddp", "edp", "dp_mod_ep", "data", *_SHARDING}


@dataclass(frozen=True)
class _Seen:
    """One combination of what a rule may look at."""

    kind: str
    axis: str
    phase: str
    context: str
    tiny: bool
    outside: bool
    paired: bool  # the group shows both all_gather and reduce_scatter


def _fsdp(seen: _Seen) -> bool:
    return seen.context.startswith(("FSDP::", "FullyShardedDataParallel", "FSDP.")) or "fully_shard" in seen.context


def _ddp(seen: _Seen) -> bool:
    return seen.context.startswith(("DistributedDataParallel", "torch.distributed.ddp", "torch::distributed::reducer"))


def _by(**purposes: str) -> Callable[[_Seen], str | None]:
    return lambda seen: purposes.get(seen.kind)


def _always(purpose: str) -> Callable[[_Seen], str | None]:
    return lambda _: purpose


_RULES: tuple[tuple[Callable[[_Seen], bool], Callable[[_Seen], str | None]], ...] = (
    (lambda s: s.kind == "barrier", _always("setup")),
    (lambda s: s.axis in _CONTEXT, _always("context_parallel")),
    (lambda s: s.kind in ("send", "recv"), _always("pipeline")),
    (lambda s: s.kind == "send_recv" and (s.axis == "pp" or s.context.startswith("PP:")), _always("pipeline")),
    (lambda s: s.axis in _EXPERT, _by(all_to_all="expert_dispatch")),
    (lambda s: s.axis in _TENSOR and s.kind == "all_reduce", _always("tensor_parallel")),
    (
        lambda s: s.axis in _TENSOR and s.kind in ("all_gather", "reduce_scatter"),
        lambda s: "sequence_parallel" if s.paired else "tensor_parallel",
    ),
    (_fsdp, _by(all_gather="parameter_gather", reduce_scatter="gradient_scatter", all_reduce="gradient_sync", broadcast="parameter_sync")),
    (lambda s: s.axis == "loss", _by(all_reduce="loss")),
    (lambda s: s.kind == "all_reduce" and s.tiny and s.phase != "backward", lambda s: "loss" if s.phase == "forward" else "metrics"),
    (lambda s: s.phase == "optimizer", _by(all_gather="parameter_sync", broadcast="parameter_sync", all_reduce="gradient_sync")),
    (_ddp, _by(broadcast="parameter_sync", all_gather="parameter_sync", all_reduce="gradient_sync")),
    (lambda s: s.axis in _DATA and s.phase == "backward", _by(all_reduce="gradient_sync", reduce_scatter="gradient_scatter")),
    (lambda s: s.axis in _SHARDING, _by(all_gather="parameter_gather", reduce_scatter="gradient_scatter")),
    (lambda s: s.axis in ("dp", "dp_replicate", "replicate", "ddp", "edp"), _by(all_reduce="gradient_sync")),
    (lambda s: s.outside, _by(broadcast="setup", scatter="setup", all_gather="setup")),
)


def purpose_of(seen: _Seen) -> str:
    """The purpose that the first fitting rule gives."""
    for fits, gives in _RULES:
        if fits(seen):
            purpose = gives(seen)
            if purpose is not None:
                return purpose
    return "unknown"


def purposes(operations: pd.DataFrame) -> pd.Categorical:
    """Purpose of each operation (schema.OPERATIONS with axis, phase, context and full_bytes filled in)."""
    if not len(operations):
        return pd.Categorical([], categories=list(PURPOSES))
    steps_exist = bool((operations["step_number"] != NULL).any())
    launch = operations["launch_step_number"] if "launch_step_number" in operations else operations["step_number"]
    full = operations["full_bytes"]
    kind = operations["kind"].astype("str")
    both = set(operations["group"][kind == "all_gather"]) & set(operations["group"][kind == "reduce_scatter"])
    key = pd.DataFrame(
        {
            "kind": kind,
            "axis": operations["axis"].astype("str"),
            "phase": operations["phase"].astype("str"),
            "context": operations["context"].astype("str"),
            "tiny": (full != NULL) & (full <= TINY_BYTES),
            "outside": steps_exist & (operations["step_number"] == NULL) & (launch == NULL),
            "paired": operations["group"].isin(both),
        }
    )
    number = key.groupby(list(key.columns), sort=False).ngroup().to_numpy()
    distinct = key.iloc[np.unique(number, return_index=True)[1]]
    words = [purpose_of(_Seen(*row)) for row in distinct.itertuples(index=False)]
    codes = np.array([PURPOSES.index(word) for word in words], np.int64)[number]
    _expert_turns(operations, codes)
    return pd.Categorical(np.array(PURPOSES, dtype=object)[codes], categories=list(PURPOSES))


def _expert_turns(operations: pd.DataFrame, codes: Int64Array) -> None:
    """Exchanges of experts come in pairs: tokens go out, results come back; backward mirrors it and starts with the combine's gradient.

    A group's exchanges of one rank, step and phase are taken two by two in the order of their start. An odd count is left
    dispatch, combine, ..., dispatch.
    """
    rows = np.flatnonzero(codes == PURPOSES.index("expert_dispatch"))
    if not len(rows):
        return
    part = operations.iloc[rows]
    arranged = part.assign(phase=part["phase"].astype("str")).sort_values("start_ns", kind="stable")
    nth = arranged.groupby(["rank", "group", "step_number", "phase"]).cumcount().reindex(part.index).to_numpy()
    backward = (part["phase"].astype("str") == "backward").to_numpy()
    codes[rows[(nth % 2 == 1) != backward]] = PURPOSES.index("expert_combine")
