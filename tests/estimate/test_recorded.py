"""Plans from manifests: what each recording is to the model, and that no manifest, however wrong, is anything but a plan or a sentence."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.analyses.comparison.predicted import MOST_BYTES, predict
from tracekit.errors import InputError, UsageError
from tracekit.estimate.recorded import parameters_of, recorded, routed_rows
from tracekit.estimate.recorded_axes import by_roles
from tracekit.manifest import Axis, Batch, ExpertLoad, Manifest, Optimizer, Parameter, Precision, Unit, decode

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
#: One manifest of every sample that has some.
MANIFESTS = {path.parent.name: path for path in sorted(SAMPLES.glob("*/rank_*.manifest.json"), reverse=True)}
MODEL = {"architecture": "transformer", "layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "vocabulary": 40, "sequence": 8}
FP32 = Precision("float32", "float32", "float32", "float32")


def manifest(strategy: str | None = "ddp", **more: Any) -> Manifest:
    """``strategy``: what the program says of itself; None: nothing."""
    mesh = [Axis(name, size) for name, size in more.pop("mesh", {"dp_replicate": 2}).items()]
    plan = more.pop("plan", {"strategy": strategy} if strategy else {})
    return Manifest(plan=plan, mesh=mesh, model=more.pop("model", MODEL), precision=more.pop("precision", FP32), **more)


def sample(name: str) -> Manifest:
    return decode(MANIFESTS[name].read_bytes(), name)


@pytest.mark.parametrize(
    ("name", "strategy", "mesh"),
    [
        ("ddp_2", "ddp", "dp_replicate=2"),
        ("zero2_2", "zero2", "dp_shard=2"),
        ("fsdp2_uneven_3", "fsdp2", "dp_shard=3"),
        ("hsdp_4", "hsdp", "dp_replicate=2,dp_shard=2"),
        ("fsdp2_fake_rank5_of_16", "fsdp2", "dp_shard=4"),  # axes pp and tp of its mesh are idle
        ("tensor_parallel_2", "none", "tp=2"),
        ("pipeline_1f1b_2", "none", "pp=2"),
        ("expert_parallel_2", "ddp", "dp_replicate=2,ep=2"),
        ("hybrid_4d_16", "fsdp2", "pp=2,dp_shard=2,cp=2,tp=2"),
        ("hybrid_5d_fake_rank45_of_64", "fsdp2", "pp=2,dp_shard=8,cp=2,tp=2,ep=2"),  # ranks of ep are data-parallel ones
        ("deepspeed_zero3_2", "zero3", "dp_shard=2"),
        ("accelerate_fsdp2_2", "fsdp2", "dp_shard=2"),
    ],
)
def test_what_a_recording_is_to_the_model(name: str, strategy: str, mesh: str) -> None:
    plan = recorded(sample(name)).plan
    assert (plan.strategy.name, plan.mesh.text()) == (strategy, mesh)


def test_every_sample_that_trains_has_a_plan() -> None:
    without = {name for name in MANIFESTS if predict(0, sample(name)).problem}
    assert without == {name for name in MANIFESTS if name.startswith("collectives")}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"strategy": None, "model": {}}, "lists no parameters"),
        ({"strategy": None}, "does not tell how data-parallel ranks share the model"),
        ({"mesh": {"my_axis": 2}}, "knows no mesh axis 'my_axis'"),
        ({"mesh": {"dp_replicate": 0}}, "axes below 1"),
        ({"mesh": {"dp_replicate": 10**7}}, "more than 1000000 ranks"),
        ({"strategy": "mine"}, "there is no strategy called 'mine'"),
        ({"strategy": {"name": "ddp", "bucket_cap_mb": "large"}}, "the manifest's plan: bucket_cap_mb is 'large'"),
        ({"strategy": {"name": "ddp", "bucket_cap_mb": 1e400}}, "bucket_cap_mb is inf"),
        ({"strategy": {"name": "ddp", "bucket_cap_mb": -1}}, "buckets of -1.0 MiB"),
        ({"strategy": {"name": "ddp", "sync_every_micro_batch": "yes"}}, "sync_every_micro_batch is 'yes'"),
        ({"strategy": {"name": "fsdp2", "reshard_after_forward": "maybe"}}, "reshard_after_forward is 'maybe'"),
        ({"strategy": ["ddp"]}, "the manifest's plan is list"),
        ({"plan": {"strategy": "ddp", "implementation": "theirs"}}, "no implementation called 'theirs'"),
        ({"plan": {"strategy": "ddp", "implementation": {"padding": 3}}}, "padding is int"),
        ({"plan": {"strategy": "ddp", "implementation": {"padding": "wool"}}}, "no padding rules of 'wool'"),
        ({"plan": {"strategy": "ddp", "tea": True}}, "the manifest's plan has no 'tea'"),
        ({"plan": {"not_modelled": "a view"}}, "no formula for a view"),
        ({"model": {**MODEL, "hidden": -16}}, "hidden is -16"),
        ({"model": {**MODEL, "layers": 10**9}}, "layers is larger than 10000"),
        ({"model": {**MODEL, "heads": True}}, "heads is True"),
        ({"model": {**MODEL, "norm": ["rmsnorm"]}}, "norm is list"),
        ({"model": {**MODEL, "kv_heads": 3}}, "kv_heads do not divide"),
        ({"precision": None}, "element type of the parameters is not recorded"),
        ({"precision": Precision("int4")}, "element type of the parameters is not recorded"),
        ({"batch": Batch(micro_batch=-1)}, "micro_batch is -1"),
        ({"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv"}}, "zbv has two chunks a rank, not 1"),
        ({"mesh": {"pp": 2}, "pipeline": {"schedule": 7}}, "schedule is int"),
        ({"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}, "coordinate": {"pp": 5}}, "coordinate along pp"),
    ],
)
def test_what_the_model_cannot_take_is_named(wrong: dict[str, Any], problem: str) -> None:
    found = manifest(**wrong)
    with pytest.raises(UsageError, match=problem):
        recorded(found)
    assert problem in predict(0, found).problem


@pytest.mark.parametrize(("stage", "messages", "layers"), [(0, 8, {0, 5}), (1, 16, {1, 4}), (2, 8, {2, 3})])
def test_chunks_as_a_v_hand_on_to_both_neighbours_and_the_innermost_to_itself(stage: int, messages: int, layers: set[int]) -> None:
    """Four micro-batches: every boundary to another rank is crossed once each way; the first stage has both ends of the model."""
    pipeline = {"schedule": "zbv", "virtual_stages": 2}
    told = manifest(
        mesh={"pp": 3},
        plan={},
        pipeline=pipeline,
        coordinate={"pp": stage},
        batch=Batch(micro_batch=1, micro_batches=4),
        model={**MODEL, "layers": 6},
    )
    found = predict(0, told)
    assert {key[:2]: volume.calls for key, volume in found.traffic.items()} == {("pp", "send"): messages, ("pp", "recv"): messages}
    assert found.peak is None and found.state is not None
    layer = 4 * 16 * 16 + 2 * 16 * 32 + 2 * 16
    ends = 2 * 40 * 16 + 16 if stage == 0 else 0
    assert found.state.parameters == 4 * (len(layers) * layer + ends)


def test_a_job_that_is_no_workload_is_known_by_its_units() -> None:
    units = [Unit("", "fsdp2", root=True), Unit("layers.0", "fsdp2", reshard_after_forward=False)]
    parameters = [Parameter("a", [6, 4], "float32", "layers.0"), Parameter("b", [3], "float32")]
    found = predict(0, manifest(None, mesh={"dp_shard": 2}, model={}, units=units, parameters=parameters, optimizer=Optimizer("AdamW")))
    assert found.problem == "" and found.peak is None and found.state is not None
    # a: 3 of 6 rows of 4; b: 2 of 3 elements, the padding of a rank with fewer too
    assert (found.state.parameters, found.state.optimizer_state) == ((12 + 2) * 4, (12 + 2) * 8)
    volumes = {key: (volume.calls, volume.full_bytes) for key, volume in found.traffic.items()}
    assert volumes == {
        ("dp_shard", "all_gather", "parameter_gather"): (2, (24 + 4) * 4),
        ("dp_shard", "reduce_scatter", "gradient_scatter"): (2, (24 + 4) * 4),
    }


LABELS = (
    *("hybrid_run3", "tensor_tuned_run", "", "fsdp2", "fsdp1", "ddp", "zero3", "hsdp_7b", "pipeline_gpipe", "expert_parallel"),
    *("context_parallel_ring", "collectives", "deepspeed_zero", "accelerate_fsdp2", "my run, Tuesday"),
)


@pytest.mark.parametrize("without_plan", [False, True])
@pytest.mark.parametrize("name", ["fsdp2_2", "hybrid_5d_8", "ddp_2", "tensor_parallel_2"])
def test_what_a_job_is_called_chooses_nothing(name: str, without_plan: bool) -> None:
    told = msgspec.structs.replace(sample(name), **({"plan": {}} if without_plan else {}))
    found = [predict(0, msgspec.structs.replace(told, strategy=label)) for label in LABELS]
    assert len({str((each.problem, each.found, each.state, each.peak, sorted(each.traffic.items()))) for each in found}) == 1


@pytest.mark.parametrize("name", ["fsdp2_2", "fsdp2_uneven_3", "hsdp_4", "fsdp1_2", "ddp_2"])
def test_a_recording_without_a_plan_is_what_was_observed(name: str) -> None:
    """Units or buckets, their mesh and element types say all that the workload says of itself."""
    told = sample(name)
    observed, said = predict(0, msgspec.structs.replace(told, plan={})), predict(0, told)
    assert observed.peak is not None and observed.peak == said.peak
    assert (observed.state, observed.traffic) == (said.state, said.traffic)


@pytest.mark.parametrize("placement", ["S(0)", "_S(0, 2)", "Shard(dim=0)", "_StridedShard(dim=0, split_factor=2)"])
def test_placements_divide_a_parameter_over_tensor_parallel_ranks(placement: str) -> None:
    divided = Parameter("w", [6, 4], "bfloat16", axes=["tp"], placements=[placement])
    told = [divided, Parameter("n", [4], "float32", axes=["tp"], placements=["R"])]
    found = parameters_of(manifest(None, mesh={"tp": 2}, parameters=told))
    assert [(parameter.shape, parameter.element_bytes) for parameter in found] == [((3, 4), 2), ((4,), 4)]


def test_loads_of_experts_by_step() -> None:
    def load(layer: int, step: int, routed: list[int], received: list[int]) -> ExpertLoad:
        return ExpertLoad(f"layers.{layer}.mlp", step, [0], 2, routed=routed, received=received)

    loads = [load(0, 3, [5, 3], [9]), load(1, 3, [4, 4], [2]), load(0, 4, [8, 0], [16])]
    model = {**MODEL, "experts": 2, "experts_per_token": 1}
    found = manifest(mesh={"ep": 2}, model=model, experts=loads, batch=Batch(micro_batch=1, micro_batches=2))
    assert recorded(found, 3).plan.expert_loads == (5, 1)  # 9 and 2 rows in two micro-batches
    assert recorded(found, 4).plan.expert_loads == (8,)
    assert recorded(found, 5).plan.expert_loads == recorded(found).plan.expert_loads == ()
    assert routed_rows(found, 3) == (16, 16, 11)
    stage = manifest(mesh={"ep": 2}, model=model, experts=loads[1:2])
    assert recorded(stage, 3).plan.expert_loads == (-1, 2)  # layer 0 is on another stage
    assert routed_rows(found, 5) is None


# Hostile manifests ---------------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([-(2**63), 2**31, 2**63 - 1, 10**12, 1e308, -0.5, 0.1]),
    st.text(max_size=8),
    st.sampled_from(["float32", "bfloat16", "ddp", "fsdp2", "hybrid_5d", "pipeline_1f1b", "gpipe", "interleaved_1f1b", "tp", "pp", "S(0)"]),
    st.lists(st.integers(-2, 2**40), max_size=3),
    st.dictionaries(st.sampled_from(["pp", "dp_shard", "layers", "schedule"]), st.integers(-1, 9), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and every index in a document, but of the long columns only the first."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value[:2])) if isinstance(value, list) else []
    found = [path] if path else []
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def changed(document: Any, changes: list[tuple[tuple[Any, ...], Any, bool]]) -> Any:
    """A copy with some places set to other values, or taken out of a mapping; places that an earlier change removed are passed over."""
    document = copy.deepcopy(document)
    for path, value, drop in changes:
        inner = document
        for key in path[:-1]:
            inner = inner[key] if _has(inner, key) else None
        if _has(inner, path[-1]):
            if drop and isinstance(inner, dict):
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
    return document


def _has(inner: Any, key: Any) -> bool:
    return key in inner if isinstance(inner, dict) else isinstance(inner, list) and isinstance(key, int) and key < len(inner)


def documents() -> dict[str, Any]:
    found = {}
    names = ("ddp_2", "fsdp2_2", "zero1_2", "zero3_2", "deepspeed_zero2_2", "expert_parallel_2", "pipeline_interleaved_2")
    for name in (*names, "hybrid_5d_fake_rank45_of_64"):
        document = json.loads(MANIFESTS[name].read_text())
        document["owners"], document["calls"], document["groups"] = {}, {}, []  # other tests turn to these
        found[name] = document
    return found


DOCUMENTS = documents()
FREE = {"plan", "options", "model", "pipeline", "mesh", "batch", "coordinate", "experts", "precision", "optimizer", "strategy"}


def changes(document: Any) -> st.SearchStrategy[list[tuple[tuple[Any, ...], Any, bool]]]:
    """A few places with other values, or without: most of them where nobody has checked the types."""
    everywhere = places(document)
    place = st.one_of(st.sampled_from([path for path in everywhere if path[0] in FREE]), st.sampled_from(everywhere))
    return st.lists(st.tuples(place, VALUES, st.booleans()), min_size=1, max_size=4)


CHANGES = {name: changes(document) for name, document in DOCUMENTS.items()}


@settings(max_examples=40, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(DOCUMENTS)))
def test_a_manifest_is_refused_predicted_or_has_a_reason(data: st.DataObject, name: str) -> None:
    document = changed(DOCUMENTS[name], data.draw(CHANGES[name]))
    try:
        found = decode(json.dumps(document).encode(), name)
    except InputError:
        return
    prediction = predict(found.rank, found, 3)
    if prediction.problem:
        assert prediction.found is None and len(prediction.problem) < 200
    else:
        assert prediction.state is not None and 0 <= prediction.state.total <= MOST_BYTES
        assert all(0 <= volume.full_bytes <= MOST_BYTES and volume.calls >= 0 for volume in prediction.traffic.values())
        assert all(moment.total <= MOST_BYTES for moment in prediction.moments)


def test_axes_are_known_by_what_the_model_uses_them_for():
    """A user's mesh ``data, model``: FSDP2 along the first, DTensors along the second; traffic is told by the user's names."""
    parameter = Parameter("w", [8, 8], "float32", placements=["Shard(0)", "Shard(1)"], axes=["data", "model"])
    unit = Unit("", "fsdp2", ["w"], 64, 64, True, True)
    told = Manifest(
        rank=3,
        world_size=4,
        mesh=[Axis("data", 2), Axis("model", 2)],
        coordinate={"data": 1, "model": 1},
        roles={"data": "dp_shard", "model": "tp"},
        parameters=[parameter],
        units=[unit],
        precision=Precision(parameters="float32"),
    )
    found = recorded(by_roles(told))
    assert (found.plan.mesh.dp_shard, found.plan.mesh.tp, found.shard_rank) == (2, 2, 1)
    assert found.axis_names["dp_shard"] == "data"
    assert found.axis_names["tp"] == "model"
    assert by_roles(told).parameters[0].axes == ["dp_shard", "tp"]


def test_axes_that_do_the_same_keep_their_names():
    mesh = [Axis("left", 2), Axis("right", 2)]
    told = Manifest(rank=0, world_size=4, mesh=mesh, roles={"left": "tp", "right": "tp"})
    assert by_roles(told).mesh == mesh
