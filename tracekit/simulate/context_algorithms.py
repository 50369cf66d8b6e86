"""Four ways to attend over tokens that lie on c ranks; all give the attention of one rank.

    all_gather   every rank gathers all keys and values, and keeps its queries; backward gathers them again and reduce-scatters dK, dV
    ring         queries stay, keys and values go round: c-1 hops, merged by online softmax; in backward dK and dV travel with them and
                 take one hop more, home (Ring Attention, arXiv:2310.01889)
    blockwise    keys and values stay: every rank gathers all queries, attends to its own block of keys, and the outputs, scaled to their
                 common softmax, are reduce-scattered
    ulysses      an all-to-all trades tokens for heads: every rank has all tokens of its heads, and trades back (arXiv:2309.14509)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tracekit.simulate.attention import Partial, attend_backward, delta_of, finish, merge, nothing_seen
from tracekit.simulate.context_problem import Machine, Results, Shared, cells
from tracekit.simulate.functions import Float
from tracekit.simulate.virtual import Tags

Algorithm = Callable[[Machine], Results]


def _tags(phase: str, label: str) -> Tags:
    return {"axis": "cp", "purpose": "context_parallel", "phase": phase, "label": label}


def _floats(arrays: list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]) -> list[Float]:
    return [np.asarray(array, np.float64) for array in arrays]


def _pairs(one: list[Float], other: list[Float]) -> list[Float]:
    """Two tensors a rank as one, in front: (2, tokens, ...)."""
    return [np.stack(both) for both in zip(one, other, strict=True)]


def _results(machine: Machine, out: list[Float], dq: list[Float], dk: list[Float], dv: list[Float]) -> Results:
    """The ranks' shares put together, for the comparison afterwards."""
    return Results(*(machine.problem.whole(shares) for shares in (out, dq, dk, dv)))


def _start(machine: Machine) -> Shared:
    shared = machine.problem.shared()
    for name in ("q", "k", "v"):
        cells(machine, name, getattr(shared, name))
    machine.ranks.picture("start", "Every rank has q, k and v of its own tokens.")
    return shared


def all_gather(machine: Machine) -> Results:
    """Keys and values of all tokens on every rank."""
    problem, ranks = machine.problem, machine.ranks
    shared, everywhere = _start(machine), problem.everywhere
    network, group = ranks.network, ranks.group
    keys_values = _pairs(shared.k, shared.v)
    whole = _floats(network.all_gather(keys_values, group, dim=1, **_tags("forward", "k and v")))
    cells(machine, "k and v of all", whole)
    ranks.picture("forward: all-gather", "Every rank gathers keys and values of all tokens.")
    machine.begin_round()
    done = []
    for rank, (q, kv, mine) in enumerate(zip(shared.q, whole, problem.places, strict=True)):
        partial = machine.attend(rank, q, kv[0], kv[1], mine, everywhere)
        done.append(finish(partial or nothing_seen(q)))
    cells(machine, "out", [out for out, _ in done])
    cells(machine, "lse", [lse for _, lse in done])
    ranks.drop("k and v of all")
    ranks.picture("forward: attention", "Each rank's queries see all keys; what was gathered is freed.")
    machine.end_forward()
    again = _floats(network.all_gather(keys_values, group, dim=1, **_tags("backward", "k and v, again")))
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
    summed = _floats(network.reduce_scatter(dkvs, group, splits, dim=1, **_tags("backward", "dk and dv")))
    ranks.drop("k and v of all", "dk and dv of all")
    cells(machine, "dk and dv", summed)
    ranks.picture("backward: reduce-scatter", "Everyone gets the sum over ranks for its own tokens.")
    return _results(machine, [out for out, _ in done], dqs, [both[0] for both in summed], [both[1] for both in summed])


def ring(machine: Machine) -> Results:
    """Keys and values go round."""
    shared = _start(machine)
    done = _ring_forward(machine, shared)
    machine.end_forward()
    problem, c = machine.problem, machine.problem.ranks
    deltas = [delta_of(out, dout) for (out, _), dout in zip(done, shared.dout, strict=True)]
    held = _pairs(shared.k, shared.v)
    dqs = [np.zeros_like(q) for q in shared.q]
    gradients = [np.zeros_like(kv) for kv in held]
    for turn in range(c):
        owners = [(rank - turn) % c for rank in range(c)]
        for rank, owner in enumerate(owners):
            mask = machine.mask(problem.places[rank], problem.places[owner])
            kv = held[rank]
            parts = attend_backward(shared.q[rank], kv[0], kv[1], done[rank][1], deltas[rank], shared.dout[rank], mask)
            dqs[rank] = dqs[rank] + parts[0]
            gradients[rank] = gradients[rank] + np.stack(parts[1:])
        cells(machine, "dq", dqs)
        last = turn == c - 1
        if c > 1:
            moved = gradients if last else [np.concatenate(both) for both in zip(held, gradients, strict=True)]
            what = "dk, dv" if last else "k, v, dk, dv"
            moved = _hop(machine, moved, [f"{what} of rank {owner}" for owner in owners], "backward")
            gradients = [array[-2:] for array in moved]
            held = held if last else [array[:2] for array in moved]
        owners = [(rank - turn - 1) % c for rank in range(c)]
        cells(machine, "dk and dv", gradients, owners)
        if last:
            text = "dk and dv are home, with a part from every rank."
            machine.ranks.drop("k and v")
        else:
            cells(machine, "k and v", held, owners)
            text = "k and v go on to the next rank, and with them what has been summed of dk and dv."
        machine.ranks.picture(f"backward: round {turn + 1} of {c}", text)
    return _results(machine, [out for out, _ in done], dqs, [both[0] for both in gradients], [both[1] for both in gradients])


