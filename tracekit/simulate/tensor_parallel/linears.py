"""One linear y = x W + b over tensor-parallel ranks, its columns or its rows cut; the two halves of every sharded block."""

from __future__ import annotations

import numpy as np

from tracekit.simulate.functions import Float, linear
from tracekit.simulate.tensor_parallel.layers import Gradients, bias_gradient, matmul_gradient
from tracekit.simulate.tensor_parallel.ranks import Ranks, same


def linear_step(weight: Float, bias: Float, x: Float, dy: Float) -> tuple[Float, Float, Gradients]:
    """(y, dx, gradients) on one rank."""
    return linear(x, weight) + bias, linear(dy, weight.T), {"weight": matmul_gradient(x, dy), "bias": bias_gradient(dy)}


def run_column(ranks: Ranks, weight: Float, bias: Float, x: Float, dy: Float) -> tuple[Float, Float, Gradients]:
    """Columns cut: every rank needs all of x and makes its columns of y. Put together as ``linear_step``."""
    inputs, gradients = ranks.share(x), np.split(dy, ranks.world, axis=-1)
    weights, biases = np.split(weight, ranks.world, axis=1), np.split(bias, ranks.world)
    ranks.keep("W columns", weights, "parameter")
    ranks.keep("b", biases, "parameter")
    ranks.keep("x", inputs, "input")
    whole = ranks.gather(inputs, "forward", "column: input of the column linear")
    ys = [linear(x_, w) + b for x_, w, b in zip(whole, weights, biases, strict=True)]
    ranks.keep("y columns", ys)
    ranks.picture("column: forward", "y of a rank's own columns; nothing is summed.")
    again = ranks.gather_again(inputs, whole, "column: input of the column linear, again")
    dws = [matmul_gradient(x_, g) for x_, g in zip(again, gradients, strict=True)]
    dbs = [bias_gradient(g) for g in gradients]
    partials = [linear(g, w.T) for g, w in zip(gradients, weights, strict=True)]
    ranks.keep("dW columns", dws, "gradient")
    ranks.keep("db", dbs, "gradient")
    ranks.keep("partial sum of dx", partials, "partial_sum")
    ranks.picture("column: local backward", "dW and db are whole for the rank's columns; dx is a sum over ranks.")
    dxs = ranks.add(partials, "backward", "column: gradient of the column linear's input")
    ranks.drop("partial sum of dx")
    ranks.keep("dx", dxs, "gradient")
    ranks.picture("column: dx", f"dx is {'reduce-scattered' if ranks.sequence_parallel else 'all-reduced'}.")
    found = {"weight": np.concatenate(dws, axis=1), "bias": np.concatenate(dbs)}
    return np.concatenate(ys, axis=-1), ranks.whole(dxs), found


def run_row(ranks: Ranks, weight: Float, bias: Float, x: Float, dy: Float) -> tuple[Float, Float, Gradients]:
    """Rows cut: every rank has its features of x and makes a partial sum of y. Put together as ``linear_step``."""
    inputs, shares, weights = np.split(x, ranks.world, axis=-1), ranks.share(dy), np.split(weight, ranks.world)
    ranks.keep("W rows", weights, "parameter")
    ranks.keep("b", [bias.copy() for _ in weights], "parameter")
    ranks.keep("x features", inputs, "input")
    partials = [linear(x_, w) for x_, w in zip(inputs, weights, strict=True)]
    ranks.keep("partial sum of y", partials, "partial_sum")
    ranks.picture("row: local forward", "Every rank has a partial sum of all of y.")
    ys = [share + bias for share in ranks.add(partials, "forward", "row: output of the row linear")]
    ranks.drop("partial sum of y")
    ranks.keep("y", ys)
    ranks.picture("row: sum over ranks", f"y is {'reduce-scattered' if ranks.sequence_parallel else 'all-reduced'}; then b is added once.")
    whole = ranks.gather(shares, "backward", "row: gradient of the row linear's output")
    found: list[Gradients] = [
        {"weight": matmul_gradient(x_, g), "bias": bias_gradient(share)} for x_, g, share in zip(inputs, whole, shares, strict=True)
    ]
    dxs = [linear(g, w.T) for g, w in zip(whole, weights, strict=True)]
    ranks.keep("dx features", dxs, "gradient")
    ranks.add_gradients(found, ["bias"])
    for name in found[0]:
        ranks.keep(f"d {name}", [mine[name] for mine in found], "gradient")
    ranks.picture("row: backward", "dx and dW are the rank's own features; nothing of them is summed.")
    gradients = {"weight": np.concatenate([mine["weight"] for mine in found]), "bias": same([mine["bias"] for mine in found])}
    return ranks.whole(ys), np.concatenate(dxs, axis=-1), gradients
