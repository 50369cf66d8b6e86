"""Plans from plain values, and the search for meshes that fit."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from tracekit.errors import UsageError
from tracekit.estimate.estimate import estimate
from tracekit.estimate.fit import SEARCHED, Candidate, divisors, fitting, meshes_of, search, usual_batch, why_best
from tracekit.estimate.plan import MeshSizes
from tracekit.estimate.presets import PRESETS
from tracekit.estimate.spec import spec_of

TINY = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 160, "vocabulary": 500, "sequence": 32}


def test_a_whole_plan():
    spec = spec_of(
        {
            "model": {"preset": "llama3-8b", "sequence": 4096},
            "mesh": "pp=2,dp_shard=4,tp=2",
            "strategy": {"name": "fsdp2", "reshard_after_forward": False},
            "recipe": "fsdp_bf16",
            "optimizer": "momentum",
            "batch": {"micro_batch": 2, "global_batch": 64, "recompute": "selective", "causal": True},
            "hardware": {"preset": "h200", "memory_bytes": 10**11},
            "network": "infiniband-xdr",
            "schedule": "gpipe",
            "efficiency": 0.4,
        }
    )
    assert (spec.shape.sequence, spec.shape.hidden) == (4096, 4096)
    assert spec.plan.mesh == MeshSizes(pp=2, dp_shard=4, tp=2)
    assert spec.plan.strategy.reshard_after_forward is False
    assert spec.plan.recipe.moments == (4,)
    assert (spec.plan.batch.micro_batches, spec.plan.global_batch) == (8, 64)
    assert (spec.hardware.name, spec.hardware.memory_bytes, spec.hardware.outside.gb_s) == ("H200", 10**11, 100.0)
    assert spec.assumptions.efficiency == 0.4


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [({}, "none"), ("pp=2,tp=2", "none"), ("dp=8", "fsdp2"), ("ddp=8", "ddp"), ("dp_replicate=2,dp_shard=4", "hsdp"), ("cp=2", "fsdp2")],
)
def test_the_strategy_follows_from_the_mesh(mesh, strategy):
    assert spec_of({"model": TINY, "mesh": mesh}).plan.strategy.name == strategy


def test_ddp_takes_dp_for_replicas():
    spec = spec_of({"model": TINY, "mesh": "dp=8", "strategy": "ddp"})
    assert (spec.plan.mesh.dp_replicate, spec.plan.mesh.dp_shard) == (8, 1)


def test_a_recipe_of_ones_own():
    own = {"parameter": 4, "compute": 1, "gradient": 4, "reduce": 2, "moments": [4, 1], "master": 0}
    assert spec_of({"model": TINY, "recipe": own}).plan.recipe.total == 4 + 4 + 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "no model is given"),
        ({"model": "llama4"}, "there is no model called 'llama4'; did you mean llama"),
        ({"model": TINY, "mehs": {}}, "the plan has no 'mehs'; did you mean mesh?"),
        ({"model": {**TINY, "layer": 3}}, "model has no 'layer'; did you mean layers?"),
        ({"model": {"layers": 2}}, "model: hidden, heads, ffn, vocabulary, sequence not given"),
        ({"model": {**TINY, "layers": "two"}}, "model: layers is 'two'; give a whole number"),
        ({"model": {**TINY, "layers": 10**9}}, "model: layers is larger than 10000"),
        ({"model": {**TINY, "layers": True}}, "model: layers is True; give a whole number"),
        ({"model": {**TINY, "heads": 0}}, "the model's heads is 0"),
        ({"model": {**TINY, "kv_heads": 3}}, "3 kv_heads do not divide 4 heads"),
        ({"model": [1]}, "model is list; give keys with values"),
        ({"model": TINY, "mesh": "pp=0"}, "--mesh: 'pp=0' is not NAME=SIZE"),
        ({"model": TINY, "mesh": {"xx": 2}}, "mesh has no 'xx'"),
        ({"model": TINY, "mesh": {"dp": 2, "dp_shard": 2}}, "axis dp_shard is given twice"),
        ({"model": TINY, "mesh": {"dp_shard": -1}}, "mesh axis dp_shard has size -1"),
        ({"model": TINY, "mesh": {"dp_shard": 10**8}}, "a mesh of 100000000 ranks"),
        ({"model": TINY, "strategy": "fsdp3"}, "there is no strategy called 'fsdp3'"),
        ({"model": TINY, "strategy": {"name": "fsdp2", "reshard_after_forward": 0}}, "reshard_after_forward 0"),
        ({"model": TINY, "mesh": "dp_replicate=2,dp_shard=2", "strategy": "fsdp1"}, "fsdp1 has no replicas"),
        ({"model": TINY, "recipe": "fp12"}, "there is no recipe called 'fp12'"),
        ({"model": TINY, "optimizer": "lion"}, "there is no optimizer called 'lion'"),
        ({"model": TINY, "batch": {"micro_batches": 2, "global_batch": 2}}, "both global_batch and micro_batches"),
        ({"model": TINY, "mesh": "dp=3", "batch": {"global_batch": 4}}, "a global batch of 4 does not divide into micro-batches of 1"),
        ({"model": TINY, "batch": {"recompute": "some"}}, "there is no recompute 'some'"),
        ({"model": TINY, "hardware": "gtx"}, "there is no hardware called 'gtx'"),
        ({"model": TINY, "hardware": {"preset": "h100", "memory_bytes": 0}}, "a size or rate of 0 or less"),
        ({"model": TINY, "network": "token-ring"}, "there is no network called 'token-ring'"),
        ({"model": TINY, "efficiency": 2}, "an efficiency of 2"),
        ({"model": TINY, "efficiency": float("nan")}, "efficiency is nan"),
        ({"model": TINY, "overlap": -0.1}, "an overlap of -0.1"),
        ({"model": TINY, "schedule": "2f2b"}, "there is no schedule '2f2b'"),
        ({"model": TINY, "virtual_stages": 2}, "1f1b has one chunk a rank"),
        ({"model": {1: 2}}, "model has a key that is no word: int"),
    ],
)
def test_what_is_wrong_is_said(values, message):
    with pytest.raises(UsageError) as error:
        spec_of(values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mesh", "more", "message"),
    [
        ("tp=3", {}, "tp=3 does not divide 4 heads"),
        ("pp=8", {"batch": {"micro_batches": 8}}, "8 stages of 1 chunks need more than 4 layers"),
        ("dp=2,ep=2", {}, "ep=2, and the model has no experts"),
        ("cp=5", {}, "cp=5 does not divide a sequence of 32"),
        ("tp=2,cp=4", {"context_parallel": "ulysses"}, "ulysses over cp=4 cannot divide 2 heads"),
    ],
)
def test_meshes_that_cannot_divide_the_model(mesh, more, message):
    spec = spec_of({"model": TINY, "mesh": mesh, **more})
    with pytest.raises(UsageError) as error:
        estimate(spec.shape, spec.plan, spec.hardware)
    assert message in str(error.value)


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_can_be_estimated(name):
    mesh = "dp_shard=64,tp=8" if PRESETS[name].heads % 8 == 0 else "dp_shard=64"
    spec = spec_of({"model": name, "mesh": mesh, "batch": {"recompute": "full"}})
    found = estimate(spec.shape, spec.plan, spec.hardware)
    assert found.peak.peak_bytes > 0
    assert 0 < (found.mfu or 0) < (found.hfu or 0) <= 0.5
    assert found.step.total >= found.step.compute


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]


def test_meshes_of_eight_ranks():
    spec = spec_of({"model": TINY, "strategy": "ddp"})
    found = list(meshes_of(8, spec))
    assert len(found) == len(set(found)) == 10  # 8 = 2^3 over pp, tp and replicas; nobody divides a short sequence
    assert all(mesh.world == 8 and mesh.dp_shard == 1 for mesh in found)


def searched(memory: int, world: int = 8, fixed: Collection[str] = (), **values) -> list[Candidate]:
    return search(spec_of({"model": TINY, **values}), world, memory, 32, fixed)


def test_the_search_ranks_what_fits_and_says_why_the_rest_does_not():
    found = searched(2**40)
    fit = fitting(found)
    assert [c.seconds for c in fit if not c.tight] == sorted(c.seconds for c in fit if c.seconds is not None and not c.tight)
    reasons = {c.mesh.text(): c.reason for c in found if not c.fits}
    assert reasons["tp=8"] == "tp=8 does not divide 4 heads"
    assert reasons["pp=8"] == "8 stages of 1 chunks need more than 4 layers"
    assert len(found) == len({c.mesh for c in found})


def test_a_smaller_device_fits_less():
    large, small, none = (fitting(searched(memory)) for memory in (2**40, 3_000_000, 1000))
    assert len(large) > len(small) > len(none) == 0
    assert {c.mesh for c in small} <= {c.mesh for c in large}
    reason = next(c.reason for c in searched(1000) if c.peak is not None)
    assert "needs" in reason and "are" in reason


def test_a_candidate_says_what_the_estimate_says():
    spec = spec_of({"model": TINY, "mesh": "dp_shard=4,tp=2", "batch": {"global_batch": 32}})
    candidate = next(c for c in searched(2**40, fixed=SEARCHED) if c.mesh == spec.plan.mesh)
    found = estimate(spec.shape, spec.plan, spec.hardware, spec.assumptions)
    assert candidate.seconds == found.step.total
    assert candidate.peak == found.peak.memory.reserved
    assert candidate.micro_batches == 8


def test_a_batch_that_does_not_divide_is_a_reason():
    found = search(spec_of({"model": TINY}), 8, 2**40, 4)
    assert any("a batch of 4 does not divide" in c.reason for c in found if c.mesh.data == 8)


def test_times_follow_the_assumptions():
    spec = spec_of({"model": "llama3-8b", "mesh": "dp_shard=8"})

    def total(**how: object) -> float:
        return estimate(spec.shape, spec.plan, spec.hardware, replace(spec.assumptions, **how)).step.total

    assert total(efficiency=0.25) > total(efficiency=0.5)
    assert total(overlap=0.0) > total(overlap=1.0)
    assert total(latency="nccl") != total(latency="preset")


def test_nothing_is_hidden_without_overlap():
    spec = spec_of({"model": "llama3-8b", "mesh": "dp_shard=16", "overlap": 0})
    step = estimate(spec.shape, spec.plan, spec.hardware, spec.assumptions).step
    assert step.exposed == pytest.approx(step.communication)
    assert step.total == pytest.approx(step.compute + step.exposed + step.optimizer)


def test_the_bubble_of_the_predicted_step_is_that_of_the_schedule():
    spec = spec_of({"model": TINY, "mesh": "pp=4", "batch": {"micro_batches": 8}})
    found = estimate(spec.shape, spec.plan, spec.hardware, spec.assumptions)
    assert found.step.bubble == pytest.approx((found.step.compute + found.step.exposed) * 3 / 8)
    assert found.bubble_shares == pytest.approx((3 / 8, 3 / 11))


def test_settings_are_searched_and_the_best_says_why():
    """With room for everything nothing is computed again; with little, more is; what is given stays."""
    best = fitting(searched(2**40))[0]
    assert best.plan is not None and best.plan.batch.recompute == "none" and not best.tight
    kept = fitting(searched(2**40, fixed=("recompute",), batch={"recompute": "full"}))
    assert {c.plan.batch.recompute for c in kept if c.plan is not None} == {"full"}
    assert why_best([best]).startswith(f"{best.mesh.text()} is best with {best.settings()}: its step is ")
    assert why_best([]) == ""


def test_settings_leave_headroom_and_tight_ones_come_last():
    (peak,) = {c.peak for c in searched(2**40, fixed=SEARCHED) if c.mesh.text() == "dp_shard=8"}
    assert peak is not None
    tight = next(c for c in searched(peak + 1, fixed=SEARCHED) if c.mesh.text() == "dp_shard=8")
    assert tight.fits and tight.tight
    order = [c.tight for c in fitting(searched(peak + 1, fixed=SEARCHED))]
    assert order == sorted(order)


def test_tensor_parallelism_stays_within_the_node_where_anything_fits():
    small = {"hardware": {"preset": "h100", "per_node": 2}}
    found = searched(2**40, **small)
    assert all(c.mesh.tp <= 2 for c in fitting(found))
    assert any(c.mesh.tp == 4 and "leaves the node of 2 devices" in c.reason for c in found)


def test_sequences_are_divided_further_where_nothing_else_fits():
    def cps(memory: int) -> set[int]:
        return {c.mesh.cp for c in search(spec_of({"model": {**TINY, "sequence": 16384}}), 8, memory, 8)}

    assert cps(2**40) == {1, 2}
    assert cps(1000) == {1, 2, 4, 8}


#: Model, ranks, sequences a step (tokens of the published runs over 8,192 or 4,096); (pp, tp) that is known to be used.
KNOWN = [
    ("llama3-8b", 8, 128, "h100", (1, 1)),  # FSDP over 8: torchtitan
    ("llama3-70b", 64, 256, "h100", (1, 8)),  # FSDP and TP 8: torchtitan
    ("llama3-70b", 64, 256, "h100", (1, 1)),  # FSDP over all
    ("llama3-405b", 16384, 2048, "h100", (16, 8)),  # arXiv:2407.21783, table 4
    ("llama3-405b", 16384, None, "h100", (16, 8)),  # the step that is taken where none is given
]


@pytest.mark.parametrize(("model", "ranks", "batch", "device", "known"), KNOWN)
def test_what_is_known_to_be_used_is_among_the_first_five(model, ranks, batch, device, known):
    spec = spec_of({"model": model, "hardware": device})
    first = fitting(search(spec, ranks, 80 * 10**9, batch or usual_batch(spec, ranks)))[:5]
    assert known in {(c.mesh.pp, c.mesh.tp) for c in first}


@pytest.mark.slow
def test_the_largest_mixture_of_experts_on_2048_ranks():
    """DeepSeek-V3 (arXiv:2412.19437, section 3.2): 16 stages, experts over 64 ranks, their exchanges behind compute."""
    spec = spec_of({"model": "deepseek-v3", "hardware": "h800"})
    found = fitting(search(spec, 2048, 80 * 10**9, 15360))
    assert (16, 64) in {(c.mesh.pp, c.mesh.ep) for c in found[:5]}
    assert all(c.plan is not None and c.plan.expert_overlap for c in found[:5])


def test_a_step_without_a_batch_is_one_that_people_take():
    assert usual_batch(spec_of({"model": "llama3-8b"}), 8) == 8
    assert usual_batch(spec_of({"model": "llama3-405b"}), 16384) == 2048
    assert usual_batch(spec_of({"model": TINY, "batch": {"micro_batch": 2}}), 3) == 6


def test_exchanges_of_experts_hide_behind_another_micro_batch_that_stays_in_memory():
    values = {"model": "mixtral-8x7b", "mesh": "pp=2,dp_shard=4,ep=4", "batch": {"micro_batches": 4}}
    alone, overlapped = (spec_of({**values, "expert_overlap": overlap}) for overlap in (False, True))
    before, after = (estimate(spec.shape, spec.plan, spec.hardware) for spec in (alone, overlapped))
    assert after.step.exposed < before.step.exposed and after.step.communication == before.step.communication
    one = before.roles[1].memory.peak.bytes["activations"]  # the last stage has one micro-batch in flight
    assert after.roles[1].memory.peak.bytes["activations"] > one
