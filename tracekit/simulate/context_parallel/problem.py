"""Attention whose tokens lie on context-parallel ranks: which rank has which, what it sees, and the whole thing on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tracekit.simulate.attention import Mask, Partial, attend, attend_backward, attend_block, causal_mask, delta_of
from tracekit.simulate.functions import Float
from tracekit.simulate.holdings import PicturedRanks
from tracekit.simulate.virtual import Tags

Places = npt.NDArray[np.int64]
LAYOUTS = ("contiguous", "zigzag")


class Shared(NamedTuple):
    """One tensor a rank: that rank's tokens."""

    q: list[Float]
    k: list[Float]
    v: list[Float]
    dout: list[Float]


class AttentionResults(NamedTuple):
    """Output and gradients, whole, tokens in order."""

    out: Float
    dq: Float
    dk: Float
    dv: Float


@dataclass(frozen=True)
class AttentionProblem:
    """q and dout (s, b, a, d), k and v (s, b, g, d), whole; ``places[rank]`` are the tokens of a rank in the order it keeps them."""

    q: Float
    k: Float
    v: Float
    dout: Float
    places: tuple[Places, ...]
    causal: bool

    @property
    def ranks(self) -> int:
        """Context-parallel ranks c."""
        return len(self.places)

    @property
    def everywhere(self) -> Places:
        """Places of all tokens in the order in which gathering puts them."""
        return np.concatenate(self.places)

    def share(self, whole: Float) -> list[Float]:
        """Each rank's tokens."""
        return [whole[mine] for mine in self.places]

    def whole(self, shares: list[Float]) -> Float:
        """The inverse of ``share``, for the comparison afterwards; nothing is sent."""
        gathered = np.concatenate(shares)
        ordered = np.empty_like(gathered)
        ordered[self.everywhere] = gathered
        return ordered

    def shared(self) -> Shared:
        """All four tensors by rank."""
        return Shared(self.share(self.q), self.share(self.k), self.share(self.v), self.share(self.dout))


def token_places(layout: str, s: int, c: int) -> tuple[Places, ...]:
    """Places of every rank's tokens. The caller has checked that they divide.

    ``contiguous``: rank r has the r-th of c parts. ``zigzag``: of 2c parts rank r has r and 2c-1-r, an early and a late one, so that with a
    causal mask all ranks have the same work.
    """
    if layout == "contiguous":
        return tuple(np.split(np.arange(s, dtype=np.int64), c))
    parts = np.split(np.arange(s, dtype=np.int64), 2 * c)
    return tuple(np.concatenate([parts[rank], parts[2 * c - 1 - rank]]) for rank in range(c))


def one_rank(problem: AttentionProblem) -> AttentionResults:
    """Full attention, forward and backward, without any ranks."""
    places = np.arange(len(problem.q), dtype=np.int64)
    mask = causal_mask(places, places) if problem.causal else None
    out, lse = attend(problem.q, problem.k, problem.v, mask)
    gradients = attend_backward(problem.q, problem.k, problem.v, lse, delta_of(out, problem.dout), problem.dout, mask)
    return AttentionResults(out, *gradients)


@dataclass
class Machine:
    """The ranks at work on one problem. ``pairs[rank]``: scores a forward computes, a query-key pair of a head each.

    ``rounds``: the same for every round in which all ranks work side by side, one list a round. ``keep_gathered``: all_gather keeps keys
    and values of all tokens for backward. ``forward_bytes[rank]``, ``forward_steps``: what had been sent, in how many logical steps, when
    forward ended.
    """

    problem: AttentionProblem
    ranks: PicturedRanks
    pairs: list[int] = field(default_factory=list)
    rounds: list[list[int]] = field(default_factory=list)
    keep_gathered: bool = False
    forward_bytes: list[int] = field(default_factory=list)
    forward_steps: int = 0

    def __post_init__(self) -> None:
        self.pairs = [0] * self.problem.ranks

    def end_forward(self) -> None:
        """Note what forward has sent; the rest is backward's."""
        self.forward_bytes = self.ranks.network.sent_bytes.tolist()
        self.forward_steps = self.ranks.network.steps

    def begin_round(self) -> None:
        """What is attended from now on is one round."""
        self.rounds.append([0] * self.problem.ranks)

    def mask(self, queries: Places, keys: Places) -> Mask:
        """What these queries see of these keys; None is everything."""
        return causal_mask(queries, keys) if self.problem.causal else None

    def attend(self, rank: int, q: Float, k: Float, v: Float, queries: Places, keys: Places) -> Partial | None:
        """One block on ``rank``, its pairs counted; None where the mask hides all of it, so that there is nothing to compute."""
        mask = self.mask(queries, keys)
        seen = (len(queries) * len(keys) if mask is None else int(mask.sum())) * q.shape[1] * q.shape[2]
        self.pairs[rank] += seen
        self.rounds[-1][rank] += seen
        return attend_block(q, k, v, mask) if seen else None


def cells(machine: Machine, name: str, arrays: list[Float], owners: list[int] | None = None) -> None:
    """Hold ``arrays`` under ``name``; ``owners[rank]``: whose tokens a rank's array is about, when they are not its own.

    The name gives the kind: q, k, v are inputs, what begins with d is a gradient, what is of other ranks' tokens a buffer.
    """
    labels = None if owners is None else [f"{name} of rank {owner}" for owner in owners]
    if name in ("dk and dv of all", "dq of all") or (owners is not None and name.startswith("d")):
        kind = "partial_sum"
    elif name.startswith("d") and not name.startswith(("dout", "delta")):
        kind = "gradient"
    elif owners is not None or name.endswith(" of all"):
        kind = "buffer"
    else:
        kind = "input" if name in ("q", "k", "v") else "activation"
    machine.ranks.keep(name, arrays, kind, labels)


def tags(phase: str, label: str) -> Tags:
    """What every transfer of context parallel is told."""
    return {"axis": "cp", "purpose": "context_parallel", "phase": phase, "label": label}


def floats(arrays: list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]) -> list[Float]:
    """Arrays that have come from the network, as what they were."""
    return [np.asarray(array, np.float64) for array in arrays]


def pairs(one: list[Float], other: list[Float]) -> list[Float]:
    """Two tensors a rank as one, in front: (2, tokens, ...)."""
    return [np.stack(both) for both in zip(one, other, strict=True)]


def results(machine: Machine, out: list[Float], dq: list[Float], dk: list[Float], dv: list[Float]) -> AttentionResults:
    """The ranks' shares put together, for the comparison afterwards."""
    return AttentionResults(*(machine.problem.whole(shares) for shares in (out, dq, dk, dv)))


def start(machine: Machine) -> Shared:
    """Every rank has its own tokens."""
    shared = machine.problem.shared()
    for name in ("q", "k", "v"):
        cells(machine, name, getattr(shared, name))
    machine.ranks.picture("start", "Every rank has q, k and v of its own tokens.")
    return shared


def keep_partials(machine: Machine, partials: list[Partial]) -> None:
    """Hold unfinished attention."""
    for name in ("o", "m", "l"):
        cells(machine, name, [getattr(partial, name) for partial in partials])
