"""Functions that are interpreted while a job is small: the same answer either way, and numba stays away from small jobs."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builder import Trace
from tracekit.compiled import Late, late
from tracekit.graph import replay, script
from tracekit.trace import sweep

_COUNTS = st.lists(st.integers(-(2**62), 2**62), max_size=20)


@late
def _running(values: np.ndarray) -> np.ndarray:
    total = np.int64(0)
    result = np.empty(len(values), np.int64)
    for i in range(len(values)):
        total += values[i]
        result[i] = total
    return result


@given(_COUNTS)
def test_interpreted_and_compiled_agree_and_wrap_around_alike(values: list[int]) -> None:
    numbers = np.array(values, np.int64)
    with np.errstate(all="ignore"):
        interpreted = _running.interpreted(numbers)
    assert (interpreted == _running.compiled(numbers)).all()


@given(st.integers(1, 30), st.randoms(use_true_random=False))
def test_a_replayed_graph_is_the_same_either_way(count: int, random) -> None:
    sources = [sorted(random.sample(range(v), min(v, random.randrange(3)))) for v in range(count)]
    first = np.concatenate([[0], np.cumsum([len(s) for s in sources])]).astype(np.int64)
    source = np.array([u for s in sources for u in s], np.int32)
    join = np.array([random.choice([-1, -1, 0, 1]) for _ in range(count)], np.int32)
    join = np.where([all(join[u] != join[v] for u in sources[v]) for v in range(count)], join, -1).astype(np.int32)
    members = np.flatnonzero(join >= 0)
    members = members[np.argsort(join[members], kind="stable")].astype(np.int32)
    join_first = np.searchsorted(join[members], np.arange(3)).astype(np.int64)
    host = np.array([v - 1 if v and random.random() < 0.3 else -1 for v in range(count)], np.int32)
    by_start = np.arange(count, dtype=np.int32)
    ordered = (first, source, join, join_first, members, host, by_start)
    for one, other in zip(replay.causal_order.interpreted(*ordered), replay.causal_order.compiled(*ordered), strict=True):
        assert (one == other).all()
    cost = np.array([random.randrange(1000) for _ in range(count)], np.int64)
    order = replay.causal_order.compiled(*ordered)[0]
    costs = (order, first, source, join, 2, host, cost // 3, cost, cost // 7)
    for one, other in zip(replay.replay.interpreted(*costs), replay.replay.compiled(*costs), strict=True):
        assert (one == other).all()


@given(st.integers(0, 25), st.randoms(use_true_random=False))
def test_calls_and_enclosing_intervals_are_the_same_either_way(count: int, random) -> None:
    calls = [np.array([random.randrange(top) for _ in range(count)], np.int64) for top in (3, 4, 5)]
    for one, other in zip(script._run.interpreted(*calls, 4, 5), script._run.compiled(*calls, 4, 5), strict=True):
        assert (one == other).all()
    outer = sorted((random.randrange(2), start := random.randrange(40), start + random.randrange(20)) for _ in range(count))
    lane, start, end = np.array(outer, np.int64).reshape(-1, 3).T
    moments = np.array(sorted((random.randrange(2), random.randrange(60)) for _ in range(count)), np.int64).reshape(-1, 2)
    asked = (lane, start, end, moments[:, 0].copy(), moments[:, 1].copy(), np.full(count, count, np.int64))
    assert (sweep.innermost.interpreted(*asked) == sweep.innermost.compiled(*asked)).all()


def test_many_elements_are_worth_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    function = Late(lambda values: used.append("interpreted"))
    function.__dict__["compiled"] = lambda values: used.append("compiled")
    monkeypatch.setattr(Late, "spent", 0)
    monkeypatch.delitem(sys.modules, "numba")
    for _ in range(3):
        function(np.zeros(40_000))
    assert used == ["interpreted", "interpreted", "compiled"]


def test_a_small_job_that_was_read_before_never_loads_numba(tmp_path) -> None:
    (tmp_path / "traces").mkdir()
    for rank in range(2):
        made = Trace(rank=rank, world_size=2)
        made.step(1, 0, 100)
        made.kernel("gemm", start=10, dur=40)
        made.collective("allreduce", start=60, dur=30, elements=1024, group="0", seq=1)
        made.write(tmp_path / "traces" / f"rank{rank}.json")
    arguments = ["analyze", str(tmp_path / "traces"), "--cache", str(tmp_path / "cache"), "--no-report"]
    program = (
        f"import sys\nfrom tracekit.cli.main import cli\ncli.main({arguments!r}, standalone_mode=False)\nprint('numba' in sys.modules)"
    )
    run = [sys.executable, "-c", program]
    loaded = [subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()[-1] for _ in range(2)]
    assert loaded == ["True", "False"]
