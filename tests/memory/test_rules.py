"""Owners of a plain profiler trace: each rule on a step of a few microseconds."""

import numpy as np
import pytest

from tests import oracle
from tests.memory.made import MemoryTrace
from tracekit.memory.attribution import attribute_trace
from tracekit.memory.moments import Hint, hint_of, unit_of
from tracekit.memory.peak import composition, holdings
from tracekit.memory.timeline import logs_of
from tracekit.trace.steps import find_phases, find_steps
from tracekit.vocabulary import CATEGORIES

A, B, C, D = 0x1000, 0x2000, 0x3000, 0x4000


def attributed(trace: MemoryTrace):
    tables = oracle.tables(trace.text())
    ((log, counters),) = logs_of(tables)
    return attribute_trace(tables, log, counters, find_phases(tables), find_steps(tables), None)


def owners(trace: MemoryTrace) -> dict[int, str]:
    """Address -> category of every block of the trace (its last block there)."""
    found = attributed(trace)
    ownership = found.ownership
    where = found.timeline.blocks.address[ownership.block].tolist()
    return dict(zip(where, (CATEGORIES[code] for code in ownership.category.tolist()), strict=True))


def step(start: int = 0, number: int = 1) -> MemoryTrace:
    """One step from ``start``: forward 100 to 300, backward 300 to 500, optimizer 600 to 700, zero_grad 700 to 720."""
    trace = MemoryTrace(backend="gloo", device=None)
    add_step(trace, start, number)
    return trace


def add_step(trace: MemoryTrace, start: int, number: int) -> None:
    trace.step(number, start, 800)
    trace.annotation("forward", start + 100, 200)
    trace.annotation("backward", start + 300, 200)
    trace.annotation("Optimizer.step#Adam.step", start + 600, 100)
    trace.annotation("Optimizer.zero_grad#Adam.zero_grad", start + 700, 20)


def test_born_in_forward_and_needed_in_backward_are_activations() -> None:
    trace = step()
    trace.alloc(150, A, 8)
    trace.alloc(160, B, 8)
    trace.free(170, B)
    trace.free(400, A)
    trace.alloc(900, D, 1)
    assert owners(trace) == {A: "activations", B: "temporaries", D: "unattributed"}


def test_born_in_backward_and_kept_until_zero_grad_are_gradients() -> None:
    trace = step()
    trace.alloc(350, A, 8)
    trace.alloc(360, B, 8)
    trace.free(370, B)
    trace.free(710, A)
    assert owners(trace) == {A: "gradients", B: "temporaries"}


def test_born_in_the_optimizer_and_kept_is_its_state() -> None:
    trace = step()
    trace.alloc(610, A, 8)
    trace.alloc(620, B, 8)
    trace.free(630, B)
    trace.alloc(750, D, 1)
    assert owners(trace) == {A: "optimizer_state", B: "temporaries", D: "unattributed"}


def test_a_step_with_a_closure_has_forward_and_backward_inside() -> None:
    trace = MemoryTrace(backend="gloo", device=None)
    trace.step(1, 0, 1000)
    trace.annotation("Optimizer.step#LBFGS.step", 50, 800)
    trace.annotation("forward", 100, 200)
    trace.annotation("backward", 300, 200)
    for start, end, address in ((150, 400, A), (350, 930, B), (600, None, C), (650, 700, D)):
        trace.alloc(start, address, 8)
        if end is not None:
            trace.free(end, address)
    trace.alloc(990, 0x9000, 1)
    assert {a: owners(trace)[a] for a in (A, B, C, D)} == {A: "activations", B: "gradients", C: "optimizer_state", D: "temporaries"}


def test_what_backward_frees_again_is_no_gradient_though_it_is_in_pieces() -> None:
    trace = MemoryTrace(backend="gloo", device=None)
    trace.step(1, 0, 8000)
    trace.annotation("Optimizer.step#LBFGS.step", 50, 7900)
    trace.annotation("forward", 100, 200)
    trace.annotation("backward", 300, 200)
    trace.annotation("backward", 4000, 200)
    trace.alloc(350, A, 8)
    trace.alloc(360, B, 8)
    trace.free(4100, A)
    trace.free(7990, B)
    trace.alloc(7995, 0x9000, 1)
    assert {a: owners(trace)[a] for a in (A, B)} == {A: "temporaries", B: "gradients"}


def test_born_before_the_first_forward_and_never_freed_are_parameters_otherwise_inputs() -> None:
    trace = step()
    trace.alloc(-50, A, 800)
    trace.alloc(20, B, 16)
    trace.alloc(30, C, 4)
    trace.free(40, C)
    trace.free(790, B)
    assert owners(trace) == {A: "parameters", B: "inputs", C: "temporaries"}


