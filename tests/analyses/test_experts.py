from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import oracle
from tests.analyses.made import Trace, group, job_of
from tests.workloads.recording import needs_torch, record
from tracekit.analyses import experts
from tracekit.job.join import join
from tracekit.job.model import Job
from tracekit.job.window import Task, reduce_window
from tracekit.manifest import Axis, ExpertLoad, Group, Manifest

ROOT = Path(__file__).resolve().parents[2]


def load(rank: int, routed: list[int], received: list[int], layer: str = "layers.0.moe", step: int = 1, **more: Any) -> ExpertLoad:
    """Of a rank that owns experts 2 rank and 2 rank + 1 of four."""
    return ExpertLoad(layer, step, [2 * rank, 2 * rank + 1], top_k=2, routed=routed, received=received, **more)


def recorded(*loads: Sequence[ExpertLoad], steps: Sequence[int] = (1,), axis: str = "ep", **more: Any) -> Job:
    """Ranks with these loads in their manifests, all in one group of the expert axis."""
    ranks = list(range(len(loads)))
    windows = []
    for rank, own in enumerate(loads):
        trace = Trace(rank, len(loads), groups=[group("0", "default_pg", ranks)])
        for place, number in enumerate(steps):
            trace.step(number, 100 * place, 100)
        trace.kernel("gemm", 0, 10)
        groups = [Group("0", ranks, axis=axis)]
        manifest = Manifest(rank=rank, world_size=len(loads), mesh=[Axis(axis, len(loads))], groups=groups, experts=list(own), **more)
        windows.append(reduce_window(oracle.tables(trace.text()), f"rank{rank}.json", Task(), manifest))
    return join(windows, [], None, None)


def told(job: Job) -> list[dict[str, Any]]:
    """``experts`` of the JSON."""
    result: list[dict[str, Any]] = json.loads(json.dumps(experts.analyze(job).json(), allow_nan=False))["experts"]
    return result


def test_tokens_by_rank_and_expert_by_hand() -> None:
    (layer,) = told(recorded([load(0, [10, 20, 30, 40], [14, 26])], [load(1, [4, 6, 50, 40], [80, 80])]))
    assert layer == {
        "layer": "layers.0.moe",
        "group": None,
        "axis": None,
        "load_from": "manifest",
        "experts": 4,
        "top_k": 2,
        "capacity": None,
        "padded": False,
        "steps": 1,
        "tokens_by_rank": {"0": 40, "1": 160},
        "tokens_by_expert": {"0": 14, "1": 26, "2": 80, "3": 80},
        "received_bytes_by_rank": None,
        "imbalance": 1.6,  # 160 / mean of 40 and 160
        "mean_imbalance": 1.6,
        "expert_imbalance": 1.6,  # 80 / 50
        "worst_step": {"step": 1, "rank": 1, "imbalance": 1.6},
        "routed_tokens": 200,
        "dropped_tokens": 0,
        "dropped_share": 0.0,
        "not_measured": {},
    }


def test_steps_are_summed_and_the_most_uneven_one_is_named() -> None:
    first = [load(0, [5] * 4, [20, 10]), load(0, [5] * 4, [5, 5], step=2), load(0, [5] * 4, [20, 0], layer="layers.1.moe")]
    second = [load(1, [5] * 4, [5, 5]), load(1, [5] * 4, [25, 5], step=2), load(1, [5] * 4, [10, 10], layer="layers.1.moe")]
    zero, one = told(recorded(first, second, steps=(1, 2)))
    assert (zero["tokens_by_rank"], zero["imbalance"], zero["mean_imbalance"]) == ({"0": 40, "1": 40}, 1.0, 1.5)
    assert zero["worst_step"] == {"step": 1, "rank": 0, "imbalance": 1.5} and zero["steps"] == 2
    assert (one["layer"], one["tokens_by_rank"], one["imbalance"], one["steps"]) == ("layers.1.moe", {"0": 20, "1": 20}, 1.0, 1)


