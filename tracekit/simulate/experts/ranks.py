"""Expert parallel: experts lie on ranks, tokens travel to them and back by all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tracekit.simulate.experiment import Cell
from tracekit.simulate.experts.layer import ExpertsResult, SavedExpert, Weights, expert_backward, expert_forward
from tracekit.simulate.experts.routing import Indices, Routing, SendingOrder, router_backward
from tracekit.simulate.functions import Float
from tracekit.simulate.holdings import PicturedRanks
from tracekit.simulate.virtual import Tags

#: Bytes of one count of tokens under way.
COUNT_BYTES = 8


@dataclass
class Exchange:
    """Brings rows to the ranks of their experts and back into the order in which they were sent.

    Rank r holds experts r E/EP to (r+1) E/EP - 1. ``known[j][i]``: rows that rank j gets from rank i for each of its experts, learnt from
    the exchange of counts, or the capacity where buffers are padded. ``sent[name][rank]``: bytes of every all-to-all.
    """

    ranks: PicturedRanks
    orders: Sequence[SendingOrder]
    padded: bool
    known: list[list[Indices]] = field(default_factory=list)
    sent: dict[str, list[int]] = field(default_factory=dict)

    def learn_counts(self) -> None:
        """Every rank tells every other how many rows come for each of its experts; padded buffers need no telling."""
        pieces = [list(np.split(order.sizes, self.ranks.world)) for order in self.orders]
        if self.padded:
            self.known = [[row[j] for row in pieces] for j in self.ranks.group]
            return
        got = self._all_to_all(pieces, "counts", "forward", "expert_dispatch", COUNT_BYTES)
        self.known = [[np.asarray(counts, np.int64) for counts in row] for row in got]

    def dispatch(self, rows: Sequence[Float], name: str, phase: str) -> list[list[Float]]:
        """``rows[rank]``, one a kept choice in the order of sending -> [rank][its expert] rows from all ranks, in the order of ranks."""
        pieces = []
        for order, mine in zip(self.orders, rows, strict=True):
            buffer = np.zeros((int(order.sizes.sum()), mine.shape[1]))
            buffer[order.rows] = mine
            pieces.append(np.split(buffer, np.cumsum(order.sizes.reshape(self.ranks.world, -1).sum(axis=1))[:-1].tolist()))
        got = self._all_to_all(pieces, name, phase, "expert_dispatch" if phase == "forward" else "expert_combine")
        grouped = []
        for known, arrived in zip(self.known, got, strict=True):
            blocks = [np.split(array, np.cumsum(sizes)[:-1].tolist()) for sizes, array in zip(known, arrived, strict=True)]
            grouped.append([np.asarray(np.concatenate(of_expert), np.float64) for of_expert in zip(*blocks, strict=True)])
        return grouped

    def combine(self, grouped: Sequence[Sequence[Float]], name: str, phase: str) -> list[Float]:
        """The way back: [rank][its expert] rows -> rows of each rank in the order of its order."""
        pieces = []
        for known, mine in zip(self.known, grouped, strict=True):
            sizes = np.stack(known)  # (source, own expert)
            blocks = [np.split(array, np.cumsum(sizes[:, e])[:-1].tolist()) for e, array in enumerate(mine)]
            pieces.append([np.concatenate(to_source) for to_source in zip(*blocks, strict=True)])
        got = self._all_to_all(pieces, name, phase, "expert_combine" if phase == "forward" else "expert_dispatch")
        return [np.asarray(np.concatenate(arrived), np.float64)[order.rows] for order, arrived in zip(self.orders, got, strict=True)]

    def _all_to_all(
        self, pieces: Sequence[Sequence[Float | Indices]], name: str, phase: str, purpose: str, element_bytes: int | None = None
    ) -> list[list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]]:
        network = self.ranks.network
        tags: Tags = {"axis": "ep", "purpose": purpose, "phase": phase, "label": name}
        if element_bytes is not None:
            tags["element_bytes"] = element_bytes
        before = network.sent_bytes.copy()
        got = network.all_to_all(pieces, self.ranks.group, **tags)
        self.sent[name] = (network.sent_bytes - before).tolist()
        return got


def rows_out_of_place(orders: Sequence[SendingOrder], padded: bool, xs: Sequence[Float]) -> int:
    """Rows that differ from the token they were, after a dispatch and a combine with nothing in between: 0, or the order is lost."""
    exchange = Exchange(PicturedRanks(len(orders), 1), orders, padded)
    exchange.learn_counts()
    sent = [x[order.tokens] for x, order in zip(xs, orders, strict=True)]
    back = exchange.combine(exchange.dispatch(sent, "there", "forward"), "back", "forward")
    return sum(int((found != rows).any(axis=1).sum()) for found, rows in zip(back, sent, strict=True))


def run_ranks(
    exchange: Exchange, weights: Weights, routings: Sequence[Routing], xs: Sequence[Float], dys: Sequence[Float]
) -> ExpertsResult:
    """Forward and backward over all ranks, put together; the same as ``one_rank`` but for rounding.

    The router is on every rank; its gradient is the sum over ranks, which data parallel would all-reduce: it is added up without a message.
    """
    ranks, orders = exchange.ranks, exchange.orders
    local = len(weights.first) // ranks.world
    first, second = (matrices.reshape(ranks.world, local, *matrices.shape[1:]) for matrices in (weights.first, weights.second))
    ranks.keep("router", [weights.router.copy() for _ in ranks.group], "parameter")
    for name, matrices in (("W1", first), ("W2", second)):
        ranks.keep(name, list(matrices), "parameter", [f"{name} of {_experts(rank, local)}" for rank in ranks.group])
    ranks.keep("x", xs, "input")
    ranks.keep("weights of chosen experts", [routing.weights for routing in routings])
    ranks.picture("router", f"Every token has chosen {routings[0].experts.shape[1]} experts.")
    outs, saved = _forward(exchange, (first, second), [x[order.tokens] for x, order in zip(xs, orders, strict=True)])
    ys, rows_back, dweights = [], [], []
    for x, dy, routing, order, rows in zip(xs, dys, routings, orders, outs, strict=True):
        share = routing.weights[order.tokens, order.slots][:, None]
        y, gradient = np.zeros_like(x), np.zeros_like(routing.weights)
        np.add.at(y, order.tokens, share * rows)
        gradient[order.tokens, order.slots] = (dy[order.tokens] * rows).sum(axis=1)
        ys.append(y)
        dweights.append(gradient)
        rows_back.append(share * dy[order.tokens])
    ranks.keep("y", ys)
    ranks.picture("tokens in order again", "Each token is the weighted sum of what its experts returned; a dropped choice adds nothing.")
    back, dfirst, dsecond = _backward(exchange, (first, second), saved, rows_back)
    dxs, drouter = [], np.zeros_like(weights.router)
    for x, routing, order, rows, gradient in zip(xs, routings, orders, back, dweights, strict=True):
        dlogits = router_backward(routing, gradient)
        dx = dlogits @ weights.router.T
        np.add.at(dx, order.tokens, rows)
        dxs.append(dx)
        drouter += x.T @ dlogits
    ranks.drop("returned", "dx of chosen tokens")
    ranks.keep("dx", dxs, "gradient")
    ranks.picture("backward: tokens in order again", "dx of a token is the sum from its experts and the router.")
    return ExpertsResult(np.concatenate(ys), np.concatenate(dxs), drouter, np.concatenate(dfirst), np.concatenate(dsecond))


def _forward(exchange: Exchange, matrices: tuple[Float, Float], rows: Sequence[Float]) -> tuple[list[Float], list[list[SavedExpert]]]:
    """Rows returned to each rank, and what every expert saved."""
    ranks = exchange.ranks
    exchange.learn_counts()
    if not exchange.padded:
        ranks.picture("counts", "Every rank learns how many tokens come from where: the splits of the all-to-all.")
    grouped = exchange.dispatch(rows, "dispatch", "forward")
    _keep_rows(exchange, "arrived", grouped, "buffer")
    ranks.picture("dispatch", "All-to-all: every rank has the tokens of its experts, rank by rank.")
    outs: list[list[Float]] = []
    saved: list[list[SavedExpert]] = []
    for first, second, arrived in zip(*matrices, grouped, strict=True):
        done = [expert_forward(*of_expert) for of_expert in zip(first, second, arrived, strict=True)]
        outs.append([out for out, _ in done])
        saved.append([kept for _, kept in done])
    _keep_rows(exchange, "out", outs, "activation")
    ranks.picture("experts", "Each expert has run on its tokens.")
    returned = exchange.combine(outs, "combine", "forward")
    ranks.drop("out")
    ranks.keep("returned", returned)
    ranks.picture("combine", "All-to-all back: results are with the ranks of the tokens, in the order in which those were sent.")
    return returned, saved


def _backward(
    exchange: Exchange, matrices: tuple[Float, Float], saved: Sequence[Sequence[SavedExpert]], rows: Sequence[Float]
) -> tuple[list[Float], list[Float], list[Float]]:
    """(gradients of the rows of each rank, of the first, of the second matrices of each rank)."""
    ranks = exchange.ranks
    grouped = exchange.dispatch(rows, "gradient of combine", "backward")
    _keep_rows(exchange, "d out", grouped, "gradient")
    ranks.picture("backward: gradient of combine", "All-to-all: gradients of the results go to the experts, as the tokens did.")
    back: list[list[Float]] = []
    dfirst, dsecond = [], []
    for first, second, kept, gradients in zip(*matrices, saved, grouped, strict=True):
        done = [expert_backward(*of_expert) for of_expert in zip(first, second, kept, gradients, strict=True)]
        back.append([one[0] for one in done])
        dfirst.append(np.stack([one[1] for one in done]))
        dsecond.append(np.stack([one[2] for one in done]))
    ranks.drop("arrived", "d out")
    ranks.keep("dW1", dfirst, "gradient")
    ranks.keep("dW2", dsecond, "gradient")
    _keep_rows(exchange, "d arrived", back, "gradient")
    ranks.picture("backward: experts", "Gradients of the experts are whole: all tokens of an expert were on its rank.")
    returned = exchange.combine(back, "gradient of dispatch", "backward")
    ranks.drop("d arrived")
    ranks.keep("dx of chosen tokens", returned, "gradient")
    ranks.picture("backward: gradient of dispatch", "All-to-all back: gradients of the tokens are with their ranks.")
    return returned, dfirst, dsecond


def _keep_rows(exchange: Exchange, name: str, grouped: Sequence[Sequence[Float]], kind: str) -> None:
    """Hold what lies at the experts, one cell an expert, and one for its padding."""
    ranks = exchange.ranks
    counts = np.sum([order.counts for order in exchange.orders], axis=0)
    for rank, mine in enumerate(grouped):
        cells = []
        for place, array in enumerate(mine):
            expert, width = rank * len(mine) + place, array.shape[1] * ranks.element_bytes
            tokens, padding = int(counts[expert]), len(array) - int(counts[expert])
            cells.append(Cell(f"{name} e{expert}", kind, tokens * width, f"{tokens} tokens"))
            if padding:
                cells.append(Cell(f"{name} e{expert} padding", "padding", padding * width, f"{padding} rows"))
        ranks.keep_cells(rank, name, np.concatenate(mine), cells)


def _experts(rank: int, local: int) -> str:
    return f"e{rank * local}" if local == 1 else f"e{rank * local}-e{(rank + 1) * local - 1}"