def test_memory_older_than_the_trace_stays_that() -> None:
    trace = step()
    trace.total = 100
    trace.free(350, A, 60)
    trace.alloc(360, B, 1)
    found = attributed(trace)
    assert composition(found, -1)["before_recording"] == 100
    assert composition(found, 0)["before_recording"] == 40


def test_fsdp2_by_its_own_ranges() -> None:
    trace = step()
    trace.annotation("FSDP::all_gather (layers.0)", 110, 10)
    trace.alloc(115, A, 32)
    trace.annotation("FSDP::all_gather_copy_out (layers.0)", 120, 10)
    trace.alloc(125, B, 64)
    trace.alloc(310, C, 64)  # a full gradient, given back where it is reduced
    trace.annotation("FSDP::post_backward_reduce (layers.0)", 400, 20)
    trace.alloc(401, D, 32)
    trace.free(405, C)
    trace.free(410, A)
    trace.free(415, B)
    trace.alloc(760, 0x9000, 1)
    assert owners(trace) == {
        A: "communication_buffers",
        B: "gathered_parameters",
        C: "unsharded_gradients",
        D: "gradients",
        0x9000: "unattributed",
    }
    (gathered,) = [h for h in holdings(attributed(trace), 3) if h.category == "gathered_parameters"]
    assert (gathered.unit, gathered.bytes, gathered.blocks) == ("layers.0", 64, 1)


def test_ddp_s_buckets_are_given_back_and_built_anew_in_its_second_forward() -> None:
    trace = step()
    add_step(trace, 1000, 2)
    add_step(trace, 2000, 3)
    for start in (0, 1000, 2000):
        trace.annotation("DistributedDataParallel.forward", start + 90, 220)
    trace.alloc(-100, A, 64)
    trace.alloc(1095, B, 64)
    trace.free(1096, A)
    trace.alloc(1350, C, 64)
    trace.free(1710, C)
    trace.alloc(2850, D, 1)
    assert owners(trace) == {A: "communication_buffers", B: "communication_buffers", C: "gradients", D: "unattributed"}


def test_tensors_of_a_collective_are_communication_buffers_and_their_lost_free_is_the_backend_s_end() -> None:
    trace = step()
    trace.operator("c10d::_reduce_scatter_base_", 400, 10)
    trace.alloc(405, A, 64)
    trace.annotation("gloo:reduce_scatter", 420, 30, tid=77)
    trace.alloc(425, B, 1)
    trace.alloc(460, C, 1)
    trace.alloc(790, D, 1)
    found = attributed(trace)
    assert owners(trace)[A] == "communication_buffers"
    assert found.timeline.allocated.tolist() == [0, 64, 1, 2, 3]
    assert "1 free is not in the trace (64 B)" in found.timeline.notes[0]


def test_without_phases_nothing_is_guessed() -> None:
    trace = MemoryTrace(backend="gloo", device=None)
    trace.alloc(10, A, 8)
    trace.operator("aten::mm", 15, 10)
    trace.alloc(20, B, 8)
    trace.free(30, B)
    assert owners(trace) == {A: "unattributed", B: "unattributed"}
    assert [h.name for h in holdings(attributed(trace), 1)] == ["", "aten::mm"]


def test_what_is_alive_where_the_trace_ends_inside_a_phase_is_not_guessed() -> None:
    trace = step()
    trace.alloc(350, A, 8)
    trace.alloc(360, B, 1)
    assert owners(trace) == {A: "unattributed", B: "unattributed"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("FSDP::all_gather (layers.3)", Hint.COMMUNICATION),
        ("FSDP::all_gather_copy_out (layers.3)", Hint.GATHER),
        ("FSDP::post_backward_reshard (layers.3)", Hint.RESHARD),
        ("FSDP::post_backward_reduce", Hint.REDUCE),
        ("FSDP::post_backward_accumulate", Hint.ACCUMULATE),
        ("FullyShardedDataParallel._pre_forward", Hint.GATHER),
        ("FullyShardedDataParallel._post_backward_hook", Hint.REDUCE),
        ("FullyShardedDataParallel.forward", Hint.NOTHING),
        ("DistributedDataParallel.forward", Hint.DDP),
        ("c10d::allreduce_", Hint.COMMUNICATION),
        ("gloo:all_reduce", Hint.COMMUNICATION),
        ("gloo:recv", Hint.NOTHING),  # open until somebody waits: what is computed meanwhile is not inside
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", Hint.LOADING),
        ("Optimizer.step#AdamW.step", Hint.OPTIMIZER),
        ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", Hint.ACCUMULATED),
        ("gather parameters of layers.0", Hint.GATHER),
        ("reduce gradients of bucket 0", Hint.REDUCE),
        ("aten::mm", Hint.NOTHING),
    ],
)
def test_what_ranges_say_of_memory(name: str, hint: Hint) -> None:
    assert hint_of(name) == hint


