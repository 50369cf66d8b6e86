"""What is estimated: mesh, strategy, batch, and how they divide the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from tracekit.errors import UsageError, choose
from tracekit.estimate.padding import FRAMEWORKS
from tracekit.estimate.pipeline import check_schedule
from tracekit.estimate.recipe import RECIPES, Recipe

STRATEGIES = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "hsdp")
#: Strategies that keep parameters whole on every rank.
REPLICATED = ("none", "ddp", "zero1", "zero2")
#: Strategies that keep gradients whole; those that keep the optimizer's state whole.
WHOLE_GRADIENTS, WHOLE_STATE = ("none", "ddp", "zero1"), ("none", "ddp")
RECOMPUTE = ("none", "selective", "selective-megatron", "selective-torchtitan", "full")
ATTENTION = ("flash", "eager")


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of the mesh axes, outermost first. The world is the product of those that stand before ``ep``."""

    pp: int = 1  # pipeline stages [ranks]
    dp_replicate: int = 1  # replicas of a shard group [ranks]
    dp_shard: int = 1  # ranks that share parameters, gradients or optimizer state, with those of cp [ranks]
    cp: int = 1  # parts of a sequence [ranks]
    tp: int = 1  # parts of a matrix [ranks]
    ep: int = 1  # groups of experts; re-uses ranks: divides dp_shard * cp * dp_replicate (times tp where they are not divided over it)
    etp: int = 1  # tensor-parallel ranks that divide one expert: 1 or tp [ranks]
    expert_copies: bool = False  # every tensor-parallel rank has all experts of its place along ep, and computes all tokens with them

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
        """W of expert parameters: ranks of one replica with the same experts; 1 where ep takes more ranks than a replica has."""
        replica = self._expert_ranks // self.dp_replicate
        return replica // (self.ep * self.etp) if replica % (self.ep * self.etp) == 0 else 1

    def text(self) -> str:
        """``pp=2,dp_shard=4,tp=2``: the axes that are longer than 1."""
        long = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name != "expert_copies" and getattr(self, f.name) > 1]
        return ",".join(long) or "one rank"


