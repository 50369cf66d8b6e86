"""What descriptions of process groups call their axis: DeviceMesh, torchtitan, Megatron-core, and plain words.

Sources: torch ``device_mesh.py`` describes the groups of axis ``tp`` as ``mesh_tp`` (``mesh_dim_0`` where the mesh has no names);
torchtitan ``parallel_dims.py``; Megatron-core ``parallel_state.py``, also older releases.
"""

from __future__ import annotations

import re

#: Axes that are dimensions of a mesh of their own, in the order in which one of them gives its name to ranks that several could name.
DIMENSIONS = (
    "pp",
    "dp_replicate",
    "dp_shard",
    "dp_shard_mod_ep",
    "dp_mod_ep",
    "replicate",
    "shard",
    "fsdp",
    "ddp",
    "dp",
    "cp",
    "sp",
    "tp",
)
#: Axes that lie over dimensions of another name: experts re-use the ranks of data, context and tensor axes; a loss is summed over several.
OVERLAYS = ("dp_shard_in_ep", "ep", "edp", "etp", "efsdp", "loss", "batch", "embedding", "distributed_optimizer")

_MEGATRON = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "HYBRID_DP_CP_GROUP": "dp_cp",
    # Several instances of the distributed optimizer: sharded inside one of them, replicated across them.
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp_shard_cp",
    "INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp_replicate",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "distributed_optimizer",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "dp_tp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp_tp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "cp_tp",
    "CONTEXT_AND_MODEL_PARALLEL_GROUP": "cp_tp_pp",
    "MODEL_PARALLEL_GROUP": "tp_pp",
    "EMBEDDING_GROUP": "embedding",
    "POSITION_EMBEDDING_GROUP": "embedding",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
    "DATA_MODULO_EXPERT_PARALLEL_GROUP": "edp",
    "DATA_MODULO_EXPERT_PARALLEL_GROUP_WITH_CP": "edp",
    "TENSOR_AND_EXPERT_PARALLEL_GROUP": "ep_etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "ep_etp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "ep_etp_pp",
}
_WORDS = {
    "tensor": "tp",
    "pipeline": "pp",
    "context": "cp",
    "expert": "ep",
    "data": "dp",
    "sequence": "sp",
    "expert_data": "edp",
    "expert_tensor": "etp",
}
#: Nobody names an axis in a paragraph: what is longer is not a name, and would not fit a table either.
_LONGEST = 64


def axis_of_description(description: str) -> str:
    """The axis that a group's description names; '' where it names none (``undefined``, ``default_pg``, a user's own words)."""
    text = description.strip()
    if not text or len(text) > _LONGEST:
        return ""
    if text.startswith("mesh_"):
        return text[len("mesh_") :]
    level = re.fullmatch(r"HIERARCHICAL_(.+?)(?:_GLOO)?_L(\d+)", text.upper())
    if level:
        whole = axis_of_description(level.group(1))
        return f"{whole}_l{level.group(2)}" if whole else ""
    megatron = re.sub(r"_(GLOO|AG|\d+)$", "", text.upper().removeprefix("_"))
    if megatron in _MEGATRON:
        return _MEGATRON[megatron]
    return _axis_of_words(text.lower())


def _axis_of_words(text: str) -> str:
    """``tp``, ``tp_group``, ``tp:0``, ``tensor parallel group``, ``expert_group``; an axis flattened of several only by its exact name."""
    text = re.sub(r"[\s\-]+", "_", re.sub(r":\d+$", "", text))
    if is_overlay(text) or text in DIMENSIONS:
        return text
    bare = re.sub(r"(_process)?_(group|pg)$", "", text)
    if bare in DIMENSIONS or bare in OVERLAYS:
        return bare
    words = re.sub(r"(_model)?_parallel$", "", bare)
    return _WORDS.get(words, "") if words != text else ""


def parts(name: str) -> tuple[str, ...]:
    """The axes that a flattened axis is made of, as its name tells: ``dp_shard_cp`` is dp_shard and cp; one part where it tells nothing."""
    if name in DIMENSIONS or name in OVERLAYS:
        return (name,)
    tokens = name.split("_")
    found: list[str] = []
    while tokens:
        for length in range(len(tokens), 0, -1):
            head = "_".join(tokens[:length])
            if head in DIMENSIONS or head in OVERLAYS:
                found.append(head)
                tokens = tokens[length:]
                break
        else:
            return (name,)
    return tuple(found)


def is_overlay(name: str) -> bool:
    """Whether an axis is never a dimension while another axis covers its ranks: flattened axes, experts, losses, levels of a hierarchy."""
    return name in OVERLAYS or len(parts(name)) > 1 or re.fullmatch(r".+_l\d+", name) is not None
