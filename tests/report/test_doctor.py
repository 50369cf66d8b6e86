"""What a recording can answer, by its document."""

from tests.report.example import Given, breakdown, job, with_means
from tracekit.mesh.mesh import Mesh
from tracekit.report.doctor import Answer, answers
from tracekit.report.document import document

CALLS = [{"rank_operations": 10, "matched_operations": 10, "busbw_gb_s": 3.0}]
MEMORY = [{"peak_bytes": 100, "categories": {"parameters": 70, "unattributed": 30}}]


def by_question(*, calls: list[dict[str, object]] = CALLS, **changes: object) -> dict[str, Answer]:
    given = {**with_means(breakdown(steps=3)), "collectives": calls, "memory": MEMORY, "process_groups": [], "idle": [{"launches": 4}]}
    found = document(job(**{"steps": [10, 11, 12], **changes}), {"a": Given(json=given)})
    return {answer.question: answer for answer in answers(found)}


def test_what_can_be_answered() -> None:
    found = by_question()
    assert {question: answer.state for question, answer in found.items()} == {
        "Is it the whole job?": "yes",
        "Where does the time of a step go?": "yes",
        "Which rank do the others wait for?": "yes",
        "Which mesh axis costs what?": "yes",
        "How fast are the links?": "yes",
        "Does the host keep the device busy?": "yes",
        "Who owns the peak of memory?": "partly",
        "Is it what the model predicts?": "no",
    }
    assert found["Who owns the peak of memory?"].why == "30% of a peak has no known owner"


def test_what_cannot_comes_with_a_reason_and_a_way() -> None:
    unmatched = [{"rank_operations": 10, "matched_operations": 0, "busbw_gb_s": None}]
    found = by_question(calls=unmatched, mesh=Mesh([], {}, "none"), world_size=8, missing_ranks=[2, 3, 4, 5, 6, 7], steps=[10])
    assert [found[q].state for q in ("Is it the whole job?", "Which rank do the others wait for?", "Which mesh axis costs what?")] == [
        "no"
    ] * 3
    assert found["Is it the whole job?"].why == "6 of 8 ranks are missing"
    assert all(answer.how for answer in found.values() if answer.state != "yes")
