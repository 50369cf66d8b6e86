"""What a collective is for, told from where it stands; what stands nowhere stays unknown."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.collectives.made import operation, table
from tracekit.collectives.purpose import purposes, role_of_axis
from tracekit.units import NULL
from tracekit.vocabulary import KINDS, PURPOSES

BIG = 10**6


def purpose(kind: str, **where: Any) -> str:
    return purposes(table(operation(0, kind, 0, 10, **{"full_bytes": BIG, **where})))[0]


@pytest.mark.parametrize(
    ("kind", "where", "expected"),
    [
        # DDP
        ("broadcast", {"axis": "world", "phase": "forward", "context": "DistributedDataParallel.forward"}, "parameter_sync"),
        ("all_reduce", {"axis": "world", "phase": "backward"}, "gradient_sync"),
        ("all_reduce", {"axis": "", "phase": "backward"}, "gradient_sync"),
        ("all_reduce", {"axis": "dp"}, "gradient_sync"),
        # whether a parameter was used, of each (find_unused_parameters)
        ("all_reduce", {"axis": "dp", "phase": "backward", "dtype": "int32", "context": "torch.distributed.ddp.reducer"}, "metrics"),
        ("all_reduce", {"context": "torch.distributed.ddp.reducer::copy_bucket_to_view"}, "gradient_sync"),
        # FSDP and HSDP, by the ranges torch writes or by the axis
        ("all_gather", {"axis": "world", "phase": "forward", "context": "FSDP::all_gather (layers.0)"}, "parameter_gather"),
        ("all_gather", {"context": "FullyShardedDataParallel.forward"}, "parameter_gather"),
        ("reduce_scatter", {"context": "FSDP::post_backward_reduce (layers.0)", "phase": "backward"}, "gradient_scatter"),
        ("all_reduce", {"context": "FSDP::post_backward_reduce (layers.0)", "axis": "dp_replicate"}, "gradient_sync"),
        ("all_gather", {"axis": "dp_shard", "phase": "backward"}, "parameter_gather"),
        ("reduce_scatter", {"axis": "dp_shard_cp", "phase": "backward"}, "gradient_scatter"),
        ("all_reduce", {"axis": "dp_replicate", "phase": "backward"}, "gradient_sync"),
        # Python objects: sizes, then bytes; a quantised all-gather is none
        ("all_gather", {"axis": "dp_shard", "phase": "forward", "dtype": "int64", "full_bytes": 16, "context": "save checkpoint"}, "setup"),
        ("gather", {"axis": "dp_shard", "phase": "forward", "dtype": "uint8", "full_bytes": 4096, "context": "save checkpoint"}, "setup"),
        ("scatter", {"axis": "world", "phase": "optimizer", "dtype": "uint8", "full_bytes": 4096}, "metrics"),
        ("broadcast", {"axis": "dp", "phase": "optimizer", "dtype": "int64", "full_bytes": 8}, "metrics"),
        ("all_gather", {"axis": "dp_shard", "phase": "forward", "dtype": "int8"}, "parameter_gather"),
        ("broadcast", {"axis": "dp", "phase": "forward", "dtype": "int64", "context": "DistributedDataParallel.forward"}, "parameter_sync"),
        # ZeRO-1 and 2
        ("all_gather", {"axis": "world", "phase": "optimizer"}, "parameter_sync"),
        ("broadcast", {"axis": "dp", "phase": "optimizer"}, "parameter_sync"),
        ("reduce", {"axis": "dp", "phase": "backward"}, "gradient_scatter"),
        # inside a layer
        ("all_reduce", {"axis": "tp", "phase": "forward"}, "tensor_parallel"),
        ("all_reduce", {"axis": "tp", "phase": "backward"}, "tensor_parallel"),
        ("all_reduce", {"axis": "tp", "phase": "forward", "full_bytes": 64}, "tensor_parallel"),
        ("all_gather", {"axis": "tp"}, "tensor_parallel"),
        ("all_gather", {"axis": "cp"}, "context_parallel"),
        ("all_to_all", {"axis": "cp"}, "context_parallel"),
        ("send", {"axis": "cp"}, "context_parallel"),
        ("all_reduce", {"axis": "cp", "phase": "forward"}, "context_parallel"),  # the largest of a softmax's exponents
        ("all_reduce", {"axis": "cp", "phase": "backward"}, "gradient_sync"),  # weights are alike along the axis
        ("reduce_scatter", {"axis": "cp", "phase": "backward"}, "context_parallel"),
        ("all_gather", {"axis": "sp"}, "sequence_parallel"),
        ("all_to_all", {"axis": "sp"}, "context_parallel"),
        # between stages
        ("send", {"axis": "pp"}, "pipeline"),
        ("recv", {"axis": ""}, "pipeline"),
        ("send_recv", {"context": "PP:1SEND_F0"}, "pipeline"),
        ("send_recv", {}, "unknown"),
        ("all_reduce", {"axis": "embedding"}, "gradient_sync"),
        # experts
        ("all_to_all", {"axis": "ep", "phase": "forward"}, "expert_dispatch"),
        ("all_reduce", {"axis": "ep", "phase": "backward"}, "gradient_sync"),
        ("all_reduce", {"axis": "ep", "context": "DistributedDataParallel.forward"}, "gradient_sync"),
        ("all_reduce", {"axis": "ep", "phase": "forward"}, "unknown"),
        ("all_to_all", {"context": "moe combine"}, "expert_combine"),
        ("all_to_all", {"context": "TokenDispatcher.dispatch"}, "expert_dispatch"),
        ("all_to_all", {"phase": "forward"}, "unknown"),  # an exchange of embeddings, perhaps
        # small things
        ("all_reduce", {"axis": "world", "phase": "forward", "full_bytes": 4}, "loss"),
        ("all_reduce", {"axis": "loss", "full_bytes": 4}, "loss"),
        ("all_reduce", {"context": "loss average", "full_bytes": 4}, "loss"),
        ("all_reduce", {"axis": "world", "full_bytes": 8}, "metrics"),
        ("all_reduce", {"axis": "tp", "phase": "optimizer", "full_bytes": 4}, "metrics"),
        ("all_reduce", {"axis": "world", "phase": "backward", "full_bytes": 4}, "gradient_sync"),
        ("barrier", {"axis": "tp"}, "setup"),
        # measured for its own sake
        ("all_reduce", {"axis": "dp_replicate", "context": "benchmark all_reduce"}, "metrics"),
        ("recv", {"axis": "pp", "context": "benchmark send_recv"}, "metrics"),
        ("barrier", {"axis": "tp", "context": "benchmark barrier"}, "metrics"),
        ("all_reduce", {"axis": "dp_replicate", "context": "benchmark of the forward"}, "gradient_sync"),
        # no evidence
        ("all_reduce", {"axis": "world"}, "unknown"),
        ("all_gather", {"axis": "world", "phase": "forward"}, "unknown"),
        ("all_reduce", {"axis": "axis_2x4", "phase": "backward"}, "unknown"),
        ("unknown", {}, "unknown"),
    ],
)
def test_rules(kind: str, where: dict[str, Any], expected: str) -> None:
    assert purpose(kind, **where) == expected


def listed(*rows: dict[str, Any]) -> list[str]:
    return purposes(table(*[{"full_bytes": BIG, **row} for row in rows])).astype(str).tolist()


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        ({0: ["send", "recv"], 1: ["send", "recv"]}, "unknown"),  # a ring, or neighbours that exchange
        ({0: ["send"], 1: ["recv"]}, "pipeline"),
        ({0: ["send"], 1: ["recv", "send"], 2: ["recv"]}, "pipeline"),  # the stage in the middle does both
        ({0: ["send", "recv", "send"], 1: ["recv", "send", "recv"]}, "pipeline"),  # two stages a rank
        ({0: ["send", "recv"]}, "pipeline"),  # of one rank nothing follows
    ],
)
def test_where_all_ranks_send_as_much_as_they_receive_in_forward_there_is_no_pipeline(forward, expected) -> None:
    rows = [operation(rank, kind, 10 * i, 5, phase="forward") for rank, kinds in forward.items() for i, kind in enumerate(kinds)]
    rows += [operation(rank, "send", 90, 5, phase="backward") for rank in forward]
    assert set(purposes(table(*rows))) == {expected}


def test_messages_whose_backward_is_not_told_apart_may_be_those_of_a_pipeline() -> None:
    rows = [operation(rank, kind, 10 * i, 5, phase="forward") for rank in range(2) for i, kind in enumerate(["send", "recv"])]
    assert set(purposes(table(*rows))) == {"pipeline"}


def test_gathers_and_scatters_of_one_tensor_group_are_sequence_parallel() -> None:
    rows = [operation(0, kind, 0, 10, axis="tp") for kind in ("all_gather", "reduce_scatter", "all_reduce")]
    assert listed(*rows) == ["sequence_parallel", "sequence_parallel", "tensor_parallel"]
    other = operation(0, "all_gather", 0, 10, axis="tp", group=1)
    assert listed(*rows, other)[-1] == "tensor_parallel"
    norms = operation(0, "all_reduce", 0, 10, axis="tp", phase="backward")
    assert listed(*rows, norms)[-1] == "gradient_sync"  # every rank has the gradient of its own tokens only


def test_a_group_that_scatters_only_in_backward_is_sharded_data() -> None:
    """FSDP without its ranges. The same group scattering in forward as well runs something else (sequence parallelism)."""
    gather = operation(0, "all_gather", 0, 10, axis="world", phase="forward") | {"full_bytes": BIG}
    scatter = operation(0, "reduce_scatter", 20, 30, axis="world", phase="backward") | {"full_bytes": BIG}
    assert listed(gather, scatter) == ["parameter_gather", "gradient_scatter"]
    assert listed(gather, scatter, scatter | {"phase": "forward"})[0] == "unknown"


def test_outside_every_step_is_setup_only_where_there_are_steps() -> None:
    early = operation(0, "broadcast", 0, 10, step_number=NULL)
    assert listed(early, operation(0, "all_reduce", 20, 30)) == ["setup", "unknown"]
    assert listed(early) == ["unknown"]
    # Launched inside the step, run after its end on the device.
    late = operation(0, "broadcast", 90, 99, step_number=NULL, launch_step_number=1)
    assert listed(late, operation(0, "all_reduce", 20, 30))[0] == "unknown"


def exchanges(phase: str, start: int, count: int, **more: Any) -> list[dict[str, Any]]:
    return [operation(0, "all_to_all", start + 10 * i, start + 10 * i + 5, axis="ep", phase=phase, **more) for i in range(count)]


D, C = "expert_dispatch", "expert_combine"


def test_exchanges_of_experts_take_turns_and_backward_mirrors_them() -> None:
    assert listed(*exchanges("forward", 0, 4), *exchanges("backward", 100, 4)) == [D, C, D, C, C, D, C, D]


def test_every_step_and_rank_begins_anew() -> None:
    assert listed(*exchanges("forward", 0, 1), *exchanges("forward", 100, 2, step_number=2)) == [D, D, C]


def test_layers_run_again_in_backward() -> None:
    """Two layers, activations recomputed: each layer's forward, then its two gradients."""
    assert listed(*exchanges("forward", 0, 4), *exchanges("backward", 100, 8)) == [D, C, D, C, *[D, C, C, D] * 2]


