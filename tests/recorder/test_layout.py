"""The mesh and what each axis is for, as the recorder finds it out from models that nobody described."""

import json

import pytest

pytest.importorskip("torch")

from tests.recorder.launching import JOBS, run_job

NONE = "how the 4 ranks share the model is not known: the recorder was given no mesh, and found none"
#: Case -> axes, this rank's coordinate, what each axis is for, axes of its groups. The rank is 2 of 4.
KNOWN = {
    "ddp": ({"dp_replicate": 4}, [2], ["dp_replicate"], ["dp_replicate"]),
    "what ddp is around": ({"dp_replicate": 4}, [2], ["dp_replicate"], ["dp_replicate"]),
    "compiled ddp": ({"dp_replicate": 4}, [2], ["dp_replicate"], ["dp_replicate"]),
    "ddp with a mesh of words": ({"batch": 4}, [2], ["dp_replicate"], ["batch"]),
    "zero1": ({"dp_shard": 4}, [2], ["dp_shard"], ["dp_shard"]),
    "ddp of pairs": ({}, [], [], ["dp_replicate"]),
    "fsdp2": ({"dp_shard": 4}, [2], ["dp_shard"], ["dp_shard"]),
    "fsdp2 on an axis called dp": ({"dp": 4}, [2], ["dp_shard"], ["dp"]),
    "hsdp": ({"outer": 2, "inner": 2}, [1, 0], ["dp_replicate", "dp_shard"], ["inner", "outer", "world"]),
    "fsdp2 and tensor parallel": ({"data": 2, "model": 2}, [1, 0], ["dp_shard", "tp"], ["data", "model", "world"]),
    "tensor parallel": ({"tp": 4}, [2], ["tp"], ["tp"]),
    "columns first": ({"dp_shard": 2, "tp": 2}, [0, 1], ["dp_shard", "tp"], ["dp_shard", "tp", "world"]),
    "fsdp1": ({"dp_shard": 4}, [2], ["dp_shard"], ["dp_shard"]),
    "fsdp1 that shards nothing": ({"dp_replicate": 4}, [2], ["dp_replicate"], ["dp_replicate"]),
    "a plain model": ({}, [], [], []),
    "an axis of one's own": ({"left": 2, "right": 2}, [1, 0], [], ["left", "right", "world"]),
}
NOTES = {
    "ddp of pairs": [NONE.replace("known:", "known beyond dp_replicate:")],
    "a plain model": [NONE],
    "an axis of one's own": ["what the model uses the mesh axis left, right for is not known"],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    output = tmp_path_factory.mktemp("layouts") / "found"
    run_job(JOBS / "layouts.py", str(output), ranks=4)
    return {line["case"]: line for line in map(json.loads, output.read_text().splitlines())}


@pytest.mark.slow
def test_the_mesh_comes_from_the_model_where_nobody_tells_it(found):
    assert set(found) == set(KNOWN)
    for case, (axes, coordinate, roles, groups) in KNOWN.items():
        line = found[case]
        assert (line["axes"], list(line["coordinate"].values()), line["groups"]) == (axes, coordinate, groups), case
        assert [line["roles"][axis] for axis in axes if axis in line["roles"]] == roles, case
        assert line["notes"] == NOTES.get(case, []), case
