import pytest

from tests.report.example import Given, breakdown, job, with_means
from tracekit.findings import Finding
from tracekit.mesh.mesh import Mesh
from tracekit.notes import text_note
from tracekit.report.document import document
from tracekit.report.overview import Fact, answer, facts, first_step, numbers, percent
from tracekit.trace.clock import Clock


def the_document(rows: list[dict[str, object]], **changes: object) -> dict[str, object]:
    return document(job(**changes), {"breakdown": Given(json=with_means(rows))})


def test_where_the_time_goes() -> None:
    found = answer(the_document(breakdown()))
    assert found.sentence == "A step takes 1 ms on average: 60% compute, 25% exposed communication, 14% idle, 1% exposed copies."
    assert [(part.role, part.us, part.share) for part in found.parts] == [
        ("compute", 600.0, 0.6),
        ("exposed", 250.0, 0.25),
        ("copy", 10.0, 0.01),
        ("idle", 140.0, 0.14),
    ]
    assert found.hidden_us == 100.0


def test_without_step_marks_the_window_is_meant() -> None:
    rows = [{**breakdown()[0], "step": None}]
    assert answer(the_document(rows)).sentence.startswith("The recorded window takes 1 ms: 60% compute")


def test_a_step_that_could_not_be_broken_down_is_in_no_mean() -> None:
    cut = dict.fromkeys(breakdown()[0]) | {"rank": 1, "step": 10, "step_us": 9000.0}
    assert answer(the_document([breakdown()[0], cut])).step_us == 1000.0
    assert answer(the_document([cut])).parts == ()


def by_label(**changes: object) -> dict[str, Fact]:
    return {fact.label: fact for fact in facts(document(job(**changes), {}))}


def test_facts_of_a_whole_job() -> None:
    found = by_label()
    assert {label: fact.value for label, fact in found.items()} == {
        "Ranks": "2 of 2",
        "Mesh": "tp 2",
        "Device": "NVIDIA H100 80GB HBM3",
        "Backend": "nccl",
        "Steps": "10–11",
        "Clocks": "one time line",
        "Data": "2 files, read whole",
    }
    assert not any(fact.warns for fact in found.values())


def test_facts_of_a_job_of_which_much_is_unknown() -> None:
    clock = Clock(False, {}, None, text_note("two hosts"))
    found = by_label(world_size=4, missing_ranks=[2, 3], device="", backend="", steps=[], mesh=Mesh([], {}, "none"), clock=clock)
    assert found["Missing"] == Fact("Missing", "2–3", "their waits and work are not in any figure here", warns=True)
    assert (found["Ranks"].value, found["Mesh"].value, found["Steps"].value) == ("2 of 4", "not known", "none marked")
    assert found["Clocks"] == Fact("Clocks", "not aligned", "two hosts", warns=True)
    assert "Device" not in found


def test_clocks_that_were_corrected() -> None:
    found = by_label(clock=Clock(True, {0: 0, 1: -812_000}, 1_200))["Clocks"]
    assert (found.value, found.detail) == ("corrected by up to 812 us", "what remains: 1.2 us")


@pytest.mark.parametrize(
    ("values", "text"),
    [([], ""), ([3], "3"), ([2, 0, 1, 7], "0–2, 7"), (list(range(0, 40, 2)), "0, 2, 4, 6, 8, 10, 12, 14, … 38")],
)
def test_numbers(values: list[int], text: str) -> None:
    assert numbers(values) == text


@pytest.mark.parametrize(("share", "text"), [(0.0, "0%"), (0.004, "<1%"), (0.256, "26%"), (1.0, "100%")])
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_the_first_thing_to_do_is_the_first_finding_with_advice_that_costs_something() -> None:
    findings = [
        Finding("a", "info", "a remark", advice="read it"),
        Finding("b", "info", "cheap", advice="win a little", gain_ns=5_000),
    ]
    found = first_step(document(job(), {"a": Given(findings)}))
    assert found is not None
    assert (found.text, found.advice, found.gain_us) == ("cheap", "win a little", 5.0)
    assert first_step(document(job(), {"a": Given(findings[:1])})) is None


def test_a_snapshot_alone_leads_with_its_peak() -> None:
    row = {
        "rank": 3,
        "device": "cuda:3",
        "peak_bytes": 60_000_000_000,
        "reserved_peak_bytes": 70_000_000_000,
        "categories": {"activations": 45e9},
    }
    found = document(job(), {"memory": Given(json={"memory": [row]})})
    assert answer(found).sentence == "Memory peaks at 60 GB on rank 3 (cuda:3), 75% of it activations."
    fact = {fact.label: fact for fact in facts(found)}["Memory peak"]
    assert (fact.value, fact.detail) == ("60 GB", "rank 3 (cuda:3); 75% of it activations; 10 GB of 80 GB were never reserved")


def test_a_job_that_stands_still_says_so_first() -> None:
    hang = {"id": "hang.root", "text": "Ranks 0, 1 wait in all_reduce 3 of dp for rank 2."}
    assert answer({"findings": [hang], "mean_step": [], "breakdown": []}).sentence == f"The job stands still: {hang['text']}"