def test_only_steps_of_the_trace_count() -> None:
    loads = [[load(rank, [5] * 4, [10, 10], step=step) for step in (0, 1, 2)] for rank in range(2)]
    (layer,) = told(recorded(*loads, steps=(2,)))
    assert (layer["steps"], layer["tokens_by_rank"], layer["routed_tokens"]) == (1, {"0": 20, "1": 20}, 40)


def test_what_a_padded_exchange_hides_is_summed_from_those_who_sent() -> None:
    (layer,) = told(
        recorded(
            [load(0, [10, 20, 30, 40], [], padding=True, capacity=40, dropped=12)],
            [load(1, [4, 6, 50, 40], [], padding=True, capacity=40, dropped=8)],
        )
    )
    assert (layer["tokens_by_rank"], layer["tokens_by_expert"]) == ({"0": 40, "1": 160}, {"0": 14, "1": 26, "2": 80, "3": 80})
    assert (layer["padded"], layer["capacity"], layer["dropped_tokens"]) == (True, 40, 20)
    assert layer["dropped_share"] == pytest.approx(20 / 220)


def test_nobody_waits_for_the_fullest_rank_of_a_padded_exchange() -> None:
    ranks = [[load(rank, row, [], padding=True, capacity=40)] for rank, row in enumerate(([10, 20, 30, 40], [4, 6, 50, 40]))]
    (finding,) = [one for one in experts.analyze(recorded(*ranks)).findings() if one.id.startswith("experts.imbalance")]
    assert (finding.id, finding.severity, finding.value) == ("experts.imbalance_padded", "info", 1.6)
    assert "every rank computes as many rows" in finding.text


def test_a_padded_exchange_of_which_a_rank_is_missing_tells_nothing() -> None:
    mine = [load(0, [10, 20, 30, 40], [], padding=True, capacity=40)]
    (layer,) = told(recorded(mine, []))
    assert (layer["tokens_by_rank"], layer["tokens_by_expert"], layer["imbalance"]) == ({"0": None}, None, None)
    assert "padded" in layer["not_measured"]["tokens_by_rank"]


def test_of_a_part_of_the_ranks_no_imbalance_is_told() -> None:
    (layer,) = told(recorded([load(0, [10, 20, 30, 40], [14, 26])], []))
    assert (layer["tokens_by_rank"], layer["tokens_by_expert"]) == ({"0": 40}, {"0": 14, "1": 26})
    assert (layer["imbalance"], layer["expert_imbalance"], layer["worst_step"]) == (None, None, None)
    assert layer["not_measured"] == {"imbalance": "not all ranks that hold the layer's experts were read"}


def test_dropped_tokens_are_unknown_where_padding_hides_them() -> None:
    (layer,) = told(recorded([load(0, [], [], padding=True, capacity=40)], [load(1, [], [], padding=True, capacity=40)]))
    assert (layer["dropped_tokens"], layer["routed_tokens"], layer["dropped_share"]) == (None, None, None)
    assert layer["not_measured"]["dropped_tokens"] == "the exchange is padded, and the router's choices were not recorded"


@pytest.mark.parametrize(
    "odd",
    [
        load(0, [1, 2, 3, 4], [5]),
        load(0, [-1, 2, 3, 4], [5, 6]),
        load(0, [1], [5, 6]),
        ExpertLoad("layers.0.moe", 1, [0, 0], 2, routed=[1, 2], received=[5, 6]),
        ExpertLoad("layers.0.moe", 1, [-3, 10**9], 2, received=[5, 6]),
    ],
)
def test_a_load_that_contradicts_itself_is_left_out(odd: ExpertLoad) -> None:
    result = experts.analyze(recorded([odd], [load(1, [1, 2, 3, 4], [5, 6])])).json()
    assert result["not_measured"]["experts"] == "1 load of experts in the manifests contradicts itself and is left out"
    assert [layer["tokens_by_rank"] for layer in result["experts"]] == [{1: 11}]


