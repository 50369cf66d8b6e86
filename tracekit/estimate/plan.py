"""What is estimated: mesh, strategy, batch, and how they divide the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from tracekit.errors import UsageError
from tracekit.estimate.pipeline import check_schedule
from tracekit.estimate.recipe import RECIPES, Recipe

STRATEGIES = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "hsdp")
#: Strategies that keep parameters whole on every rank.
REPLICATED = ("none", "ddp", "zero1", "zero2")
#: Strategies that keep gradients whole; those that keep the optimizer's state whole.
WHOLE_GRADIENTS, WHOLE_STATE = ("none", "ddp", "zero1"), ("none", "ddp")
RECOMPUTE = ("none", "selective", "full")
ATTENTION = ("flash", "eager")


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of the mesh axes, outermost first: pp, dp_replicate, dp_shard, cp, tp. The world is their product.

    Expert parallelism re-uses ranks: ``ep`` divides dp_shard * cp * dp_replicate (times tp where experts are not divided over it); ``etp``
    is how many tensor-parallel ranks divide one expert, 1 or tp. ``expert_copies``: tensor-parallel ranks do not divide the experts among
    them either; each has all those of its place along ep, and computes all tokens with them.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    expert_copies: bool = False

    def __post_init__(self) -> None:
        low = next((f.name for f in fields(self) if f.name != "expert_copies" and getattr(self, f.name) < 1), None)
        if low is not None:
            raise UsageError(f"mesh axis {low} has size {getattr(self, low)}", "give a size of at least 1")
        if self.etp not in (1, self.tp):
            raise UsageError(f"etp={self.etp} is neither 1 nor tp={self.tp}", "divide experts over all tensor-parallel ranks or over none")
        if self._expert_ranks % (self.ep * self.etp):
            raise UsageError(
                f"ep={self.ep} x etp={self.etp} does not divide the {self._expert_ranks} ranks of a stage",
                "choose an ep that divides them",
            )

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.pp * self.dense_ranks * self.tp

    @property
    def dense_ranks(self) -> int:
        """Ranks that hold the same parameters of a stage before sharding: dp_replicate * dp_shard * cp."""
        return self.dp_replicate * self.dp_shard * self.cp

    @property
    def data(self) -> int:
        """Ranks that read different samples: dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard(self) -> int:
        """W, over which parameters, gradients or optimizer state are sharded: dp_shard * cp, as torchtitan folds cp into it."""
        return self.dp_shard * self.cp

    @property
    def _expert_ranks(self) -> int:
        """Ranks of a stage among which experts are divided."""
        return self.dense_ranks * (1 if self.expert_copies else self.tp)

    @property
    def expert_data(self) -> int:
        """Ranks with the same experts: world / (pp ep etp); copies along tp are not counted."""
        return self._expert_ranks // (self.ep * self.etp)

    @property
    def expert_stride(self) -> int:
        """Ranks between neighbours with the same experts."""
        return self.ep * (self.tp if self.expert_copies else self.etp)

    @property
    def expert_shard(self) -> int:
        """W of expert parameters: the ranks with the same experts within one replica."""
        return max(1, self.expert_data // self.dp_replicate) if self.expert_data % self.dp_replicate == 0 else self.expert_data

    def text(self) -> str:
        """``pp=2,dp_shard=4,tp=2``: the axes that are longer than 1."""
        long = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name != "expert_copies" and getattr(self, f.name) > 1]
        return ",".join(long) or "one rank"


