"""The odd memory inputs that lie beside the project, each against its own expected.json; skipped where the folder is absent."""

import pytest

from tests.real import CASES
from tests.test_cases import Case
from tracekit.errors import InputError

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="no folder of cases beside the project")
_cache: dict[str, Case] = {}


def case(name: str) -> Case:
    if name not in _cache:
        _cache[name] = Case(name)
    return _cache[name]


def row(name: str):
    (found,) = case(name).json["memory"]
    return found


def of(name: str):
    return row(name), case(name).want


@pytest.mark.parametrize("name", ["M02", "M07"])
def test_what_must_be_said_is_said(name: str) -> None:
    c = case(name)
    assert not [word for word in c.expect["message_must_mention"] if word not in c.said], c.said


@pytest.mark.parametrize("name", ["M01", "M02", "M04", "M05", "M09", "M13"])
def test_categories_add_up_to_the_peak(name: str) -> None:
    for found in case(name).json["memory"]:
        if found["peak_bytes"] is not None:
            assert sum(found["categories"].values()) == found["peak_bytes"]
            assert sum(unit["bytes"] for unit in found["units"]) == found["peak_bytes"]


def test_m01_out_of_memory() -> None:
    found, want = of("M01")
    assert found["peak_bytes"] == want["peak_allocated_bytes"]
    (failure,) = found["out_of_memory"]
    assert (failure["allocated_bytes"], failure["reserved_bytes"]) == (want["allocated_at_oom_bytes"], want["reserved_at_oom_bytes"])
    assert {
        "requested_bytes": failure["requested_bytes"],
        "device_free_bytes": failure["device_free_bytes"],
        "top_frame": failure["frame"],
    } == want["oom"]


def test_m02_before_recording() -> None:
    found, want = of("M02")
    assert (found["start_bytes"], found["peak_bytes"], found["end_bytes"]) == (
        want["start_allocated_bytes"],
        want["peak_allocated_bytes"],
        want["end_allocated_bytes"],
    )
    (device,) = case("M02").job.windows[0].memory
    assert int(device.curve.allocated.min()) == want["min_allocated_bytes"]
    assert found["categories"]["before_recording"] == want["at_peak"]["unknown (before recording)"]
    assert [u["bytes"] for u in found["units"] if u["name"] == "model.py:88 forward"] == [want["at_peak"]["forward /w/model.py:88"]]


def test_m04_expandable_segments() -> None:
    found, want = of("M04")
    assert found["reserved_peak_bytes"] == want["peak_reserved_bytes"]
    assert found["reserved_end_bytes"] == want["end_reserved_bytes"]
    assert found["peak_bytes"] == want["peak_allocated_bytes"]


def test_m05_private_pools() -> None:
    found, want = of("M05")
    assert (found["peak_bytes"], found["end_bytes"]) == (want["peak_allocated_bytes"], want["end_allocated_bytes"])
    assert found["reserved_end_by_pool"] == want["end_reserved_by_pool"]
    assert found["reserved_end_by_pool"]["(1, 0)"] == want["reserved_not_reusable_by_default_pool"]
    fragments = found["fragmentation"]
    assert fragments["free_bytes"] - fragments["private_pool_free_bytes"] == fragments["largest_free_bytes"] == 10 * 2**20


def test_m07_no_history() -> None:
    found, want = of("M07")
    assert found["peak_bytes"] is want["peak_allocated_bytes"]
    assert (found["end_bytes"], found["reserved_end_bytes"]) == (want["end_allocated_bytes"], want["reserved_bytes"])
    assert found["categories"] is None
    assert found["units"] == []


def test_m09_only_one_device_has_events() -> None:
    found = {row["device"].removeprefix("cuda:"): row for row in case("M09").json["memory"]}
    want = case("M09").want
    assert {device: row["end_bytes"] for device, row in found.items()} == want["end_allocated_bytes"]
    assert {device: row["peak_bytes"] for device, row in found.items() if row["peak_bytes"] is not None} == want["peak_allocated_bytes"]
    assert {row["rank"] for row in found.values()} == {3}


def test_m11_a_pickle_that_calls_a_function(capsys) -> None:
    with pytest.raises(InputError) as refused:
        Case("M11")
    said = str(refused.value)
    assert "\n" not in said
    assert "snapshot.pickle" in said
    assert "builtins.print" in said
    assert capsys.readouterr().out == ""


def test_m13_raw_timeline() -> None:
    found, want = of("M13")
    assert (found["start_bytes"], found["peak_bytes"], found["end_bytes"]) == (want["start_bytes"], want["peak_bytes"], want["end_bytes"])
    names = {"PARAMETER": "parameters", "ACTIVATION": "activations", "GRADIENT": "gradients", "UNKNOWN": "unattributed"}
    assert {key: found["categories"][name] for key, name in names.items()} == want["by_category_at_peak"]