@dataclass(frozen=True)
class Strategy:
    """How data-parallel ranks share the model. None: as the framework does by itself, see ``Plan``."""

    name: str = "fsdp2"  # one of STRATEGIES; none: one rank alone with its parameters, and no wrapper around the model
    reshard_after_forward: bool | int | None = None  # units are freed behind forward; a number: stay sharded over so many ranks [ranks]
    reshard_after_backward: bool | None = None  # False: units stay gathered from the first micro-batch to the end of the step
    sync_every_micro_batch: bool | None = None  # gradients are reduced in each, not only in the last
    gradient_as_bucket_view: bool = False  # ddp: gradients are views of the buckets
    bucket_cap_mb: float | None = None  # limit of ddp's and ZeRO's buckets [MiB]; None: torch's 25 with a first one of 1
    backward_prefetch: str = "pre"  # fsdp1, zero3: when the next unit is gathered: pre, post or none
    use_orig_params: bool = True  # fsdp1: each parameter is aligned by itself

    def __post_init__(self) -> None:
        if self.name not in STRATEGIES:
            raise UsageError(f"there is no strategy called {self.name!r}", choose(self.name, STRATEGIES))
        if self.backward_prefetch not in ("pre", "post", "none"):
            raise UsageError(f"there is no backward_prefetch {self.backward_prefetch!r}", "choose pre, post or none")
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise UsageError(f"buckets of {self.bucket_cap_mb} MiB", "give a bucket_cap_mb above 0")
        after = self.reshard_after_forward
        if after is not None and not isinstance(after, bool) and after < 1:
            raise UsageError(f"reshard_after_forward {self.reshard_after_forward}", "give true, false, or a group size of at least 1")

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank keeps only a part of each parameter."""
        return self.name not in REPLICATED


@dataclass(frozen=True)
class Implementation:
    """What a framework does by habit, where a plan leaves it open. ``IMPLEMENTATIONS`` names some; a plan may change single habits."""

    name: str = "torch"
    padding: str = ""  # whose rules pad what is sharded (``padding.FRAMEWORKS``); '': those of the strategy
    receive_buffers: bool = True  # a pipeline holds a buffer for each message of a step (torch); False: uses a few again (Megatron)
    frees_outputs: bool = False  # a pipeline stage's output is freed once it is sent (Megatron: deallocate_pipeline_outputs)
    regather_inputs: bool = True  # sequence parallelism gathers a linear layer's input again in backward, and sums norms' gradients at once
    norm_kernel: str = "fused"  # fused saves its input; composite, an rmsnorm of single operations, input and normalised values in fp32
    expand_kv: bool = False  # keys and values are repeated for every head before attention
    fused_loss: bool = False  # no copies of logits beside the saved one
    keeps_logits: bool = False  # the logits themselves live until the head's backward
    keeps_gathered_keys: bool = False  # context parallelism by all-gather keeps all ranks' keys and values for backward
    expert_counts: bool = True  # ranks of ep tell each other how many rows come before they send them
    single_operations: bool = False  # attention over cp and experts are single operations: rows sorted by expert, one after another
    optimizer_loop: str = "auto"  # foreach, fused, loop; auto: foreach on cuda unless parameters are DTensors, else loop
    backend_copies: bool = False  # a collective works on a copy of its whole buffer (gloo)
    averages_after: bool = False  # ddp without DDP: gradients are copied into flat buffers and averaged behind the last backward
    deepspeed_allreduce: bool = False  # ZeRO-1 and 2 all-reduce whole buckets and keep a slice
    marks_last_backward: bool = False  # FSDP2 is told which backward is the last: the others leave their last reduction's input behind
    last_stays: bool = False  # the last unit is not freed between its forward and backward
    root_reshards: bool = False  # the root is freed behind forward as other units are

    def __post_init__(self) -> None:
        if self.padding and self.padding not in FRAMEWORKS:
            raise UsageError(f"there are no padding rules of {self.padding!r}", f"choose one of {', '.join(FRAMEWORKS)}")
        for name, allowed in (("optimizer_loop", ("auto", "foreach", "fused", "loop")), ("norm_kernel", ("fused", "composite"))):
            if getattr(self, name) not in allowed:
                raise UsageError(f"there is no {name} {getattr(self, name)!r}", f"choose {', '.join(allowed)}")


IMPLEMENTATIONS = {
    each.name: each
    for each in (
        Implementation("torch", regather_inputs=False),
        Implementation("deepspeed", padding="deepspeed", deepspeed_allreduce=True),
        Implementation("megatron", padding="megatron", receive_buffers=False, frees_outputs=True, fused_loss=True, optimizer_loop="fused"),
        # the loop of tracekit.workloads
        Implementation("workloads", regather_inputs=False, single_operations=True),
    )
}


@dataclass(frozen=True)
class Batch:
    """What one data-parallel rank works on in a step."""

    micro_batch: int = 1  # sequences that go through the model at once [sequences]
    micro_batches: int = 1  # how often in a step
    recompute: str = "none"  # full: a layer keeps only its input; selective, selective-megatron, selective-torchtitan: see ``saved``
    attention: str = "flash"  # eager keeps the s x s scores
    causal: bool = False  # FLOPs of attention count only what a causal mask leaves, half of it

    def __post_init__(self) -> None:
        for name in ("micro_batch", "micro_batches"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", "give a number of at least 1")
        for name, choices in (("recompute", RECOMPUTE), ("attention", ATTENTION)):
            if getattr(self, name) not in choices:
                raise UsageError(f"there is no {name} {getattr(self, name)!r}", f"choose {', '.join(choices)}")


@dataclass(frozen=True)
class Plan:
    """Everything beside the model."""

    mesh: MeshSizes = field(default_factory=MeshSizes)
    strategy: Strategy = field(default_factory=Strategy)  # what data-parallel ranks share, and when they gather and reduce it
    recipe: Recipe = RECIPES["fsdp_bf16_fp32_reduce"]  # types of parameters, gradients, optimizer state and what is sent
    batch: Batch = field(default_factory=Batch)
    implementation: Implementation = IMPLEMENTATIONS["torch"]  # habits of the framework
    schedule: str = "1f1b"  # of the pipeline: see ``pipeline``
    virtual_stages: int = 1  # chunks of the model a pipeline rank
    sequence_parallel: bool = False  # with tp, norms and dropout work on s/tp tokens
    vocabulary_parallel: bool = True  # embedding and head are divided over tp
    vocabulary_parallel_loss: bool = True  # logits stay divided over tp until the loss
    context_parallel: str = "ring"  # how ranks of cp see each other's keys: ring, allgather, ulysses or blockwise
    expert_padding: float = 0.0  # rows an expert takes from each rank, in even shares, zeros where fewer come; 0: as many as come
    expert_overlap: bool = False  # experts' exchanges of one micro-batch run behind the compute of another, which stays in memory
    wrap: str = "layers"  # what FSDP gathers at once: see ``shape.parameters``
    device: str = "cuda"  # cuda rounds allocations to 512 bytes, cpu does not
    buckets: tuple[int, ...] = ()  # recorded: elements of ddp's buckets; none: as torch cuts them
    expert_loads: tuple[int, ...] = ()  # recorded: rows that reach this rank's experts in a micro-batch, by layer; -1: as many as leave

    def __post_init__(self) -> None:
        check_schedule(self.schedule, self.mesh.pp, self.batch.micro_batches, self.virtual_stages)
        choices: dict[str, tuple[Any, ...]] = {
            "context_parallel": ("ring", "allgather", "ulysses", "blockwise"),
            "device": ("cuda", "cpu"),
            "wrap": ("layers", "ends", "whole", "parameters"),
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
    def framework(self) -> str:
        """Whose padding rules apply (``padding.FRAMEWORKS``)."""
        own = {"fsdp1": "torch_fsdp1", "fsdp2": "torch_fsdp2", "hsdp": "torch_fsdp2", "zero3": "deepspeed", "ddp": "none", "none": "none"}
        given = self.implementation.padding if self.implementation.padding != "megatron" or not self.strategy.shards_parameters else ""
        return given or own.get(self.strategy.name, "buckets")

    @property
    def vee(self) -> bool:
        """Whether the chunks of the model lie on the stages as a V: the first stage has both ends."""
        return self.schedule == "zbv" and self.mesh.pp > 1

    @property
    def last_stage(self) -> int:
        """The stage with the head and the loss."""
        return 0 if self.vee else self.mesh.pp - 1

    @property
    def _torch_pipeline(self) -> bool:
        """FSDP2 under torch's pipelines: units are gathered once a step and stay, whole gradients are added up and reduced at its end.

        torch/distributed/pipelining/stage.py, ``backward_maybe_with_nosync``; torchtitan asks for the same in forward.
        """
        return self.mesh.pp > 1 and self.framework == "torch_fsdp2" and self.batch.micro_batches > 1

    @property
    def reshard_after_forward(self) -> bool | int:
        """What the strategy says; else units are freed, but for pipelines of torch."""
        given = self.strategy.reshard_after_forward
        return not self._torch_pipeline if given is None else given

    @property
    def reshard_after_backward(self) -> bool:
        """What the strategy says; else units are freed, but for pipelines of torch."""
        given = self.strategy.reshard_after_backward
        return not (self._torch_pipeline and self.reshard_after_forward is False) if given is None else given

    @property
    def syncs_each(self) -> bool:
        """Whether gradients are reduced after each micro-batch: where they are not kept whole, but for pipelines of torch."""
        given = self.strategy.sync_every_micro_batch
        return not (self._torch_pipeline or self.strategy.name in WHOLE_GRADIENTS) if given is None else given

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
