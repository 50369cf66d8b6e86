"""A transformer layer sharded over tensor-parallel ranks: real shards, real collectives.

A linear whose columns are cut needs the whole input on every rank; one whose rows are cut leaves a partial sum on every rank. Without
sequence parallel the input is there already and the partial sums are all-reduced. With it (arXiv:2205.05198) each rank keeps s/t of the
tokens outside the linears, so that the input is all-gathered along the sequence and the partial sums are reduce-scattered along it. In
backward the two change places; the input of the column-cut linear, of which only the shard was kept, is gathered once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.simulate.functions import Float, linear
from tracekit.simulate.holdings import PicturedRanks
from tracekit.simulate.tensor_parallel.layers import (
    Block,
    Gradients,
    Middle,
    Norm,
    bias_gradient,
    matmul_gradient,
    middle,
    middle_backward,
    norm,
    norm_backward,
)

Indices = npt.NDArray[np.int64]


class Ranks(PicturedRanks):
    """Tensor-parallel ranks, with or without sequence parallel.

    ``megatron``: with sequence parallel, what a column linear gathered is gathered again in backward, and small gradients are summed in one
    buffer, as Megatron does; else it is kept, and they are summed one by one, as DTensor does.
    """

    def __init__(self, t: int, sequence_parallel: bool, element_bytes: int, megatron: bool = False) -> None:
        super().__init__(t, element_bytes)
        self.keep_gathered = sequence_parallel and not megatron
        self._in_one_buffer = megatron
        self.sequence_parallel = sequence_parallel
        self._purpose = "sequence_parallel" if sequence_parallel else "tensor_parallel"

    def share(self, whole: Float) -> list[Float]:
        """What each rank keeps of tokens outside the linears: a part of the sequence, or everything."""
        return list(np.split(whole, self.world)) if self.sequence_parallel else [whole.copy() for _ in self.group]

    def whole(self, shares: Sequence[Float]) -> Float:
        """The inverse of ``share``, for the comparison afterwards; nothing is sent."""
        return np.concatenate(shares) if self.sequence_parallel else same(shares)

    def gather(self, shares: Sequence[Float], phase: str, label: str) -> list[Float]:
        """Whole tokens on every rank: an all-gather with sequence parallel, nothing without."""
        if not self.sequence_parallel:
            return list(shares)
        found = self.network.all_gather(shares, self.group, axis="tp", purpose=self._purpose, phase=phase, label=label)
        return [np.asarray(array, np.float64) for array in found]

    def gather_again(self, shares: Sequence[Float], kept: Sequence[Float], label: str) -> list[Float]:
        """In backward, what ``gather`` gave in forward: ``kept``, or gathered once more."""
        return list(kept) if self.keep_gathered else self.gather(shares, "backward", label)

    def add(self, partials: Sequence[Float], phase: str, label: str) -> list[Float]:
        """The sum over ranks: all-reduced, or reduce-scattered along the sequence with sequence parallel."""
        network, group = self.network, self.group
        if self.sequence_parallel:
            found = network.reduce_scatter(partials, group, axis="tp", purpose=self._purpose, phase=phase, label=label)
        else:
            found = network.all_reduce(partials, group, axis="tp", purpose=self._purpose, phase=phase, label=label)
        return [np.asarray(array, np.float64) for array in found]

    def add_gradients(self, gradients: Sequence[Gradients], names: Sequence[str]) -> None:
        """All-reduce the gradients of weights that every rank has but computed from its own tokens only."""
        if not self.sequence_parallel:
            return
        if self._in_one_buffer:
            self._add_together(gradients, names, "gradients of norms and row biases")
            return
        for name in names:
            self._add_together(gradients, [name], f"gradient of {name}")

    def _add_together(self, gradients: Sequence[Gradients], names: Sequence[str], label: str) -> None:
        if not names:
            return
        flat = [np.concatenate([mine[name] for name in names]) for mine in gradients]
        summed = self.network.all_reduce(flat, self.group, axis="tp", purpose="gradient_sync", phase="backward", label=label)
        ends = np.cumsum([gradients[0][name].size for name in names])[:-1].tolist()
        for mine, buffer in zip(gradients, summed, strict=True):
            mine |= dict(zip(names, np.split(np.asarray(buffer, np.float64), ends), strict=True))


def same(copies: Sequence[Float]) -> Float:
    """What every rank has; no two ranks may differ by a bit, or they would drift apart step by step."""
    assert all(np.array_equal(copy, copies[0]) for copy in copies), "ranks disagree on what they all should have"
    return copies[0]


@dataclass(frozen=True)
class ShardedBlock:
    """A block's weights on each rank. ``columns[rank]`` are its columns of A, ``rows[rank]`` its rows of R; r is on every rank."""

    block: Block
    columns: Sequence[Indices]
    rows: Sequence[Indices]

    def local(self, rank: int) -> tuple[Float, Float, Float]:
        """(A, a, R) of ``rank``."""
        block, columns = self.block, self.columns[rank]
        return block.column[:, columns], block.column_bias[columns], block.row[self.rows[rank]]

    @property
    def kind(self) -> tuple[int, int, bool]:
        """What ``middle`` has to know of one rank's share."""
        t = len(self.rows)
        return self.block.heads // t, self.block.kv_heads // t, self.block.causal

    def whole_gradients(self, gradients: Sequence[Gradients]) -> Gradients:
        """The ranks' shards put together, for the comparison afterwards."""
        name = self.block.name
        column, bias, row = np.empty_like(self.block.column), np.empty_like(self.block.column_bias), np.empty_like(self.block.row)
        for rank, mine in enumerate(gradients):
            column[:, self.columns[rank]] = mine[f"{name}.column"]
            bias[self.columns[rank]] = mine[f"{name}.column_bias"]
            row[self.rows[rank]] = mine[f"{name}.row"]
        whole = {f"{name}.column": column, f"{name}.column_bias": bias, f"{name}.row": row}
        return whole | {f"{name}.row_bias": same([mine[f"{name}.row_bias"] for mine in gradients])}


