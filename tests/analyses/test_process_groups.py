from __future__ import annotations

from tests.analyses.made import Trace, job_of, mesh_groups
from tracekit.analyses import process_groups
from tracekit.findings import Heatmap


def mesh_job(gpus_per_node: int | None = None) -> process_groups.GroupUse:
    """Four ranks of a 2 x 2 mesh, each with one tensor-parallel and (ranks 0 and 2) one data-parallel all-reduce."""
    traces = [Trace(rank, 4, groups=mesh_groups(rank)) for rank in range(4)]
    for rank, trace in enumerate(traces):
        trace.step(1, 0, 1000)
        trace.kernel("gemm", 100, 100, launch=5)
        tp = str(mesh_groups(rank)[1]["ranks"])
        trace.collective("allreduce", 150, 100, elements=1000, group="3", description="mesh_tp", ranks=tp, seq=1, launch=10)
        if rank in (0, 2):
            dp = {"group": "5", "description": "mesh_dp", "ranks": "[0, 2]", "stream": 24}
            trace.collective("allreduce", 300, 50, elements=500, seq=1, launch=20, **dp)
    return process_groups.analyze(job_of(*traces, gpus_per_node=gpus_per_node))


def test_every_group_is_listed_with_what_its_ranks_did() -> None:
    rows = {row["id"]: row for row in mesh_job().json()["process_groups"]}
    assert rows["3@0,1"] == {
        "id": "3@0,1",
        "name": "3",
        "description": "mesh_tp",
        "ranks": [0, 1],
        "known_ranks": [0, 1],
        "size": 2,
        "axis": "tp",
        "spans_nodes": None,
        "operations": 2,
        "sent_bytes": 2 * 4000,  # ring: 2 (2-1)/2 of 4000 bytes, on two ranks
        "operations_of_unknown_size": 0,
        "step_operations": 2,
        "step_sent_bytes": 8000,
        "busy_us": 200.0,
        "exposed_us": 100.0,  # 200-250 on each rank
    }
    assert (rows["5@0,2"]["operations"], rows["5@0,2"]["busy_us"]) == (2, 100.0)
    unused = rows["5@1,3"]
    assert (unused["operations"], unused["sent_bytes"], unused["busy_us"], unused["exposed_us"]) == (0, 0, 0.0, 0.0)


def test_sizes_that_are_not_recorded_are_counted_not_added_as_zero() -> None:
    trace = Trace(0, 2)
    trace.step(1, 0, 1000)
    trace.collective("allreduce", 100, 100, dtype="Strange_new_type", launch=10)
    (row,) = process_groups.analyze(job_of(trace)).json()["process_groups"]
    assert (row["sent_bytes"], row["operations_of_unknown_size"]) == (None, 1)
    trace.collective("allreduce", 300, 100, elements=10, launch=20)
    (row,) = process_groups.analyze(job_of(trace)).json()["process_groups"]
    assert (row["sent_bytes"], row["operations_of_unknown_size"]) == (40, 1)


def test_the_maps_show_which_group_of_each_axis_a_rank_is_in_and_which_axis_joins_two_ranks() -> None:
    (section,) = mesh_job().sections()
    _, by_axis, by_rank = section.charts
    assert isinstance(by_axis, Heatmap) and isinstance(by_rank, Heatmap)
    tp, dp = by_axis.x_labels.index("tp"), by_axis.x_labels.index("dp")
    assert [row[tp] for row in by_axis.values] == [1.0, 1.0, 2.0, 2.0]
    assert [row[dp] for row in by_axis.values] == [1.0, 2.0, 1.0, 2.0]
    assert by_axis.texts is not None and by_axis.texts[0][tp] == "tp, group 3@0,1 (0,1)"
    assert by_rank.texts is not None
    assert [text.split(",")[0] for text in by_rank.texts[0]] == ["no common group", "tp", "dp", "world"]
    assert by_rank.values[0][0] is None


def test_tensor_parallel_groups_across_nodes_are_a_finding() -> None:
    assert mesh_job(gpus_per_node=2).findings() == []
    (finding,) = mesh_job(gpus_per_node=1).findings()
    assert finding.id == "process_groups.placement"
    assert "3@0,1" in finding.text