def exchange(
    trace: Trace, seq: int, rows: list[int], *, name: str = "all_to_allv", dtype: str = "Float", split: bool = True, start: int = 0
) -> None:
    """An exchange in which this rank gets so many rows of eight elements from each rank."""
    sizes = {"Out split size": str(rows), "In split size": str(rows)} if split else {}
    trace.collective(
        name, start, 10, elements=64, out_elements=8 * sum(rows), dtype=dtype, group="1", description="mesh_ep", seq=seq, **sizes
    )


def exchanging(*rows_of_ranks: Sequence[list[int]], **more: Any) -> Job:
    """Ranks of one expert group; every item is a dispatch, each followed by its combine."""
    ranks = list(range(len(rows_of_ranks)))
    traces = []
    for rank, rows in enumerate(rows_of_ranks):
        trace = Trace(rank, len(ranks), groups=[group("0", "default_pg", ranks), group("1", "mesh_ep", ranks)])
        for place, own in enumerate(rows):
            exchange(trace, 2 * place, own, start=100 * place, **more)
            exchange(trace, 2 * place + 1, [9, 9], start=100 * place + 50, **more)
        traces.append(trace)
    return job_of(*traces)


def test_without_a_manifest_the_split_sizes_of_the_dispatches_tell_the_tokens() -> None:
    (layer,) = told(exchanging([[3, 7], [10, 20]], [[20, 10], [5, 5]]))
    assert (layer["layer"], layer["axis"], layer["load_from"]) == (None, "ep", "exchanges")
    assert layer["tokens_by_rank"] == {"0": 40, "1": 40}
    assert layer["received_bytes_by_rank"] == {"0": 40 * 8 * 4, "1": 40 * 8 * 4}
    assert (layer["imbalance"], layer["mean_imbalance"]) == (1.0, 1.5)
    assert set(layer["not_measured"]) == {"dropped_tokens", "tokens_by_expert"}
    assert layer["dropped_tokens"] is None and layer["tokens_by_expert"] is None


def test_without_split_sizes_bytes_are_compared() -> None:
    (layer,) = told(exchanging([[3, 7]], [[20, 10]], split=False))
    assert (layer["tokens_by_rank"], layer["received_bytes_by_rank"], layer["imbalance"]) == (None, {"0": 320, "1": 960}, 1.5)
    assert "tokens_by_rank" in layer["not_measured"]


def test_exchanges_of_one_size_may_be_padded_and_tell_nothing() -> None:
    (layer,) = told(exchanging([[8, 8], [8, 8]], [[8, 8], [8, 8]]))
    assert (layer["tokens_by_rank"], layer["imbalance"]) == (None, None)
    assert "may be padded" in layer["not_measured"]["imbalance"]


def test_exchanges_of_counts_only_announce_the_tokens() -> None:
    assert experts.analyze(exchanging([[3, 7]], [[20, 10]], dtype="Long")).json()["not_measured"]["experts"].startswith("no manifest")


def test_a_job_without_experts_says_so() -> None:
    trace = Trace()
    trace.kernel("gemm", 0, 10)
    result = experts.analyze(job_of(trace))
    reason = "no manifest tells the load of experts, and no exchange runs along an expert axis"
    assert result.json() == {"not_measured": {"experts": reason}}
    assert result.findings() == [] and result.sections() == []


def test_ranks_that_were_not_read_are_told() -> None:
    job = recorded([load(0, [5] * 4, [10, 10])], [load(1, [5] * 4, [10, 10])])
    result = experts.analyze(replace(job, missing_ranks=[2, 3]))
    assert result.json()["not_measured"] == {"experts": "2 ranks were not read: sums and means are of the others"}