def test_counts_of_tokens_go_ahead_and_take_no_turn() -> None:
    counts, tokens, results = exchanges("forward", 0, 3)
    assert listed(counts | {"dtype": "int64"}, tokens, results) == [D, D, C]


def test_turns_follow_time_not_rows() -> None:
    dispatch, combine = exchanges("forward", 0, 2)
    assert listed(combine, dispatch) == [C, D]


def test_kernels_of_an_expert_library_tell_their_turn() -> None:
    rows = [
        operation(0, "all_to_all", 0, 5, implementation="deep_ep", kernel="void deep_ep::intranode::notify_dispatch<8>(int const*)"),
        operation(0, "all_to_all", 10, 15, implementation="deep_ep", kernel="void deep_ep::intranode::dispatch<8, 768>(int4*)"),
        operation(0, "all_to_all", 20, 25, implementation="deep_ep", kernel="void deep_ep::intranode::combine<__nv_bfloat16>(int4*)"),
        operation(0, "all_to_all", 30, 35, implementation="mori", kernel="void mori::EpDispatchIntraNodeKernel<float>(EpDispatchCombine)"),
    ]
    assert listed(*rows) == [D, D, C, D]


@pytest.mark.parametrize(
    ("axis", "role"),
    [
        ("", "whole"),
        ("world", "whole"),
        ("tp", "tensor"),
        ("etp", "tensor"),
        ("cp", "context"),
        ("pp", "pipeline"),
        ("ep", "expert"),
        ("ep_etp", "expert"),
        ("fsdp", "sharding"),
        ("dp_shard_cp", "sharding"),
        ("dp_shard_mod_ep", "sharding"),
        ("dp_cp", "data"),
        ("edp", "data"),
        ("dp_l1", "data"),
        ("dp_tp", "mixed"),
        ("loss", "loss"),
        ("my_axis", "mixed"),
    ],
)
def test_roles_of_axes(axis: str, role: str) -> None:
    assert role_of_axis(axis) == role


