"""Notes: data that becomes a sentence where it is shown."""

import pytest

from tracekit import notes
from tracekit.notes import Note, note, restored, sentence


@pytest.fixture(autouse=True)
def sentences(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(notes.SENTENCES, "lost", "{count:kernel|kernels} {count:?has|have} no launch on {count:?it|them}: {why}")
    monkeypatch.setitem(notes.SENTENCES, "ranks", "ranks {ranks:2} of {world:,} are missing; {share:.0%}")


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (note("lost", 1, why="x"), "1 kernel has no launch on it: x"),
        (note("lost", 2000, why="a {brace}"), "2,000 kernels have no launch on them: a {brace}"),
        (note("ranks", ranks=(4, 5, 6), world=4096, share=0.25), "ranks 4, 5, ... (3 in all) of 4,096 are missing; 25%"),
        (note("ranks", ranks=("n" * 70, "b"), world=1, share=1.0), f"ranks {'n' * 57}..., b of 1 are missing; 100%"),
        (note("text", text="as it is"), "as it is"),
    ],
)
def test_a_sentence(found: Note, text: str):
    assert sentence(found) == text


def test_notes_are_compared_by_what_they_hold_and_come_back_from_json_alike():
    found = note("ranks", 3, ranks=(1, 2), world=4, share=0.5)
    assert found == restored(["ranks", 3, [["ranks", [1, 2]], ["world", 4], ["share", 0.5]]])
    assert len({found, note("ranks", 3, ranks=(1, 2), world=4, share=0.5), note("ranks", 2)}) == 2
    assert found["world"] == 4


def test_every_sentence_is_one_without_a_capital_and_a_full_stop():
    assert all(text and not text.endswith(".") for text in notes.SENTENCES.values() if isinstance(text, str))