def test_the_most_uneven_layer_is_told_with_its_rank() -> None:
    job = recorded(
        [load(0, [10, 20, 30, 40], [10, 0]), load(0, [1] * 4, [10, 10], layer="layers.1.moe")],
        [load(1, [10, 20, 30, 40], [30, 40]), load(1, [1] * 4, [10, 10], layer="layers.1.moe")],
    )
    imbalance, unused = experts.analyze(job).findings()
    assert (imbalance.id, imbalance.severity, imbalance.value) == ("experts.imbalance", "warning", 1.75)
    assert imbalance.text == (
        "Rank 1 gets 1.75 times the mean in layers.0.moe: 70 of 80 tokens. The busiest expert gets 2.00 times the mean expert."
    )
    assert unused.text == "1 expert got no token in any recorded step, most in layers.0.moe: 1."


def test_balanced_experts_are_not_worth_a_sentence() -> None:
    assert experts.analyze(recorded([load(0, [5] * 4, [10, 10])], [load(1, [5] * 4, [11, 10])])).findings() == []


def test_dropped_tokens_are_told() -> None:
    loads = [[load(rank, [20] * 4, [40, 40], dropped=dropped)] for rank, dropped in enumerate((30, 10))]
    (finding,) = experts.analyze(recorded(*loads)).findings()
    assert (finding.id, finding.severity, finding.value) == ("experts.dropped", "critical", 0.2)
    assert finding.text == "20.0% of the tokens' choices of experts are dropped (40 of 200)."


def test_an_uneven_exchange_is_told_by_its_mean() -> None:
    (finding,) = experts.analyze(exchanging([[3, 7], [10, 20]], [[20, 10], [5, 5]])).findings()
    assert (finding.value, finding.severity) == (1.5, "warning")
    assert "In the mean exchange of the experts of group" in finding.text and "40 of 80 tokens" in finding.text


def test_the_report_shows_layers_by_ranks_and_by_experts() -> None:
    loads = [[load(0, [5] * 4, [14, 26]), load(0, [5] * 4, [30, 10], layer="layers.1.moe")], [load(1, [5] * 4, [40, 40])]]
    (section,) = experts.analyze(recorded(*loads)).sections()
    by_rank, by_expert, table = section.charts
    assert (by_rank.x_labels, by_rank.y_labels) == (["0", "1"], ["layers.0.moe", "layers.1.moe"])  # type: ignore[union-attr]
    assert by_rank.values == [[40, 80], [40, None]]  # type: ignore[union-attr]
    assert by_expert.values == [[14, 26, 40, 40], [30, 10, None, None]]  # type: ignore[union-attr]
    assert table.frame["imbalance"].fillna(-1).tolist() == [pytest.approx(80 / 60), -1]  # type: ignore[union-attr]


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs" / "json.md").read_text()
    documented = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`]+)`", text))))
    layers = told(recorded([load(0, [5] * 4, [10, 10])], [load(1, [5] * 4, [10, 10])]))
    keys = {key for key in re.findall(r'"([a-z_0-9]+)":', json.dumps(layers)) if not key.isdigit()}
    assert keys - documented == set() and "worst_step" in keys


@needs_torch
def test_a_recording(tmp_path: Path) -> None:
    recording = record(tmp_path, "expert_parallel", "--active", "2", "--capacity-factor", "1.0")
    layers = told(recording.job)
    assert [layer["layer"] for layer in layers] == [f"layers.{i}.mlp" for i in range(4)]
    loads = [one for manifest in recording.manifests.values() for one in manifest.experts]
    batch = recording.manifests[0].batch
    assert batch is not None and batch.local_batch and batch.sequence
    for layer in layers:
        own = [one for one in loads if one.layer == layer["layer"]]
        choices = 2 * 2 * batch.local_batch * batch.sequence * 2  # ranks, steps, tokens, choices of each
        assert layer["routed_tokens"] + layer["dropped_tokens"] == choices
        assert sum(layer["tokens_by_rank"].values()) == sum(layer["tokens_by_expert"].values()) == layer["routed_tokens"]
        assert layer["dropped_tokens"] == sum(one.dropped for one in own) > 0
        assert 1 <= layer["imbalance"] <= 2
