"""What descriptions of process groups call their axis: torch's DeviceMesh, torchtitan, Megatron-core."""

from __future__ import annotations

import re

#: Axes of torchtitan and their flattened meshes; a group may be described by one of these alone.
TITAN_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "dp", "fsdp", "sp", "edp", "loss", "dp_cp", "dp_shard_cp")

#: Megatron-core's parallel_state names; suffixes such as _GLOO do not change the axis.
MEGATRON = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "dp_tp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp_tp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "cp_tp",
    "MODEL_PARALLEL_GROUP": "tp_pp",
    "EMBEDDING_GROUP": "embedding",
    "POSITION_EMBEDDING_GROUP": "embedding",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "ep_etp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "ep_etp_pp",
}
_WORDS = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep", "data": "dp", "sequence": "sp"}


def axis_of_description(description: str) -> str:
    """The axis that a group's description names; '' where it names none (``undefined``, ``default_pg``, a user's own words)."""
    text = description.strip()
    if text.startswith("mesh_") and len(text) > 5:
        return text[5:]
    upper = re.sub(r"_GLOO$", "", text.upper().removeprefix("_"))
    if upper in MEGATRON:
        return MEGATRON[upper]
    if text in TITAN_AXES:
        return text
    word = re.fullmatch(r"([a-z]+)[ _-](?:parallel[ _-])?(?:group|pg)", text.lower())
    return _WORDS.get(word.group(1), "") if word else ""