def _ring_forward(machine: Machine, shared: Shared) -> list[tuple[Float, Float]]:
    """(out, lse) of every rank's tokens."""
    problem, ranks, c = machine.problem, machine.ranks, machine.problem.ranks
    held = _pairs(shared.k, shared.v)
    partials = [nothing_seen(q) for q in shared.q]
    for turn in range(c):
        owners = [(rank - turn) % c for rank in range(c)]
        machine.begin_round()
        for rank, owner in enumerate(owners):
            kv = held[rank]
            block = machine.attend(rank, shared.q[rank], kv[0], kv[1], problem.places[rank], problem.places[owner])
            partials[rank] = merge(partials[rank], block) if block is not None else partials[rank]
        _keep_partials(machine, partials)
        text = f"Each rank attends to the block of the rank {turn} before it and merges it into its running softmax."
        if turn == 0:
            text = "Each rank attends to its own block."
        if turn < c - 1:
            held = _hop(machine, held, [f"k, v of rank {owner}" for owner in owners], "forward")
            cells(machine, "k and v", held, [(owner - 1) % c for owner in owners])
            text += " Then k and v go on to the next rank."
        ranks.picture(f"forward: round {turn + 1} of {c}", text)
    done = [finish(partial) for partial in partials]
    ranks.drop("k and v", "o", "m", "l")
    cells(machine, "out", [out for out, _ in done])
    cells(machine, "lse", [lse for _, lse in done])
    ranks.picture("forward: finish", "out = o / l, and lse = m + log l is kept for backward.")
    return done


def _keep_partials(machine: Machine, partials: list[Partial]) -> None:
    for name in ("o", "m", "l"):
        cells(machine, name, [getattr(partial, name) for partial in partials])


def _hop(machine: Machine, arrays: list[Float], labels: list[str], phase: str) -> list[Float]:
    """Everybody hands its array to the next rank, all in one logical step."""
    network, c = machine.ranks.network, machine.problem.ranks
    arrived = list(arrays)
    with network.step():
        for rank, array in enumerate(arrays):
            copy = network.send(rank, (rank + 1) % c, array, labels[rank], axis="cp", purpose="context_parallel", phase=phase)
            arrived[(rank + 1) % c] = np.asarray(copy, np.float64)
    return arrived


def blockwise(machine: Machine) -> Results:
    """Queries of all tokens on every rank, outputs reduce-scattered."""
    problem, ranks, everywhere = machine.problem, machine.ranks, machine.problem.everywhere
    shared, network, group = _start(machine), machine.ranks.network, machine.ranks.group
    splits = [len(mine) for mine in problem.places]
    queries = _floats(network.all_gather(shared.q, group, **_tags("forward", "q")))
    cells(machine, "q of all", queries)
    ranks.picture("forward: all-gather", "Every rank gathers the queries of all tokens.")
    machine.begin_round()
    partials = []
    for rank, (q, k, v, mine) in enumerate(zip(queries, shared.k, shared.v, problem.places, strict=True)):
        partials.append(machine.attend(rank, q, k, v, everywhere, mine) or nothing_seen(q))
    own_lse = [_log_sum(partial) for partial in partials]
    _keep_partials(machine, partials)
    ranks.picture("forward: attention", "All queries see the rank's own block of keys: unfinished results.")
    every_lse = _floats(network.all_gather([lse[None] for lse in own_lse], group, **_tags("forward", "lse of every block")))
    lses = [_log_add(every) for every in every_lse]
    scaled = [_scaled(partial, lse) for partial, lse in zip(partials, lses, strict=True)]
    outs = _floats(network.reduce_scatter(scaled, group, splits, **_tags("forward", "outputs")))
    ranks.drop("q of all", "o", "m", "l")
    cells(machine, "out", outs)
    cells(machine, "lse of all", lses)
    ranks.picture("forward: reduce-scatter", "Scaled by exp(own lse - lse of all blocks), the outputs add up to the attention.")
    machine.end_forward()
    return _blockwise_backward(machine, shared, outs, lses)


