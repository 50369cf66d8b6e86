"""Words with a fixed meaning that cross the borders of rooms: as types, so that a misspelt one is found before anything runs.

Tables hold them as text. Names of mesh axes are free (a user's own mesh may call them anything); what an axis is for is its role.
"""

from __future__ import annotations

from typing import Literal, get_args

#: Kinds of communication, then two for what was not recorded well: ``send_recv`` is a batch of point-to-point transfers, or a kernel of
#: which it is not recorded whether it is that or an all-to-all; ``unknown`` is communication of a kind that is not recorded.
Kind = Literal[
    "broadcast",
    "scatter",
    "gather",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "send",
    "recv",
    "barrier",
    "send_recv",
    "unknown",
]
#: What a collective is for.
Purpose = Literal[
    "parameter_gather",
    "gradient_sync",
    "gradient_scatter",
    "parameter_sync",
    "tensor_parallel",
    "sequence_parallel",
    "context_parallel",
    "pipeline",
    "expert_dispatch",
    "expert_combine",
    "loss",
    "metrics",
    "setup",
    "unknown",
]
#: What the ranks along a mesh axis share out, whatever the axis is called; ``whole``: the world, or no axis that is known; ``mixed``:
#: several that have nothing in common, or a name of the user's own.
AxisRole = Literal["tensor", "context", "expert", "pipeline", "sharding", "data", "loss", "embedding", "whole", "mixed"]
#: The part of a step in which something was launched; empty where it is not known.
Phase = Literal["forward", "backward", "optimizer", ""]
#: Owners of memory.
MemoryCategory = Literal[
    "parameters",
    "gradients",
    "optimizer_state",
    "buffers",
    "gathered_parameters",
    "unsharded_gradients",
    "communication_buffers",
    "activations",
    "inputs",
    "temporaries",
    "before_recording",
    "unattributed",
]
#: Where a mesh is known from.
MeshSource = Literal["manifest", "descriptions", "rank_lists", "user", "none"]
#: How an operation was matched with those of other ranks.
MatchedBy = Literal["seq", "order", "none"]

KINDS: tuple[Kind, ...] = get_args(Kind)
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
CATEGORIES: tuple[MemoryCategory, ...] = get_args(MemoryCategory)