def test_units_in_names_of_ranges() -> None:
    units = {
        "FSDP::all_gather (layers.3)": "layers.3",
        "FSDP::backward_prefetch for layers.2": "layers.2",
        "unit layers.1": "layers.1",
        "unit layers.1 backward": "layers.1",
        "gather parameters of head": "head",
        "FSDP::pre_forward": "",
        "forward": "",
    }
    assert {name: unit_of(name) for name in units} == units


def fsdp1(*, reduces: bool) -> dict[int, str]:
    trace = step()
    trace.alloc(350, A, 64)
    trace.operator("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 360, 40)
    if reduces:
        trace.annotation("FullyShardedDataParallel._post_backward_hook", 365, 20)
        trace.alloc(370, B, 32)
    trace.free(390, A)
    trace.alloc(760, D, 1)
    return owners(trace)


def test_a_gradient_that_ends_at_its_parameter_is_a_unit_s_where_units_are_reduced() -> None:
    assert fsdp1(reduces=True) == {A: "unsharded_gradients", B: "gradients", D: "unattributed"}
    assert fsdp1(reduces=False) == {A: "temporaries", D: "unattributed"}


def test_buckets_are_the_gradients_where_backward_keeps_none_of_its_own() -> None:
    trace = step()
    add_step(trace, 1000, 2)
    trace.annotation("DistributedDataParallel.forward", 1090, 220)
    add_step(trace, 2000, 3)
    trace.annotation("DistributedDataParallel.forward", 2090, 220)
    trace.alloc(1095, B, 64)
    trace.alloc(1350, A, 8)
    trace.free(1360, A)
    trace.alloc(2850, D, 1)
    assert owners(trace) == {A: "temporaries", B: "gradients", D: "unattributed"}


def test_categories_add_up_to_what_is_allocated_at_every_moment() -> None:
    trace = step()
    trace.total = 1000
    rng = np.random.default_rng(0)
    live: list[int] = []
    for i in range(400):
        if live and rng.random() < 0.5:
            trace.free(2 * i, live.pop(int(rng.integers(len(live)))))
        else:
            trace.alloc(2 * i, 0x100 * (i + 1), int(rng.integers(1, 99)))
            live.append(0x100 * (i + 1))
    found = attributed(trace)
    for position in range(-1, 400):
        total = int(found.timeline.allocated[position + 1])
        assert sum(composition(found, position).values()) == total
        assert sum(h.bytes for h in holdings(found, position)) == total


def test_what_an_optimizer_puts_in_the_place_of_a_parameter_is_one_and_its_state_is_not() -> None:
    trace = MemoryTrace(backend="gloo", device=None)
    trace.alloc(10, A, 8)  # the parameter, before the first forward
    for number, (old, new, state, before) in enumerate(((A, B, C, None), (B, A, D, C))):
        start = 1000 * number + 50
        add_step(trace, start, number)
        trace.alloc(start + 150, 0x9000 + number, 4)
        trace.free(start + 400, 0x9000 + number)
        trace.alloc(start + 610, state, 8)
        if before:
            trace.free(start + 615, before)
        trace.alloc(start + 620, new, 8)
        trace.free(start + 630, old)
    found = attributed(trace)
    middle = next(i for i, t in enumerate(found.timeline.log.time.tolist()) if t > found.timeline.log.time[0] + 1_040_000)
    assert {name: amount for name, amount in composition(found, middle - 1).items() if amount} == {"parameters": 8, "optimizer_state": 8}


def test_a_pause_of_the_engine_makes_no_gradient_of_what_lives_through_it() -> None:
    trace = MemoryTrace(backend="gloo", device=None)
    trace.step(1, 0, 20_000)
    trace.annotation("forward", 100, 200)
    trace.annotation("backward", 300, 200)
    trace.annotation("backward", 9_000, 500)
    trace.annotation("Optimizer.step#Adam.step", 10_600, 100)
    trace.alloc(350, A, 8)
    trace.alloc(360, B, 8)
    trace.free(9_400, A)
    trace.free(10_800, B)
    assert owners(trace) == {A: "temporaries", B: "gradients"}


def test_what_coalesced_communication_flattens_is_its_buffer() -> None:
    assert hint_of("aten::flatten_dense_tensors") == Hint.COMMUNICATION
