"""Ring attention: queries stay on their ranks, keys and values go round (arXiv:2310.01889)."""

from __future__ import annotations

import numpy as np

from tracekit.simulate.attention import attend_backward, delta_of, finish, merge, nothing_seen
from tracekit.simulate.context_parallel.problem import AttentionResults, Machine, Shared, cells, keep_partials, pairs, results, start
from tracekit.simulate.functions import Float


def ring(machine: Machine) -> AttentionResults:
    """Keys and values go round."""
    shared = start(machine)
    done = _ring_forward(machine, shared)
    machine.end_forward()
    problem, c = machine.problem, machine.problem.ranks
    deltas = [delta_of(out, dout) for (out, _), dout in zip(done, shared.dout, strict=True)]
    held = pairs(shared.k, shared.v)
    dqs = [np.zeros_like(q) for q in shared.q]
    own, under_way = [], [np.zeros_like(kv) for kv in held]
    for turn in range(c):
        owners = [(rank - turn) % c for rank in range(c)]
        parts = []
        for rank, (owner, kv) in enumerate(zip(owners, held, strict=True)):
            mask = machine.mask(problem.places[rank], problem.places[owner])
            parts.append(attend_backward(shared.q[rank], kv[0], kv[1], done[rank][1], deltas[rank], shared.dout[rank], mask))
        dqs = [dq + part[0] for dq, part in zip(dqs, parts, strict=True)]
        shares = [np.stack(part[1:]) for part in parts]
        cells(machine, "dq", dqs)
        if turn < c - 1:
            held = _hop(machine, held, [f"k, v of rank {owner}" for owner in owners], "backward")
            cells(machine, "k and v", held, [(owner - 1) % c for owner in owners])
        else:
            machine.ranks.drop("k and v")
        if turn == 0:
            own = shares
            cells(machine, "own part of dk and dv", own, list(range(c)))
            text = "The rank's own share of its dk and dv stays at home; k and v go on to the next rank."
        else:
            summed = [array + share for array, share in zip(under_way, shares, strict=True)]
            under_way = _hop(machine, summed, [f"dk, dv of rank {owner}" for owner in owners], "backward")
            cells(machine, "dk and dv", under_way, [(owner - 1) % c for owner in owners])
            text = "What has been summed of dk and dv follows k and v to the next rank."
        machine.ranks.picture(f"backward: round {turn + 1} of {c}", text)
    gradients = [array + share for array, share in zip(under_way, own, strict=True)]
    machine.ranks.drop("own part of dk and dv")
    cells(machine, "dk and dv", gradients)
    machine.ranks.picture("backward: finish", "dk and dv have come home with a part from every other rank; the own share is added.")
    return results(machine, [out for out, _ in done], dqs, [both[0] for both in gradients], [both[1] for both in gradients])


def _ring_forward(machine: Machine, shared: Shared) -> list[tuple[Float, Float]]:
    """(out, lse) of every rank's tokens."""
    problem, ranks, c = machine.problem, machine.ranks, machine.problem.ranks
    held = pairs(shared.k, shared.v)
    partials = [nothing_seen(q) for q in shared.q]
    for turn in range(c):
        owners = [(rank - turn) % c for rank in range(c)]
        machine.begin_round()
        for rank, owner in enumerate(owners):
            kv = held[rank]
            block = machine.attend(rank, shared.q[rank], kv[0], kv[1], problem.places[rank], problem.places[owner])
            partials[rank] = merge(partials[rank], block) if block is not None else partials[rank]
        keep_partials(machine, partials)
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


def _hop(machine: Machine, arrays: list[Float], labels: list[str], phase: str) -> list[Float]:
    """Everybody hands its array to the next rank, all in one logical step."""
    network, c = machine.ranks.network, machine.problem.ranks
    arrived = list(arrays)
    with network.step():
        for rank, array in enumerate(arrays):
            copy = network.send(rank, (rank + 1) % c, array, labels[rank], axis="cp", purpose="context_parallel", phase=phase)
            arrived[(rank + 1) % c] = np.asarray(copy, np.float64)
    return arrived
