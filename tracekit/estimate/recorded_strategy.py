"""The data-parallel strategy of a recorded job: from the options of a workload, or from what its units are."""

from __future__ import annotations

from collections.abc import Callable

from tracekit.errors import UsageError
from tracekit.estimate.plan import Strategy
from tracekit.estimate.recorded_values import flag, number, whole, word
from tracekit.manifest import Manifest

#: Buckets of gradients that workloads average by hand [MiB].
HAND_BUCKETS = 25.0
#: More than all gradients: one bucket holds everything.
ONE_BUCKET = 2.0**20


def strategy_of(manifest: Manifest) -> Strategy:
    """The strategy before the mesh is looked at. UsageError where there is no formula for it, or an option makes no sense."""
    return _maker(manifest)(manifest)


def _maker(manifest: Manifest) -> Callable[[Manifest], Strategy]:
    return _KNOWN.get(manifest.strategy, _KNOWN.get(manifest.strategy.partition("_")[0], _by_units))


def _ddp(manifest: Manifest) -> Strategy:
    options = manifest.options
    cap = number(options, "bucket_cap_mb", 25.0) if flag(options, "overlap", True) else ONE_BUCKET
    return Strategy(
        "ddp",
        gradient_as_bucket_view=flag(options, "gradient_as_bucket_view", False),
        bucket_cap_mb=cap,
        sync_every_micro_batch=not flag(options, "no_sync", True),
    )


def _zero1(manifest: Manifest) -> Strategy:
    options = manifest.options
    if flag(options, "parameters_as_bucket_view", False):
        raise UsageError("the model has no formula for ZeroRedundancyOptimizer's parameters_as_bucket_view")
    cap, each = number(options, "bucket_cap_mb", 25.0), not flag(options, "no_sync", True)
    return Strategy("zero1", bucket_cap_mb=cap, sync_every_micro_batch=each, padding="torch_zero")


def _zero2(manifest: Manifest) -> Strategy:
    options = manifest.options
    each = flag(options, "reduce_every_micro_batch", True)
    return Strategy("zero2", bucket_cap_mb=number(options, "bucket_cap_mb", 25.0), sync_every_micro_batch=each, padding="buckets")


def _zero3(manifest: Manifest) -> Strategy:
    options = manifest.options
    return Strategy(
        "zero3",
        reshard_after_forward=flag(options, "reshard_after_forward", True),
        last_stays=True,
        padding="torch_fsdp1",
        use_orig_params=False,
        backward_prefetch="pre" if flag(options, "prefetch", True) else "none",
    )


def _deepspeed(manifest: Manifest) -> Strategy:
    stage, cap = whole(manifest.options, "stage", 2), number(manifest.options, "bucket_cap_mb", 0.5)
    if stage not in (1, 2, 3):
        raise UsageError("DeepSpeed has stages 1, 2 and 3")
    return Strategy(f"zero{stage}", bucket_cap_mb=cap, deepspeed_allreduce=True, padding="deepspeed", backward_prefetch="none")


def _fsdp1(manifest: Manifest) -> Strategy:
    options = manifest.options
    chosen = word(options, "strategy", "full_shard")
    name = "hsdp" if chosen == "hybrid" else "fsdp1"
    after, originals = chosen != "shard_grad_op", flag(options, "use_orig_params", True)
    return Strategy(name, reshard_after_forward=after, use_orig_params=originals, padding="torch_fsdp1")


def _fsdp2(manifest: Manifest) -> Strategy:
    options = manifest.options
    told = str(options.get("reshard_after_forward", "true")).lower()[:16]
    if told not in ("true", "false") and not (told.isascii() and told.isdecimal()):
        raise UsageError("the manifest's reshard_after_forward is neither true, false nor a number of ranks")
    after: bool | int = int(told) if told.isdecimal() else told == "true"
    each, marks = flag(options, "sync_every_round", True), manifest.strategy == "fsdp2"
    return Strategy("fsdp2", reshard_after_forward=after, sync_every_micro_batch=each, marks_last_backward=marks)


def _accelerate_fsdp2(manifest: Manifest) -> Strategy:
    """Its last unit, the norm, stays gathered; only the last of several micro-batches reduces."""
    after = flag(manifest.options, "reshard_after_forward", True)
    return Strategy("fsdp2", reshard_after_forward=after, last_stays=True, sync_every_micro_batch=False)


def _hybrid(manifest: Manifest) -> Strategy:  # noqa: ARG001
    return Strategy("fsdp2", reshard_after_forward=False, reshard_after_backward=False, sync_every_micro_batch=False)


def _by_hand(manifest: Manifest) -> Strategy:  # noqa: ARG001
    """Gradients averaged in buckets when backward is over, or nothing to average at all."""
    return Strategy("ddp", bucket_cap_mb=HAND_BUCKETS, averages_after=True)


def _by_units(manifest: Manifest) -> Strategy:
    """A job that is no workload: what its units are."""
    kinds = {unit.kind for unit in manifest.units}
    for kind, name in (("fsdp2", "fsdp2"), ("fsdp1", "fsdp1"), ("ddp_bucket", "ddp")):
        if kind in kinds:
            told = {unit.reshard_after_forward for unit in manifest.units if not unit.root} - {None}
            after = told.pop() if len(told) == 1 else True
            return Strategy(name, reshard_after_forward=True if after is None else after)
    if all(axis.size == 1 for axis in manifest.mesh):
        return Strategy("ddp")
    raise UsageError("the manifest does not tell how data-parallel ranks share the model")


_KNOWN: dict[str, Callable[[Manifest], Strategy]] = {
    "ddp": _ddp,
    "accelerate_ddp": _ddp,
    "accelerate_fsdp2": _accelerate_fsdp2,
    "deepspeed_zero": _deepspeed,
    "zero1": _zero1,
    "zero2": _zero2,
    "zero3": _zero3,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "hsdp": _fsdp2,
    "hybrid": _hybrid,
    "tensor": _by_hand,
    "sequence": _by_hand,
    "context": _by_hand,
    "pipeline": _by_hand,
    "expert": _by_hand,
}
