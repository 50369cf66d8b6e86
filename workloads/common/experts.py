"""A mixture of experts that replaces ``Mlp``: router, dispatch of tokens to the ranks that hold their experts, experts, combine.

Shapes: n tokens of this rank, H hidden size, E experts, k choices a token, C capacity of an expert, R ranks of the expert group. A rank
holds experts ``E/R * place`` to ``E/R * (place + 1) - 1``; they keep their numbers in parameter names (``mlp.experts.5.up.weight``), so
that they start from the same values however many ranks share them.

    router      probabilities over all experts (fp32); the k largest are a token's choices, divided by their sum where k > 1
    balance     E sum_i f_i P_i, the auxiliary loss: f_i the share of this rank's choices that fell on expert i, before any is dropped,
                P_i its mean probability; 1 where all are alike, up to E where one expert takes everything. No rank is asked for its share
    capacity    of each expert for each rank's tokens: ceil(factor * n * k / E); what is beyond it is dropped, first choices go first
    dispatch    rows sorted by expert; the ranks tell each other how many come (counts), then exchange rows with uneven splits. With
                padding every expert gets C rows from every rank, zeros where there are fewer: even splits, no counts
    combine     the same exchange backwards; a token's result is the sum of its experts' outputs times their probabilities
Sources: GShard, arXiv:2006.16668; Switch, arXiv:2101.03961 (the balance: equations 4 to 6); Mixtral, arXiv:2401.04088; dropless exchanges,
arXiv:2211.15841.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tracekit.errors import UsageError
from tracekit.manifest import Expected, ExpertLoad

from .transformer import Mlp, Shape


@dataclass(frozen=True)
class Routing:
    """How tokens find their experts. ``capacity_factor`` 0: no limit."""

    experts: int = 8
    top_k: int = 2
    capacity_factor: float = 0.0
    padding: bool = False
    auxiliary_loss: float = 0.0

    def check(self, ranks: int) -> None:
        """UsageError where the figures do not fit together."""
        if self.experts < 1 or self.experts % ranks:
            raise UsageError(f"{self.experts} experts do not divide into {ranks} ranks of axis ep", "change --experts or --mesh")
        if not 1 <= self.top_k <= self.experts:
            raise UsageError(f"a token cannot choose {self.top_k} of {self.experts} experts", "change --top-k")
        if not 0 <= self.capacity_factor < math.inf:
            raise UsageError(f"a capacity factor of {self.capacity_factor} makes no sense", "give 0 (no limit) or a positive number")
        if not 0 <= self.auxiliary_loss < math.inf:
            raise UsageError(f"an auxiliary loss times {self.auxiliary_loss} makes no sense", "give 0 (none) or a small number, 0.01 say")
        if self.padding and not self.capacity_factor:
            raise UsageError("--padding fills every expert up to its capacity, and none is set", "add --capacity-factor, 1.25 for example")

    def capacity(self, tokens: int) -> int | None:
        """Most rows that an expert takes from one rank's ``tokens``; None: no limit."""
        return math.ceil(self.capacity_factor * tokens * self.top_k / self.experts) if self.capacity_factor else None


@dataclass
class Load:
    """What a layer's experts had to do, added up until ``MoE.take_load``. Numbers of rows without padding."""

    routed: list[int] = field(default_factory=list)  # of this rank's tokens to every expert, after dropping
    received: list[int] = field(default_factory=list)  # from all ranks, for every expert of this rank
    dropped: int = 0
    capacity: int | None = None

    def add(self, plan: Plan, received: list[int]) -> None:
        """One more forward."""
        routed: list[int] = plan.routed.tolist()
        self.routed = [a + b for a, b in zip(self.routed or [0] * len(routed), routed, strict=True)]
        self.received = [a + b for a, b in zip(self.received or [0] * len(received), received, strict=True)]
        self.dropped += plan.choices - sum(routed)
        self.capacity = plan.capacity


