from pathlib import Path
from typing import Any

import click
import pytest

from tracekit.cli.common import OutputFile, Ranks, Steps, load_options
from tracekit.errors import UsageError

GIVEN: dict[str, Any] = dict.fromkeys(
    ("mesh", "gpus_per_node", "ranks", "steps", "jobs", "scheduler", "executor", "memory_limit", "cache", "run", "config")
) | {"no_cache": False, "communication": ()}


@pytest.mark.parametrize(
    ("text", "steps"), [("2:5", (2, 5)), ("2:", (2, None)), (":5", (None, 5)), (":", (None, None)), ("3", (3, 4)), ("0", (0, 1))]
)
def test_steps(text: str, steps: tuple[int | None, int | None]) -> None:
    assert Steps().convert(text, None, None) == steps


@pytest.mark.parametrize("text", ["", "a", "2:b", "5:2", "3:3", "1:2:3", "1.5"])
def test_what_is_no_range_of_steps(text: str) -> None:
    with pytest.raises(click.BadParameter, match="2:5 "):
        Steps().convert(text, None, None)


@pytest.mark.parametrize(("text", "ranks"), [("0", {0}), ("0,8-10", {0, 8, 9, 10}), (" 1 , 2 - 3 ", {1, 2, 3}), ("4,4", {4})])
def test_ranks(text: str, ranks: set[int]) -> None:
    assert Ranks().convert(text, None, None) == frozenset(ranks)


@pytest.mark.parametrize("text", ["", "a", "1,", "-3", "8-2", "0-1000000000000"])
def test_what_is_no_list_of_ranks(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Ranks().convert(text, None, None)


def test_output_is_checked_before_the_work(tmp_path: Path) -> None:
    good = str(tmp_path / "new.html")
    assert OutputFile().convert(good, None, None) == good
    assert OutputFile(dash=True).convert("-", None, None) == "-"
    with pytest.raises(click.BadParameter, match="does not exist; create it first"):
        OutputFile().convert(str(tmp_path / "no" / "new.html"), None, None)
    with pytest.raises(click.BadParameter, match="is a folder; name a file"):
        OutputFile().convert(str(tmp_path), None, None)


def test_load_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEKIT_CACHE", "/somewhere")
    assert load_options(GIVEN).cache == "/somewhere"
    assert load_options(GIVEN | {"cache": "mine"}).cache == "mine"
    assert load_options(GIVEN | {"no_cache": True}).cache is None
    options = load_options(GIVEN | {"mesh": "pp=2,tp=2", "ranks": frozenset({1}), "steps": (2, 5), "jobs": 3})
    assert (options.mesh, options.ranks, options.steps, options.jobs) == ("pp=2,tp=2", {1}, (2, 5), 3)


def test_options_that_contradict_or_make_no_sense() -> None:
    with pytest.raises(click.UsageError, match="exclude each other"):
        load_options(GIVEN | {"cache": "mine", "no_cache": True})
    with pytest.raises(UsageError, match="pp=two"):
        load_options(GIVEN | {"mesh": "pp=two"})