def test_no_operations() -> None:
    empty = purposes(table(operation(0, "barrier", 0, 1)).iloc[:0])
    assert (len(empty), list(empty.categories)) == (0, list(PURPOSES))


ROW = st.tuples(
    st.integers(0, 2),
    st.sampled_from(KINDS),
    st.sampled_from(["", "world", "tp", "ep", "dp_shard", "cp", "pp"]),
    st.sampled_from(["", "forward", "backward", "optimizer"]),
    st.text(max_size=12),
    st.sampled_from([NULL, 4, BIG]),
    st.sampled_from([NULL, 1, 2]),
)


@given(st.lists(ROW, min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_purposes_do_not_depend_on_the_order_of_rows(rows: list[tuple[Any, ...]], random: Any) -> None:
    made = [
        operation(r, kind, i, i + 1, axis=axis, phase=phase, context=context, full_bytes=full, step_number=step)
        for i, (r, kind, axis, phase, context, full, step) in enumerate(rows)
    ]
    frame = table(*made)
    frame["purpose"] = purposes(frame)
    order = list(range(len(made)))
    random.shuffle(order)
    shuffled = table(*[made[i] for i in order])
    assert purposes(shuffled).tolist() == frame["purpose"].iloc[order].tolist()
    assert isinstance(frame["purpose"].dtype, pd.CategoricalDtype)