def shard_block(block: Block, t: int) -> ShardedBlock:
    """Cut a block over ``t`` ranks: columns and rows in even parts, in attention by whole heads of q, k and v. The caller has checked t."""
    width = block.row.shape[0] // t
    rows = [np.arange(rank * width, (rank + 1) * width, dtype=np.int64) for rank in range(t)]
    if not block.heads:
        return ShardedBlock(block, rows, rows)
    q_end, kv = block.heads * block.head_size, block.kv_heads * block.head_size
    own = kv // t
    columns = []
    for rank in range(t):
        keys = q_end + np.arange(rank * own, (rank + 1) * own, dtype=np.int64)
        columns.append(np.concatenate([rows[rank], keys, keys + kv]))
    return ShardedBlock(block, columns, rows)


@dataclass(frozen=True)
class SavedBlock:
    """What each rank keeps of a block's forward; ``whole`` is empty where the gathered input was let go."""

    inputs: Sequence[Float]
    whole: Sequence[Float]
    middles: Sequence[Middle]
    outs: Sequence[Float]


def forward_block(ranks: Ranks, sharded: ShardedBlock, inputs: Sequence[Float]) -> tuple[list[Float], SavedBlock]:
    """Forward over all ranks, from shares of tokens to shares of tokens."""
    block = sharded.block
    name = block.name
    ranks.keep(f"{name} input", inputs)
    whole = ranks.gather(inputs, "forward", f"{name}: input of the column linear")
    if ranks.sequence_parallel:
        ranks.keep(f"{name} gathered input", whole, "buffer")
        ranks.picture(f"{name}: all-gather", "Every rank gathers the tokens of the others along the sequence.")
    middles, outs, partials = [], [], []
    for rank, x in enumerate(whole):
        column, bias, row = sharded.local(rank)
        u, saved = middle(linear(x, column) + bias, *sharded.kind)
        middles.append(saved)
        outs.append(u)
        partials.append(linear(u, row))
    if not ranks.keep_gathered:
        ranks.drop(f"{name} gathered input")
    ranks.keep(f"{name} z", [saved.z for saved in middles])
    ranks.keep(f"{name} u", outs)
    ranks.keep(f"{name} partial sum", partials, "partial_sum")
    ranks.picture(f"{name}: local work", "Each rank runs its columns, its share in the middle and its rows: no communication.")
    sums = [share + block.row_bias for share in ranks.add(partials, "forward", f"{name}: output of the row linear")]
    ranks.drop(f"{name} partial sum")
    ranks.keep(f"{name} output", sums)
    ranks.picture(f"{name}: sum over ranks", f"The partial sums are {'reduce-scattered' if ranks.sequence_parallel else 'all-reduced'}.")
    return sums, SavedBlock(inputs, whole if ranks.keep_gathered else (), middles, outs)


def backward_block(
    ranks: Ranks, sharded: ShardedBlock, saved: SavedBlock, gradients: Sequence[Float]
) -> tuple[list[Float], list[Gradients]]:
    """Backward over all ranks: (shares of dx, each rank's gradients). Those of r are of the rank's own tokens, see ``add_gradients``."""
    name = sharded.block.name
    dys = ranks.gather(gradients, "backward", f"{name}: gradient of the row linear's output")
    found: list[Gradients] = []
    dzs = []
    for rank, dy in enumerate(dys):
        row = sharded.local(rank)[2]
        dzs.append(middle_backward(linear(dy, row.T), saved.middles[rank], *sharded.kind))
        found.append({f"{name}.row": matmul_gradient(saved.outs[rank], dy), f"{name}.row_bias": bias_gradient(gradients[rank])})
    ranks.keep(f"{name} dz", dzs, "gradient")
    for used in ("z", "u", "output"):
        ranks.drop(f"{name} {used}")
    ranks.picture(f"{name}: backward of the row linear", "Gradients of the rows, and what goes back through the middle.")
    whole = ranks.gather_again(saved.inputs, saved.whole, f"{name}: input of the column linear, again")
    partials = []
    for rank, (x, dz) in enumerate(zip(whole, dzs, strict=True)):
        found[rank] |= {f"{name}.column": matmul_gradient(x, dz), f"{name}.column_bias": bias_gradient(dz)}
        partials.append(linear(dz, sharded.local(rank)[0].T))
    for used in ("dz", "input", "gathered input"):
        ranks.drop(f"{name} {used}")
    ranks.keep(f"{name} partial sum of dx", partials, "partial_sum")
    for part in found[0]:
        ranks.keep(f"d {part}", [mine[part] for mine in found], "gradient")
    dxs = ranks.add(partials, "backward", f"{name}: gradient of the column linear's input")
    ranks.drop(f"{name} partial sum of dx")
    ranks.keep(f"{name} dx", dxs, "gradient")
    ranks.picture(f"{name}: backward of the column linear", "Gradients of the columns; dx is summed over ranks.")
    return dxs, found


