"""Four ways to attend over tokens that lie on c ranks; all give the attention of one rank.

all_gather   every rank gathers all keys and values, and keeps its queries; backward gathers them again and reduce-scatters dK, dV
ring         queries stay, keys and values go round: c-1 hops, merged by online softmax; in backward they go round again, followed by
             what has been summed of dK and dV, c-1 hops each (Ring Attention, arXiv:2310.01889)
blockwise    keys and values stay: every rank gathers all queries, attends to its own block of keys, and the outputs, brought to a
             common scale by an all-reduce of the largest lse, are reduce-scattered together with their weights
ulysses      an all-to-all trades tokens for heads: every rank has all tokens of its heads, and trades back (arXiv:2309.14509). Where c
             does not divide the heads of keys and values, each is sent in as many copies as it takes
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tracekit.simulate.attention import Partial, attend_backward, delta_of, finish, nothing_seen
from tracekit.simulate.context_parallel.problem import (
    AttentionResults,
    Machine,
    Shared,
    cells,
    floats,
    keep_partials,
    pairs,
    results,
    start,
    tags,
)
from tracekit.simulate.context_parallel.ring import ring
from tracekit.simulate.functions import Float

Algorithm = Callable[[Machine], AttentionResults]


def all_gather(machine: Machine) -> AttentionResults:
    """Keys and values of all tokens on every rank."""
    problem, ranks = machine.problem, machine.ranks
    shared, everywhere = start(machine), problem.everywhere
    network, group = ranks.network, ranks.group
    keys_values = pairs(shared.k, shared.v)
    whole = floats(network.all_gather(keys_values, group, dim=1, **tags("forward", "k and v")))
    cells(machine, "k and v of all", whole)
    ranks.picture("forward: all-gather", "Every rank gathers keys and values of all tokens.")
    machine.begin_round()
    done = []
    for rank, (q, kv, mine) in enumerate(zip(shared.q, whole, problem.places, strict=True)):
        partial = machine.attend(rank, q, kv[0], kv[1], mine, everywhere)
        done.append(finish(partial or nothing_seen(q)))
    cells(machine, "out", [out for out, _ in done])
    cells(machine, "lse", [lse for _, lse in done])
    again = whole
    if not machine.keep_gathered:
        ranks.drop("k and v of all")
    fate = "kept" if machine.keep_gathered else "freed"
    ranks.picture("forward: attention", f"Each rank's queries see all keys; what was gathered is {fate}.")
    machine.end_forward()
    if not machine.keep_gathered:
        again = floats(network.all_gather(keys_values, group, dim=1, **tags("backward", "k and v, again")))
        cells(machine, "k and v of all", again)
        ranks.picture("backward: all-gather", "Keys and values are gathered once more.")
    dqs, dkvs = [], []
    for q, kv, mine, (out, lse), dout in zip(shared.q, again, problem.places, done, shared.dout, strict=True):
        dq, dk, dv = attend_backward(q, kv[0], kv[1], lse, delta_of(out, dout), dout, machine.mask(mine, everywhere))
        dqs.append(dq)
        dkvs.append(np.stack([dk, dv]))
    cells(machine, "dq", dqs)
    cells(machine, "dk and dv of all", dkvs)
    ranks.picture("backward: attention", "dq is whole; dk and dv of all tokens are partial sums.")
    splits = [len(mine) for mine in problem.places]
    summed = floats(network.reduce_scatter(dkvs, group, splits, dim=1, **tags("backward", "dk and dv")))
    ranks.drop("k and v of all", "dk and dv of all")
    cells(machine, "dk and dv", summed)
    ranks.picture("backward: reduce-scatter", "Everyone gets the sum over ranks for its own tokens.")
    return results(machine, [out for out, _ in done], dqs, [both[0] for both in summed], [both[1] for both in summed])


def blockwise(machine: Machine) -> AttentionResults:
    """Queries of all tokens on every rank, outputs reduce-scattered."""
    problem, ranks, everywhere = machine.problem, machine.ranks, machine.problem.everywhere
    shared, network, group = start(machine), machine.ranks.network, machine.ranks.group
    splits = [len(mine) for mine in problem.places]
    queries = floats(network.all_gather(shared.q, group, **tags("forward", "q")))
    cells(machine, "q of all", queries)
    ranks.picture("forward: all-gather", "Every rank gathers the queries of all tokens.")
    machine.begin_round()
    partials = []
    for rank, (q, k, v, mine) in enumerate(zip(queries, shared.k, shared.v, problem.places, strict=True)):
        partials.append(machine.attend(rank, q, k, v, everywhere, mine) or nothing_seen(q))
    own_lse = [_log_sum(partial) for partial in partials]
    keep_partials(machine, partials)
    ranks.picture("forward: attention", "All queries see the rank's own block of keys: unfinished results.")
    largest = floats(network.all_reduce(own_lse, group, largest=True, **tags("forward", "largest lse of a block")))
    scaled = [_scaled(partial, scale) for partial, scale in zip(partials, largest, strict=True)]
    cells(machine, "scaled output and weight", scaled)
    ranks.drop("o", "m", "l", "q of all")
    ranks.picture("forward: common scale", "With the largest lse of a query, what the ranks have of it has one scale.")
    sums = floats(network.reduce_scatter(scaled, group, splits, **tags("forward", "outputs and weights")))
    outs = [both[..., :-1] / both[..., -1:] for both in sums]
    lses = [
        scale[..., sum(splits[:rank]) : sum(splits[: rank + 1])] + np.moveaxis(np.log(both[..., -1]), 0, -1)
        for rank, (scale, both) in enumerate(zip(largest, sums, strict=True))
    ]
    ranks.drop("scaled output and weight")
    cells(machine, "out", outs)
    cells(machine, "lse", lses)
    ranks.picture("forward: reduce-scatter", "Sums of outputs and of weights; their quotient is the attention.")
    machine.end_forward()
    return _blockwise_backward(machine, shared, outs, lses)


def _blockwise_backward(machine: Machine, shared: Shared, outs: list[Float], lses: list[Float]) -> AttentionResults:
    problem, ranks, everywhere = machine.problem, machine.ranks, machine.problem.everywhere
    network, group, splits = ranks.network, ranks.group, [len(mine) for mine in problem.places]
    gathered = floats(network.all_gather(pairs(shared.q, shared.dout), group, dim=1, **tags("backward", "q, again, and dout")))
    own = [delta_of(out, dout) for out, dout in zip(outs, shared.dout, strict=True)]
    statistics = floats(network.all_gather(pairs(lses, own), group, dim=3, **tags("backward", "lse and delta")))
    cells(machine, "q and dout of all", gathered)
    cells(machine, "lse and delta of all", statistics)
    ranks.picture("backward: all-gather", "Queries once more, gradients of the outputs, lse and delta, of all tokens.")
    parts = [
        attend_backward(both[0], k, v, of_all[0], of_all[1], both[1], machine.mask(everywhere, mine))
        for both, k, v, of_all, mine in zip(gathered, shared.k, shared.v, statistics, problem.places, strict=True)
    ]
    cells(machine, "dk", [part[1] for part in parts])
    cells(machine, "dv", [part[2] for part in parts])
    cells(machine, "dq of all", [part[0] for part in parts])
    ranks.picture("backward: attention", "dk and dv of the own block are whole; dq of all tokens is a partial sum.")
    dqs = floats(network.reduce_scatter([part[0] for part in parts], group, splits, **tags("backward", "dq")))
    ranks.drop("q and dout of all", "lse and delta of all", "dq of all")
    cells(machine, "dq", dqs)
    ranks.picture("backward: reduce-scatter", "Everyone gets the sum over ranks of dq of its own tokens.")
    return results(machine, outs, dqs, [part[1] for part in parts], [part[2] for part in parts])


def _log_sum(partial: Partial) -> Float:
    """m + log l, and -inf for a query that saw nothing."""
    seen = partial.l > 0
    return np.where(seen, np.where(seen, partial.m, 0.0) + np.log(np.where(seen, partial.l, 1.0)), -np.inf)


def _scaled(partial: Partial, scale: Float) -> Float:
    """(o, l) of one block at the scale of all blocks, exp(m - scale) times each, as (i, b, a, d + 1)."""
    factor = np.moveaxis(np.exp(partial.m - scale), -1, 0)[..., None]
    weight = np.moveaxis(partial.l, -1, 0)[..., None]
    return np.asarray(np.concatenate([partial.o, weight], axis=-1) * factor, np.float64)


def ulysses(machine: Machine) -> AttentionResults:
    """Tokens traded for heads."""
    problem, ranks, everywhere = machine.problem, machine.ranks, machine.problem.everywhere
    shared, c = start(machine), machine.problem.ranks
    copies = math.lcm(problem.k.shape[2], c) // problem.k.shape[2]  # so that every rank gets whole heads of keys and values
    sent = {"q": shared.q, "k": [np.repeat(k, copies, axis=2) for k in shared.k], "v": [np.repeat(v, copies, axis=2) for v in shared.v]}
    mine = {name: _to_heads(machine, arrays, name, "forward") for name, arrays in sent.items()}
    for name, arrays in mine.items():
        cells(machine, f"{name} by heads", arrays)
    ranks.picture("forward: all-to-all", "Every rank has all tokens of its heads.")
    machine.begin_round()
    done = []
    for rank in range(c):
        partial = machine.attend(rank, mine["q"][rank], mine["k"][rank], mine["v"][rank], everywhere, everywhere)
        done.append(finish(partial or nothing_seen(mine["q"][rank])))
    cells(machine, "out by heads", [out for out, _ in done])
    cells(machine, "lse", [lse for _, lse in done])
    ranks.picture("forward: attention", "Whole attention of a rank's heads; no softmax is cut.")
    outs = _to_tokens(machine, [out for out, _ in done], "out", "forward")
    cells(machine, "out", outs)
    ranks.picture("forward: all-to-all back", "Every rank has all heads of its tokens again.")
    machine.end_forward()
    douts = _to_heads(machine, shared.dout, "dout", "backward")
    cells(machine, "dout by heads", douts)
    ranks.picture("backward: all-to-all", "The gradient of the outputs goes to the heads.")
    mask, gradients = machine.mask(everywhere, everywhere), []
    for rank, ((out, lse), dout) in enumerate(zip(done, douts, strict=True)):
        whole = (mine["q"][rank], mine["k"][rank], mine["v"][rank])
        gradients.append(attend_backward(*whole, lse, delta_of(out, dout), dout, mask))
    back = {  # as autograd does: what forward did last comes first
        name: _to_tokens(machine, [part[i] for part in gradients], name, "backward") for i, name in ((2, "dv"), (1, "dk"), (0, "dq"))
    }
    back |= {name: [_sum_copies(share, copies) for share in back[name]] for name in ("dk", "dv")}
    ranks.drop(*(f"{name} by heads" for name in ("q", "k", "v", "out", "dout")), "lse")
    for name, arrays in back.items():
        cells(machine, name, arrays)
    ranks.picture("backward: all-to-all back", "dq, dk and dv go back to the tokens.")
    return results(machine, outs, back["dq"], back["dk"], back["dv"])


def _sum_copies(gradient: Float, copies: int) -> Float:
    """Gradient of a head from those of its copies, which lie next to each other."""
    tokens, b, heads, d = gradient.shape
    return np.asarray(gradient.reshape(tokens, b, heads // copies, copies, d).sum(axis=3), np.float64)


def _to_heads(machine: Machine, shares: list[Float], name: str, phase: str) -> list[Float]:
    """(own tokens, b, heads, d) -> (all tokens, b, own heads, d)."""
    ranks, c = machine.ranks, machine.problem.ranks
    pieces = [np.split(share, c, axis=2) for share in shares]
    received = ranks.network.all_to_all(pieces, ranks.group, **tags(phase, f"{name}: tokens for heads"))
    return [np.asarray(np.concatenate(got), np.float64) for got in received]


def _to_tokens(machine: Machine, by_heads: list[Float], name: str, phase: str) -> list[Float]:
    """The way back."""
    ranks, ends = machine.ranks, np.cumsum([len(mine) for mine in machine.problem.places])[:-1].tolist()
    pieces = [np.split(array, ends) for array in by_heads]
    received = ranks.network.all_to_all(pieces, ranks.group, **tags(phase, f"{name}: heads for tokens"))
    return [np.asarray(np.concatenate(got, axis=2), np.float64) for got in received]


ALGORITHMS: dict[str, Algorithm] = {"all_gather": all_gather, "ring": ring, "blockwise": blockwise, "ulysses": ulysses}
