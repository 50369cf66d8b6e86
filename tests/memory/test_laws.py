"""What must hold of any log, however lossy, with any manifest and any snapshot: sums are exact, nothing is negative, nothing crashes."""

import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.memory.made import MemoryTrace, entry, segment, snapshot
from tests.memory.test_registered import owners
from tracekit.errors import InputError
from tracekit.memory.attribution import attribute_trace
from tracekit.memory.peak import composition
from tracekit.memory.summary import DeviceMemory, of_snapshot, of_trace
from tracekit.memory.timeline import logs_of
from tracekit.readers.memory_snapshot import read_snapshot
from tracekit.readers.sources import Source
from tracekit.trace.steps import find_phases, find_steps
from tracekit.vocabulary import CATEGORIES

RANGES = (
    "forward", "backward", "Optimizer.step#A.step", "Optimizer.zero_grad#A.zero_grad", "FSDP::all_gather (l.0)",
    "FSDP::all_gather_copy_out (l.0)", "FSDP::post_backward_reduce (l.0)", "DistributedDataParallel.forward", "gloo:all_reduce", "unit x",
    "FullyShardedDataParallel._post_backward_hook",
)  # fmt: skip
OPERATORS = ("c10d::allreduce_", "aten::mm", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad")


def anything(rng: np.random.Generator) -> MemoryTrace:
    """A trace of random ranges and memory events; frees lost, frees of nothing, addresses reused, times out of order."""
    trace = MemoryTrace(cuda=bool(rng.random() < 0.5), older=int(rng.integers(0, 500)))
    for number in range(int(rng.integers(0, 4))):
        trace.step(number, number * 100, int(rng.integers(1, 120)))
    for names, many in ((RANGES, 15), (OPERATORS, 5)):
        for _ in range(int(rng.integers(0, many))):
            trace.annotation(str(rng.choice(names)), int(rng.integers(0, 400)), int(rng.integers(0, 150)))
    times = rng.integers(0, 400, int(rng.integers(0, 40)))
    for time in (np.sort(times) if rng.random() < 0.7 else times).tolist():
        address = int(rng.integers(1, 8)) * 0x100
        if rng.random() < 0.5:
            trace.alloc(time, address, int(rng.integers(1, 100)))
        elif address in trace._live and rng.random() < 0.8:
            trace.free(time, address)
        else:
            trace.free(time, address, int(rng.integers(1, 50)))
    return trace


def registrations(rng: np.random.Generator):
    return owners(
        *(
            (
                float(rng.integers(-5, 410)),
                int(rng.integers(0, 10)) * 0x100,
                int(rng.integers(0, 100)),
                str(rng.choice(CATEGORIES)),
                str(rng.choice(["", "w", "bucket 0"])),
                str(rng.choice(["", "l.0"])),
            )
            for _ in range(int(rng.integers(0, 20)))
        )
    )


def check(found: DeviceMemory) -> None:
    if found.peak is None:
        return
    assert found.curve is not None
    assert sum(found.categories.values()) == found.peak == int(found.curve.allocated.max())
    assert sum(holding.bytes for holding in found.holdings) == found.peak
    assert min(found.categories.values()) >= 0
    assert np.array_equal(sum(found.curve.categories.values(), np.zeros_like(found.curve.allocated)), found.curve.allocated)
    assert int(found.curve.allocated.min()) >= 0


@pytest.mark.parametrize("seed", range(8))
def test_of_any_trace(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(40):
        tables = oracle.tables(anything(rng).text())
        phases, steps = find_phases(tables), find_steps(tables)
        for told in (None, registrations(rng)):
            for found in of_trace(tables, phases, steps, told):
                check(found)
            for log, counters in logs_of(tables):
                attributed = attribute_trace(tables, log, counters, phases, steps, told)
                blocks, allocated = attributed.timeline.blocks, attributed.timeline.allocated
                assert (blocks.death > blocks.birth).all()
                assert [sum(composition(attributed, i).values()) for i in range(-1, len(log))] == allocated.tolist()
                order = np.lexsort((blocks.birth, blocks.address))
                same = (np.diff(blocks.address[order]) == 0) & (blocks.address[order][1:] != 0)
                assert (blocks.birth[order][1:][same] >= blocks.death[order][:-1][same]).all()  # one block at a time at an address


odd = st.sampled_from([None, "x", -1, 0, 2**62, 2**70, 1.5, [], {}, (0, 0)])
actions = st.sampled_from(
    ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom", "?"]
)
addresses = st.integers(1, 6).map(lambda number: number * 4096)
entries = st.builds(
    lambda action, time, size, addr: entry(action, 1_700_000_000_000_000 + time, size, addr, [("/a/model.py", time % 3, "forward")]),
    actions, st.integers(0, 50), st.integers(0, 8192), addresses,
)  # fmt: skip
segments = st.builds(
    lambda address, first, second, states, pool: segment(address, first + second, [(first, states[0]), (second, states[1])], pool=pool),
    addresses, st.integers(0, 4096), st.integers(0, 4096),
    st.tuples(*[st.sampled_from(["active_allocated", "active_awaiting_free", "inactive", "?"])] * 2), st.sampled_from([(0, 0), (1, 0)]),
)  # fmt: skip


@given(st.lists(entries, max_size=25), st.lists(segments, max_size=4), st.data())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_of_any_snapshot(tmp_path, history, parts, data) -> None:
    content = snapshot([history], parts)
    for thing in (*history, *parts):  # what is missing, or of another type
        if data.draw(st.integers(0, 9)) == 0:
            key = data.draw(st.sampled_from(sorted(thing)))
            if data.draw(st.booleans()):
                del thing[key]
            else:
                thing[key] = data.draw(odd)
    path = tmp_path / "rank0_snapshot.pickle"
    path.write_bytes(pickle.dumps(content))
    try:
        found = of_snapshot(read_snapshot(Source(str(path), path.name, 0, 0)))
    except InputError:
        return
    for device in found:
        check(device)