def _blockwise_backward(machine: Machine, shared: Shared, outs: list[Float], lses: list[Float]) -> Results:
    problem, ranks, everywhere = machine.problem, machine.ranks, machine.problem.everywhere
    network, group, splits = ranks.network, ranks.group, [len(mine) for mine in problem.places]
    gathered = _floats(network.all_gather(_pairs(shared.q, shared.dout), group, dim=1, **_tags("backward", "q, again, and dout")))
    own = [delta_of(out, dout) for out, dout in zip(outs, shared.dout, strict=True)]
    deltas = _floats(network.all_gather(own, group, dim=2, **_tags("backward", "delta")))
    cells(machine, "q and dout of all", gathered)
    cells(machine, "delta of all", deltas)
    ranks.picture("backward: all-gather", "Queries once more, gradients of the outputs and their delta, of all tokens.")
    parts = [
        attend_backward(both[0], k, v, lse, delta, both[1], machine.mask(everywhere, mine))
        for both, k, v, lse, delta, mine in zip(gathered, shared.k, shared.v, lses, deltas, problem.places, strict=True)
    ]
    cells(machine, "dk", [part[1] for part in parts])
    cells(machine, "dv", [part[2] for part in parts])
    cells(machine, "dq of all", [part[0] for part in parts])
    ranks.picture("backward: attention", "dk and dv of the own block are whole; dq of all tokens is a partial sum.")
    dqs = _floats(network.reduce_scatter([part[0] for part in parts], group, splits, **_tags("backward", "dq")))
    ranks.drop("q and dout of all", "delta of all", "dq of all", "lse of all")
    cells(machine, "dq", dqs)
    ranks.picture("backward: reduce-scatter", "Everyone gets the sum over ranks of dq of its own tokens.")
    return _results(machine, outs, dqs, [part[1] for part in parts], [part[2] for part in parts])


def _log_sum(partial: Partial) -> Float:
    """m + log l, and -inf for a query that saw nothing."""
    seen = partial.l > 0
    return np.where(seen, np.where(seen, partial.m, 0.0) + np.log(np.where(seen, partial.l, 1.0)), -np.inf)


def _log_add(lses: Float) -> Float:
    """log of the sum of exp over the first dimension; every query sees some key in some block."""
    most = lses.max(axis=0)
    return np.asarray(most + np.log(np.exp(lses - most).sum(axis=0)), np.float64)


def _scaled(partial: Partial, lse: Float) -> Float:
    """o of one block by the softmax over all blocks: o exp(m - lse)."""
    return np.asarray(partial.o * np.moveaxis(np.exp(partial.m - lse), -1, 0)[..., None], np.float64)


def ulysses(machine: Machine) -> Results:
    """Tokens traded for heads."""
    ranks, everywhere = machine.ranks, machine.problem.everywhere
    shared, c = _start(machine), machine.problem.ranks
    mine = {name: _to_heads(machine, getattr(shared, name), name, "forward") for name in ("q", "k", "v")}
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
    back = [_to_tokens(machine, [part[i] for part in gradients], name, "backward") for i, name in enumerate(("dq", "dk", "dv"))]
    ranks.drop(*(f"{name} by heads" for name in ("q", "k", "v", "out", "dout")), "lse")
    for name, arrays in zip(("dq", "dk", "dv"), back, strict=True):
        cells(machine, name, arrays)
    ranks.picture("backward: all-to-all back", "dq, dk and dv go back to the tokens.")
    return _results(machine, outs, *back)


def _to_heads(machine: Machine, shares: list[Float], name: str, phase: str) -> list[Float]:
    """(own tokens, b, heads, d) -> (all tokens, b, own heads, d)."""
    ranks, c = machine.ranks, machine.problem.ranks
    pieces = [np.split(share, c, axis=2) for share in shares]
    received = ranks.network.all_to_all(pieces, ranks.group, **_tags(phase, f"{name}: tokens for heads"))
    return [np.asarray(np.concatenate(got), np.float64) for got in received]


def _to_tokens(machine: Machine, by_heads: list[Float], name: str, phase: str) -> list[Float]:
    """The way back."""
    ranks, ends = machine.ranks, np.cumsum([len(mine) for mine in machine.problem.places])[:-1].tolist()
    pieces = [np.split(array, ends) for array in by_heads]
    received = ranks.network.all_to_all(pieces, ranks.group, **_tags(phase, f"{name}: heads for tokens"))
    return [np.asarray(np.concatenate(got, axis=2), np.float64) for got in received]


ALGORITHMS: dict[str, Algorithm] = {"all_gather": all_gather, "ring": ring, "blockwise": blockwise, "ulysses": ulysses}
