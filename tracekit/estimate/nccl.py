"""Latency of a collective as NCCL's own tuner predicts it.

Constants and formula of ``ncclTopoTuneModel`` (src/graph/tuning.cc of NCCL 2.28, ``ncclTunerConstantsDefaults``): a fixed base, and for
each step that of the hardware it crosses. Times are microseconds. Protocols: LL (small messages), LL128, Simple (large ones).
"""

from __future__ import annotations

from tracekit.errors import UsageError

PROTOCOLS = ("ll", "ll128", "simple")
#: Base latency by algorithm, in the order of PROTOCOLS [us].
BASE_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
#: Latency of a step by hardware and algorithm [us].
STEP_US = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)},
    "pci": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    "network": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)},
}
#: Messages up to this size take LL, up to the next LL128, larger ones Simple: where tuned rings of 8 ranks commonly change [bytes].
LL_BYTES, LL128_BYTES = 64 * 2**10, 8 * 2**20


def protocol_of(full_bytes: float) -> str:
    """The protocol of a message of this size; an assumption, as NCCL compares times of all."""
    return "ll" if full_bytes <= LL_BYTES else "ll128" if full_bytes <= LL128_BYTES else "simple"


#: What posting one step to the network costs the CPU; three posts in the Simple protocol [us].
NETWORK_POST_US = 1.0


def latency_us(kind: str, size: int, nodes: int = 1, algorithm: str = "ring", protocol: str = "simple", inside: str = "nvlink") -> float:
    """Latency of one collective over ``size`` ranks on ``nodes`` nodes [us]; 0 in a group of one.

    ring    base + (steps - steps between nodes) * inside + steps between nodes * network, with x-1 steps (all_reduce 2 (x-1)), of them
            nodes - 1 (2 (nodes - 1)) between nodes. Over several nodes no step takes less than posting it; with one rank a node a step
            takes what it takes in a tree. broadcast and reduce flow through the ring: base + one step
    tree    all_reduce only: base + 2 ((x/nodes - 1) * inside + floor(log2 nodes) * network)
    """
    if protocol not in PROTOCOLS or algorithm not in BASE_US or inside not in ("nvlink", "pci"):
        raise UsageError(f"NCCL has no {protocol} over {algorithm} on {inside}", "choose ring or tree, ll, ll128 or simple, nvlink or pci")
    if not 1 <= nodes <= size:
        raise UsageError(f"{size} ranks on {nodes} nodes", "give 1 to as many nodes as ranks")
    if algorithm == "tree" and kind != "all_reduce":
        raise UsageError(f"NCCL has no tree for {kind}", "choose ring")
    if size == 1:
        return 0.0
    column = PROTOCOLS.index(protocol)
    base, near = BASE_US[algorithm][column], STEP_US[inside][algorithm][column]
    far = STEP_US["network"]["tree" if nodes == size else algorithm][column]
    if algorithm == "tree":
        return base + 2 * ((size / nodes - 1) * near + (nodes.bit_length() - 1) * far)
    if kind in ("broadcast", "reduce"):
        return base + (STEP_US["network"]["ring"][column] if nodes > 1 else near)
    if nodes > 1:
        near = max(near, NETWORK_POST_US * (3 if protocol == "simple" else 1))
    turns = 2 if kind == "all_reduce" else 1
    return base + turns * ((size - nodes) * near + (nodes - 1) * far)