@dataclass(frozen=True)
class Strategy:
    """How data-parallel ranks share the model; ``none`` where there is one such rank, and no wrapper around the model.

    ``reshard_after_forward``: True, False, or the size of the group in which a unit stays sharded between forward and backward.
    ``reshard_after_backward`` False: units stay gathered from the first micro-batch to the end of the step (torch's pipelines with
    reshard_after_forward False). ``last_stays``: the last unit is not freed between its forward and backward. ``root_reshards``: the root
    frees its parameters after forward as well (None: as the framework does by itself: it keeps them).
    ``sync_every_micro_batch``: gradients are reduced after each micro-batch, not only after the last (False: no_sync, or
    set_requires_gradient_sync(False)). None: what is usual: once a step where every
    rank keeps whole gradients (ddp, zero1), else each time. ``bucket_cap_mb``: DDP's buckets [MiB]; None: torch's 25 with a first one of 1.
    ``backward_prefetch``: pre, post or none. ``use_orig_params``: FSDP1 aligns each parameter. ``deepspeed_allreduce``: ZeRO-1/2 all-reduce
    whole buckets and keep a slice, as DeepSpeed does by default. ``padding``: whose rules, where they are not the strategy's own.
    ``averages_after``: ddp without DDP: gradients are copied into flat buffers and averaged when the last backward is over.
    ``marks_last_backward``: FSDP2 is told which backward is the last (set_is_last_backward): behind the others the input of the last
    reduce-scatter lives on until the next one.
    """

    name: str = "fsdp2"
    reshard_after_forward: bool | int = True
    reshard_after_backward: bool = True
    root_reshards: bool | None = None
    last_stays: bool = False
    sync_every_micro_batch: bool | None = None
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: float | None = None
    backward_prefetch: str = "pre"
    use_orig_params: bool = True
    deepspeed_allreduce: bool = False
    padding: str = ""
    averages_after: bool = False
    marks_last_backward: bool = False

    def __post_init__(self) -> None:
        if self.name not in STRATEGIES:
            raise UsageError(f"there is no strategy called {self.name!r}", f"choose one of {', '.join(STRATEGIES)}")
        if self.backward_prefetch not in ("pre", "post", "none"):
            raise UsageError(f"there is no backward_prefetch {self.backward_prefetch!r}", "choose pre, post or none")
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise UsageError(f"buckets of {self.bucket_cap_mb} MiB", "give a bucket_cap_mb above 0")
        if not isinstance(self.reshard_after_forward, bool) and self.reshard_after_forward < 1:
            raise UsageError(f"reshard_after_forward {self.reshard_after_forward}", "give true, false, or a group size of at least 1")

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank keeps only a part of each parameter."""
        return self.name not in REPLICATED

    @property
    def syncs_each(self) -> bool:
        """Whether gradients are reduced after each micro-batch."""
        return self.name not in WHOLE_GRADIENTS if self.sync_every_micro_batch is None else self.sync_every_micro_batch

    @property
    def framework(self) -> str:
        """Whose padding rules apply: torch_fsdp2, torch_fsdp1, deepspeed, megatron or none."""
        own = {"fsdp1": "torch_fsdp1", "fsdp2": "torch_fsdp2", "hsdp": "torch_fsdp2", "zero3": "deepspeed", "ddp": "none", "none": "none"}
        return self.padding or own.get(self.name, "buckets")


@dataclass(frozen=True)
class Batch:
    """``micro_batch`` sequences go through the model at once, ``micro_batches`` times a step and data-parallel rank.

    ``recompute``: none, selective (attention's core is computed again in backward) or full (a layer keeps only its input); ``attention``:
    flash or eager (keeps the s x s scores); ``causal``: FLOPs of attention count only what a causal mask leaves (half of it).
    """

    micro_batch: int = 1
    micro_batches: int = 1
    recompute: str = "none"
    attention: str = "flash"
    causal: bool = False

    def __post_init__(self) -> None:
        for name in ("micro_batch", "micro_batches"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", "give a number of at least 1")
        for name, choices in (("recompute", RECOMPUTE), ("attention", ATTENTION)):
            if getattr(self, name) not in choices:
                raise UsageError(f"there is no {name} {getattr(self, name)!r}", f"choose {', '.join(choices)}")


@dataclass(frozen=True)
class Plan:
    """Everything beside the model: mesh, strategy, recipe, batch, pipeline schedule and a few habits of the implementation.

    ``sequence_parallel``: with tp, norms and dropout work on s/tp tokens. ``vocabulary_parallel``: embedding and head are
    divided over tp, not held whole; ``vocabulary_parallel_loss``: logits stay divided over tp.
    ``context_parallel``: how ranks of cp see each other's keys: ring, allgather, ulysses or blockwise. ``optimizer_loop``: foreach, fused,
    loop, or auto: as torch chooses, foreach on cuda unless parameters are DTensors (FSDP2).
    ``device``: cuda rounds allocations to 512 bytes, cpu does not. ``fused_loss``: no copies of logits beside the saved one. ``wrap``: see
    ``shape.parameters``. ``norm_kernel``: fused saves its input; composite, an rmsnorm of single operations in fp32, saves that in fp32
    and the normalised values too. ``expand_kv``: keys and values are repeated for every head before attention (grouped queries).
    ``regather_inputs``: with sequence parallelism the gathered input of a linear layer is gathered again in backward, and gradients of
    norms are summed in one call (Megatron); False: it is kept, and each is summed by itself (DTensor). ``expert_counts``: ranks of ep tell
    each other how many rows come before they send them. ``expert_padding``: every expert takes this many times its even share of rows from
    each rank, filled with zeros where there are fewer (0: as many as come).
    ``keeps_gathered_keys``: with context_parallel allgather, keys and values of all ranks are kept for backward, not gathered again.
    ``backend_copies``: while an all-gather or a reduce-scatter runs, the backend holds a copy of its whole buffer (gloo does).
    ``single_operations``: context parallelism and experts are written in single operations of torch: rows are sorted by expert and put
    back with indices and outputs kept for backward, experts work one after another, gradients of keys are scattered in copies.
    ``expert_loads``: rows that arrive at this rank's experts in a micro-batch, one number a layer; -1 or no number: as many as leave
    it.
    """

    mesh: MeshSizes = field(default_factory=MeshSizes)
    strategy: Strategy = field(default_factory=Strategy)
    recipe: Recipe = RECIPES["fsdp_bf16_fp32_reduce"]
    batch: Batch = field(default_factory=Batch)
    schedule: str = "1f1b"
    virtual_stages: int = 1
    sequence_parallel: bool = False
    vocabulary_parallel: bool = True
    vocabulary_parallel_loss: bool = True
    context_parallel: str = "ring"
    optimizer_loop: str = "auto"
    device: str = "cuda"
    fused_loss: bool = False
    wrap: str = "layers"
    norm_kernel: str = "fused"
    expand_kv: bool = False
    regather_inputs: bool = True
    keeps_logits: bool = False
    expert_counts: bool = True
    expert_padding: float = 0.0
    keeps_gathered_keys: bool = False
    backend_copies: bool = False
    single_operations: bool = False
    expert_loads: tuple[int, ...] = ()
    receive_buffers: bool = True

    def __post_init__(self) -> None:
        check_schedule(self.schedule, self.mesh.pp, self.batch.micro_batches, self.virtual_stages)
        choices: dict[str, tuple[Any, ...]] = {
            "context_parallel": ("ring", "allgather", "ulysses", "blockwise"),
            "optimizer_loop": ("auto", "foreach", "fused", "loop"),
            "device": ("cuda", "cpu"),
            "wrap": ("layers", "ends", "whole"),
            "norm_kernel": ("fused", "composite"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"there is no {name} {getattr(self, name)!r}", f"choose {', '.join(allowed)}")
        if not 0 <= self.expert_padding < 1e6:
            raise UsageError(f"an expert_padding of {self.expert_padding} makes no sense", "give 0 (none) or a factor such as 1.25")
        if self.strategy.name == "none" and self.mesh.dense_ranks > 1:
            raise UsageError(
                f"strategy none for {self.mesh.dense_ranks} ranks with the same parameters",
                "choose ddp, zero1, fsdp2, ... to keep them alike",
            )
        if self.strategy.name == "ddp" and self.mesh.dp_shard > 1:
            raise UsageError(
                f"ddp shards nothing, and dp_shard is {self.mesh.dp_shard}", "give its ranks as dp_replicate, or choose zero1, fsdp2, ..."
            )
        if self.strategy.name in ("zero1", "zero2", "zero3", "fsdp1") and self.mesh.dp_replicate > 1:
            raise UsageError(
                f"{self.strategy.name} has no replicas, and dp_replicate is {self.mesh.dp_replicate}",
                "give its ranks as dp_shard, or choose hsdp",
            )

    @property
    def shard(self) -> int:
        """W of dense parameters: ranks over which model state is sharded; 1 for ddp."""
        return 1 if self.strategy.name in WHOLE_STATE else self.mesh.shard

    @property
    def replicas(self) -> int:
        """Ranks with the same shard of dense parameters, over which gradients are all-reduced: all data and context ranks for ddp."""
        return self.mesh.dense_ranks // self.shard

    @property
    def expert_shard(self) -> int:
        """W of expert parameters; 1 for ddp."""
        return 1 if self.strategy.name in WHOLE_STATE else self.mesh.expert_shard

    @property
    def expert_replicas(self) -> int:
        """Ranks with the same shard of expert parameters."""
        return self.mesh.expert_data // self.expert_shard

    @property
    def global_batch(self) -> int:
        """Sequences a step over all ranks."""
        return self.batch.micro_batch * self.batch.micro_batches * self.mesh.data