def run_block(ranks: Ranks, block: Block, x: Float, dy: Float) -> tuple[Float, Float, Gradients]:
    """(y, dx, gradients), put together from all ranks' shards; the same as ``block_step`` but for rounding."""
    sharded = shard_block(block, ranks.world)
    _keep_weights(ranks, sharded)
    ys, saved = forward_block(ranks, sharded, ranks.share(x))
    dxs, gradients = backward_block(ranks, sharded, saved, ranks.share(dy))
    ranks.add_gradients(gradients, [f"{block.name}.row_bias"])
    return ranks.whole(ys), ranks.whole(dxs), sharded.whole_gradients(gradients)


def run_layer(ranks: Ranks, attention: Block, mlp: Block, norms: tuple[Norm, Norm], x: Float, dy: Float) -> tuple[Float, Float, Gradients]:
    """(y, dx, gradients) of a whole layer, put together; the same as ``layer_step`` but for rounding."""
    first, second = shard_block(attention, ranks.world), shard_block(mlp, ranks.world)
    _keep_weights(ranks, first)
    _keep_weights(ranks, second)
    shares, dys = ranks.share(x), ranks.share(dy)
    ranks.keep("x", shares, "input")
    normed1 = [norm(share, norms[0]) for share in shares]
    ys1, saved1 = forward_block(ranks, first, [one[0] for one in normed1])
    middles = [share + y for share, y in zip(shares, ys1, strict=True)]
    ranks.keep("x + attention", middles)
    normed2 = [norm(share, norms[1]) for share in middles]
    ys2, saved2 = forward_block(ranks, second, [one[0] for one in normed2])
    dns2, gradients = backward_block(ranks, second, saved2, dys)
    back2 = [norm_backward(dn, one[1], one[2], norms[1]) for dn, one in zip(dns2, normed2, strict=True)]
    dmiddles = [dy_ + back[0] for dy_, back in zip(dys, back2, strict=True)]
    dns1, gradients1 = backward_block(ranks, first, saved1, dmiddles)
    back1 = [norm_backward(dn, one[1], one[2], norms[0]) for dn, one in zip(dns1, normed1, strict=True)]
    for mine, more, one, two in zip(gradients, gradients1, back1, back2, strict=True):
        mine |= more | {"norm1.gamma": one[1].gamma, "norm1.beta": one[1].beta, "norm2.gamma": two[1].gamma, "norm2.beta": two[1].beta}
    shared = ["norm1.gamma", "norm1.beta", "norm2.gamma", "norm2.beta", f"{attention.name}.row_bias", f"{mlp.name}.row_bias"]
    ranks.add_gradients(gradients, shared)
    whole = first.whole_gradients(gradients) | second.whole_gradients(gradients)
    whole |= {name: same([mine[name] for mine in gradients]) for name in shared}
    y = [share + part for share, part in zip(middles, ys2, strict=True)]
    dx = [grad + back[0] for grad, back in zip(dmiddles, back1, strict=True)]
    return ranks.whole(y), ranks.whole(dx), whole


def _keep_weights(ranks: Ranks, sharded: ShardedBlock) -> None:
    """Hold every rank's shards, named by what of the whole they are."""
    block, everyone = sharded.block, range(ranks.world)
    heads = block.heads // ranks.world
    spans = [f"{rows[0]}:{rows[-1] + 1}" for rows in sharded.rows]
    whose = [f"heads {rank * heads}:{(rank + 1) * heads}" for rank in everyone] if heads else spans
    patterns = {"column": "[:, {}]", "column_bias": "[{}]", "row": "[{}]"}
    for place, (part, pattern) in enumerate(patterns.items()):
        labels = [f"{block.name}.{part}" + pattern.format(place_of) for place_of in (spans if part == "row" else whose)]
        ranks.keep(f"{block.name}.{part}", [sharded.local(rank)[place] for rank in everyone], "parameter", labels)
    ranks.keep(f"{block.name}.row_bias", [block.row_bias.copy() for _ in everyone], "parameter")