class Experts(nn.ModuleDict):
    """Experts ``numbers``, each an ``Mlp``."""

    def __init__(self, shape: Shape, numbers: Sequence[int]) -> None:
        super().__init__({str(number): Mlp(shape) for number in numbers})

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows [sum(counts), H], sorted by expert -> outputs in the same order. An expert without rows still gets a gradient, zero."""
        pieces = [expert(piece) for expert, piece in zip(self.values(), rows.split(list(counts)), strict=True)]
        return torch.cat(pieces)


@dataclass(frozen=True)
class Plan:
    """Which rows go where. A slot is one choice of one token: number ``choice * n + token``.

    ``choices``: slots in all; ``slot``: those that were kept, sorted by expert; ``place``: the row of each in the buffer that is sent;
    ``counts``: rows of that buffer for every expert; ``routed``: those that hold a token. Without padding place is 0, 1, 2, ... and routed
    equals counts.
    """

    slot: Tensor
    place: Tensor
    counts: Tensor
    routed: Tensor
    choices: int
    capacity: int | None
    padding: bool

    @classmethod
    def of(cls, choice_kn: Tensor, routing: Routing) -> Plan:
        """From the experts [k, n] that were chosen."""
        chosen = choice_kn.flatten()
        order = chosen.argsort(stable=True)
        routed = chosen.bincount(minlength=routing.experts)
        position = torch.arange(len(order), device=order.device) - (routed.cumsum(0) - routed)[chosen[order]]
        capacity = routing.capacity(choice_kn.shape[1])
        if capacity is None:
            return cls(order, torch.arange(len(order), device=order.device), routed, routed, len(order), None, False)
        slot, position = order[position < capacity], position[position < capacity]
        routed = routed.clamp(max=capacity)
        if not routing.padding:
            return cls(slot, torch.arange(len(slot), device=slot.device), routed, routed, len(order), capacity, False)
        full = torch.full_like(routed, capacity)
        return cls(slot, chosen[slot] * capacity + position, full, routed, len(order), capacity, True)


class Exchange(torch.autograd.Function):
    """All-to-all of rows between the ranks of the experts; backward goes the other way round."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way) -> Tensor:
        """[sum(way.sent), H] -> [sum(way.received), H]."""
        ctx.way = way
        return way.exchange(rows, way.sent, way.received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """[sum(way.received), H] -> [sum(way.sent), H]."""
        return ctx.way.exchange(grads[0], ctx.way.received, ctx.way.sent), None


@dataclass(frozen=True)
class Way:
    """``sent[i]`` rows go to rank i, ``received[i]`` come from it. ``name`` is that of the range around the exchange."""

    name: str
    sent: list[int]
    received: list[int]
    even: bool
    group: dist.ProcessGroup

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """One all-to-all, with split lists unless they are even by design."""
        result = rows.new_zeros((sum(received), *rows.shape[1:]))
        splits = (None, None) if self.even else (received, sent)
        with torch.profiler.record_function(self.name):
            dist.all_to_all_single(result, rows.contiguous(), *splits, group=self.group)
        return result


class MoE(nn.Module):
    """Router and experts. Without a ``group`` all experts are here and nothing travels. ``mixture`` makes it an ``mlp`` of Transformer."""

    def __init__(self, shape: Shape, routing: Routing, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group if group is not None and group.size() > 1 else None
        self.ranks: int = self.group.size() if self.group is not None else 1
        place = self.group.rank() if self.group is not None else 0
        routing.check(self.ranks)
        self.routing = routing
        each = routing.experts // self.ranks
        self.owned = range(each * place, each * (place + 1))
        self.router = nn.Linear(shape.hidden, routing.experts, bias=False)
        self.experts = Experts(shape, self.owned)
        self.load = Load()
        self.imbalance: Tensor | None = None  # of the last forward, with its gradient

    def forward(self, x_BTH: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]. A token whose every choice was dropped gets zeros: the residual beside this layer carries it on."""
        x_nH = x_BTH.flatten(0, 1)
        weight_kn, choice_kn = self.choose(x_nH)
        plan = Plan.of(choice_kn, self.routing)
        rows = _in_compute_type(x_nH)[plan.slot % len(x_nH)]
        if plan.padding:
            rows = rows.new_zeros((plan.counts.numel() * (plan.capacity or 0), rows.shape[1])).index_copy(0, plan.place, rows)
        outputs = self.work(rows, plan)[plan.place]
        slots = outputs.new_zeros((choice_kn.numel(), outputs.shape[1])).index_copy(0, plan.slot, outputs)
        return (slots.unflatten(0, choice_kn.shape) * weight_kn[..., None]).sum(0).view_as(x_BTH).to(x_BTH.dtype)

    def choose(self, x_nH: Tensor) -> tuple[Tensor, Tensor]:
        """(probabilities, experts), both [k, n]: the first choices of all tokens, then the second, ..."""
        with torch.autocast(x_nH.device.type, enabled=False):
            probability_nE = nn.functional.linear(x_nH.float(), self.router.weight.float()).softmax(-1)
        weight_nk, choice_nk = probability_nE.topk(self.routing.top_k, -1)
        if self.routing.auxiliary_loss:
            share_E = choice_nk.flatten().bincount(minlength=self.routing.experts) / choice_nk.numel()
            self.imbalance = self.routing.experts * (share_E * probability_nE.mean(0)).sum()
        if self.routing.top_k > 1:  # of one choice the quotient would always be 1, and the router would learn nothing
            weight_nk = weight_nk / weight_nk.sum(-1, keepdim=True)
        return weight_nk.mT, choice_nk.mT

    def work(self, rows: Tensor, plan: Plan) -> Tensor:
        """Rows sorted by expert -> the experts' outputs in the same order, by way of the ranks that hold them."""
        counts_RE = plan.counts.view(self.ranks, -1)
        arriving_RE = self._arriving(counts_RE, plan).cpu()
        sent, received = counts_RE.sum(1).tolist(), arriving_RE.sum(1).tolist()
        if self.group is not None:
            rows = Exchange.apply(rows, Way("expert dispatch", sent, received, plan.padding, self.group))
        # What arrives is sorted by rank, then by expert; an expert wants all its rows together.
        expert = torch.arange(len(self.owned)).repeat(self.ranks).repeat_interleave(arriving_RE.flatten())
        order = expert.argsort(stable=True).to(rows.device)
        outputs = self.experts(rows[order], arriving_RE.sum(0).tolist())[order.argsort()]
        if self.group is not None:
            outputs = Exchange.apply(outputs, Way("expert combine", received, sent, plan.padding, self.group))
        # With padding the zeros that arrive look like tokens, and nobody tells how many are.
        tokens = plan.routed if self.group is None else None if plan.padding else arriving_RE.sum(0)
        self.load.add(plan, [] if tokens is None else tokens.tolist())
        return outputs

    def _arriving(self, counts_RE: Tensor, plan: Plan) -> Tensor:
        """[R, experts of this rank]: rows that come from every rank; with padding the capacity from each."""
        if self.group is None or plan.padding:
            return counts_RE
        arriving = counts_RE.clone()  # a backend that moves nothing (fake) leaves it so: an exchange that is possible
        with torch.profiler.record_function("expert dispatch"):
            dist.all_to_all_single(arriving, counts_RE.contiguous(), group=self.group)
        return arriving

    def take_load(self, layer: str, step: int) -> ExpertLoad:
        """What was done since the last call, for the manifest."""
        load, self.load = self.load, Load()
        return ExpertLoad(layer, step, list(self.owned), self.routing.top_k, self.routing.padding, **vars(load))


def mixture(routing: Routing, group: dist.ProcessGroup | None = None) -> Callable[[Shape], MoE]:
    """``mlp`` of ``Transformer``: a mixture of experts in every block, its experts spread over ``group``."""
    return lambda shape: MoE(shape, routing, group)


def mixtures(models: Iterable[nn.Module]) -> list[tuple[str, MoE]]:
    """(name, module) of every mixture of experts."""
    return [(name, module) for model in models for name, module in model.named_modules() if isinstance(module, MoE)]


def balance(model: nn.Module, coefficient: float) -> Tensor | float:
    """The auxiliary loss of the last forward, of all layers, times its coefficient; 0 without one."""
    found = [module.imbalance for _, module in mixtures([model]) if module.imbalance is not None]
    return coefficient * torch.stack(found).sum() if found else 0.0


def is_expert(name: str) -> bool:
    """Whether a parameter of this name belongs to one expert: other ranks of the expert group do not have it."""
    return ".experts." in name


def take_loads(models: Iterable[nn.Module], step: int) -> list[ExpertLoad]:
    """Of every layer, since the last call."""
    return [module.take_load(name, step) for name, module in mixtures(models)]


def exchanges(routing: Routing, tokens: int, rounds: int, row_bytes: int) -> list[Expected]:
    """All-to-alls of a rank and step over axis ``ep``: ``rounds`` forwards (layers x micro-batches) of ``tokens`` tokens each.

    Bytes of uneven exchanges follow the router, step by step: they are not stated.
    """
    capacity = routing.capacity(tokens)
    if routing.padding and capacity is not None:
        size = 2 * rounds * routing.experts * capacity * row_bytes
        return [Expected("all_to_all", "ep", purpose, 2 * rounds, size) for purpose in ("expert_dispatch", "expert_combine")]
    return [
        Expected("all_to_all", "ep", "expert_dispatch", 3 * rounds, -1),
        Expected("all_to_all", "ep", "expert_combine", 2 * rounds, -1),
    ]


def _in_compute_type(x: Tensor) -> Tensor:
    """Under autocast in its type, so that half the bytes travel."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