@pytest.mark.parametrize("name", ["M14", "M15"])
def test_sizes_are_rounded_on_both_sides_of_an_entry_and_nothing_contradicts_itself(name: str) -> None:
    found, want = of(name)
    assert not [note for note in found["notes"] if "contradicts" in note]
    assert found["reserved_peak_bytes"] == want.get("reserved_peak_bytes", found["reserved_end_bytes"])
    assert found["peak_bytes"] == want.get("peak_bytes", found["end_bytes"])


def test_m18_forward_is_more_than_the_ranges_of_a_framework() -> None:
    want = case("M18").want
    for found in case("M18").json["memory"]:
        assert found["categories"]["inputs"] == want["batch bytes (inputs)"]
        assert found["categories"]["activations"] >= want["activations at least"]


def test_u24_a_history_that_overflowed_is_said() -> None:
    c = case("U24")
    (found,) = c.json["memory"]
    assert any("older history was overwritten (ring buffer of 3 entries)" in note for note in found["notes"])


def test_u26_a_snapshot_without_traces() -> None:
    (found,) = case("U26").json["memory"]
    assert (found["peak_bytes"], found["end_bytes"], found["reserved_end_bytes"]) == (None, 3221225472, 4294967296)
    assert "there is no history in the snapshot" in found["notes"][0]


def found_of(name: str, finding: str):
    return next(f for f in case(name).json["findings"] if f["id"] == finding)


def test_m16_fragmentation_is_judged_where_most_is_reserved() -> None:
    (row,) = case("M16").json["memory"]
    assert row["reserved_peak"]["reserved_bytes"] == row["reserved_peak_bytes"]
    assert row["reserved_peak"]["pinned_by"][0]["name"] == "model.py:81 keep"
    text = found_of("M16", "memory.fragmentation")["text"]
    assert "reserved most" in text
    assert "model.py:81 keep" in text


def test_m17_a_request_that_does_not_fit_although_enough_is_free() -> None:
    text = found_of("M17", "memory.allocation_retries")["text"]
    assert not [word for word in case("M17").want["names"] if word not in text]
    assert "fragmentation" in text


def test_u21_memory_of_rank_1_on_the_device_of_rank_0() -> None:
    c = case("U21")
    peaks = {(row["rank"], row["device"]): row["peak_bytes"] for row in c.json["memory"]}
    assert peaks == {(int(rank), device): size for rank, devices in c.want["memory"].items() for device, size in devices.items()}
    assert "Rank 1 holds 839 MB (800 MiB) on GPU 0 (cuda:0), the device of rank 0" in found_of("U21", "memory.foreign_device")["text"]
    assert {entry["device"]: set(entry["ranks"]) for entry in c.json["memory_devices"]} == {"cuda:0": {"0", "1"}, "cuda:1": {"1"}}


def test_u22_what_every_step_keeps() -> None:
    c = case("U22")
    (row,) = c.json["memory"]
    assert [step["peak_bytes"] for step in row["steps"]] == c.want["peaks_by_step"]
    assert [one["bytes_per_step"] for one in c.json["memory_growth"]] == [c.want["growth_per_step"]]
    assert "grows by 105 MB (100 MiB) each step" in found_of("U22", "memory.growth")["text"]


def test_u23_a_fragmented_out_of_memory() -> None:
    (row,) = case("U23").json["memory"]
    (failure,) = row["out_of_memory"]
    want = case("U23").want["oom"]
    keys = {"requested": "requested_bytes", "device_free": "device_free_bytes", "allocated": "allocated_bytes"}
    keys |= {"reserved": "reserved_bytes", "largest_free": "largest_free_bytes"}
    assert {name: failure[key] for name, key in keys.items()} == want
    assert (failure["unused_bytes"], failure["free_pieces"]) == (5368709120, 10)
    assert "fragmentation" in failure["reason"]
    assert "expandable_segments" in failure["remedy"]


def test_u37_of_two_dumps_the_higher_one_is_shown_and_the_other_one_named() -> None:
    (row,) = case("U37").json["memory"]
    assert row["peak_bytes"] == case("U37").want["peak_of_rank0"]
    assert "iteration_10" in row["file"]
    assert any("iteration_20" in note and "2.15 GB" in note for note in row["notes"])


def test_u39_the_rank_that_holds_more_than_its_peers() -> None:
    text = found_of("U39", "memory.imbalance")["text"]
    assert "rank 0 peaks 1.07 GB (1 GiB), 50%, above all others" in text
