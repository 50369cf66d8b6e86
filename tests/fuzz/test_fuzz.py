"""A short run of every target, and everything that a longer one ever found."""

import pytest

from tests.fuzz.run import FOUND, attempt, fuzz
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_that_make_no_sense_are_refused_or_read(name):
    few = 60 if name in ("trace", "snapshot", "dump") else 300
    assert [problem for _, problem in fuzz(name, few, seed=1)] == []


@pytest.mark.parametrize("path", sorted(FOUND.glob("*-*")), ids=lambda path: path.name)
def test_what_was_a_fault_once(path, tmp_path):
    assert attempt(path.name.partition("-")[0], path.read_bytes(), tmp_path) == ""
