"""Whose trace a file is, and what happens when two files say the same."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.builder import Trace, group
from tests.oracle import tables as read
from tests.oracle import tables_from_document
from tracekit.notes import sentences
from tracekit.readers.evidence import rank_of_name
from tracekit.readers.identity import Identity, identify, resolve
from tracekit.trace.events import Coverage
from tracekit.units import NULL

CASES = Path(__file__).resolve().parents[2].parent / "shared" / "cases"
REAL = CASES.parent / "real"


def identity(trace: Trace, name: str = "trace.json") -> Identity:
    return identify(tables_from_document(trace.document()), name)


def allreduce(trace: Trace, **args: object) -> None:
    trace.operator("record_param_comms", 10, 5, **{"Collective name": "allreduce", "Group size": 4} | args)


def default_group(**args: object) -> dict[str, object]:
    return {"Process Group Name": "0", "Process Group Description": "default_pg", "Global rank start": 0, "Global rank stride": 1} | args


# The name ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-0.May_05_16_53_20.41200.pt.trace.json", 0),
        ("rank0.json", 0),
        ("rank_00003.pt.trace.json.gz", 3),
        ("trace_rank1.json", 1),
        ("rank12_trace.json", 12),
        ("job_a100_rank7of8.json.gz", 7),
        ("worker0.1694128201545.pt.trace.json", 0),
        ("trace_r3.json", 3),
        ("r10.json", 10),
        ("profile_traces/iteration_10/rank5_trace.json", 5),
        ("rank_2/iteration_7.json", 2),
        ("step_rank3.json", 3),
        ("tp_rank1_pp_rank0_rank6.json", 6),
        ("node1_local_rank0_global_rank8.json", 8),
        ("RANK9.JSON", 9),
        ("node3_2741.1778000001592181759.pt.trace.json", None),
        ("libkineto_activities_41200.json", None),
        ("node1_local0.json", None),
        ("local_rank3.json", None),
        ("localrank3.json", None),
        ("tp_rank1.json", None),
        ("nranks8.json", None),
        ("frank3.json", None),
        ("trace_4.json", None),
        ("rank0_rank1.json", None),
        ("rank99999999999.json", None),
        ("", None),
        ("<b>rank\n3</b>.json", None),
    ],
)
def test_rank_of_a_name(name: str, rank: int | None) -> None:
    assert rank_of_name(name) == rank


def test_the_number_of_a_worker_machine_is_no_rank() -> None:
    name = "job-worker-3_4000.1778000001592181759.pt.trace.json"
    trace = Trace(rank=None, pid=4000)
    trace.operator("aten::mm", 0, 5)
    assert rank_of_name(name) == 3
    found = identity(trace, name)
    assert (found.rank, found.source, found.host, found.process) == (None, "none", "job-worker-3", "job-worker-3:4000")
    other = Trace(rank=None, pid=17)  # the number before the time is not a process of the trace: that is no HOST_PID
    other.operator("aten::mm", 0, 5)
    assert (identity(other, name).rank, identity(other, name).host) == (3, "")


# One file ------------------------------------------------------------------------------------------------------------


def test_distributed_info_comes_first() -> None:
    trace = Trace(rank=3, world_size=8, host_name="node7", pid=100)
    trace.operator("aten::mm", 0, 5)
    found = identity(trace, "rank5.json")
    assert (found.rank, found.source, found.world_size, found.backend) == (3, "distributedInfo", 8, "nccl")
    assert found.claims == {"distributedInfo": 3, "file name": 5}
    assert (found.host, found.process, found.device_name) == ("node7", "node7:103", "NVIDIA H100 80GB HBM3")
    assert found.notes == []


def test_a_rank_that_is_inferred_is_reported_with_its_evidence() -> None:
    trace = Trace(rank=None)
    allreduce(trace, Rank=2, **default_group())
    by_records, by_name = identity(trace), identity(trace, "rank2.json")
    assert (by_records.rank, by_records.source, by_records.world_size) == (2, "record_param_comms", 4)
    assert (by_name.rank, by_name.source) == (2, "file name")
    assert "there is no distributedInfo; rank 2 was inferred from record_param_comms" in sentences(by_records.notes)[0]
    assert "there is no distributedInfo; rank 2 was inferred from the file's name" in sentences(by_name.notes)[0]


@pytest.mark.parametrize(
    "args",
    [
        {"Collective name": "send", "Rank": 0, "Dst Rank": 0, **default_group()},  # Rank is the peer
        {"Collective name": "broadcast", "Rank": 0, **default_group()},  # Rank is the root
        {"Collective name": "_reduce_oop", "Rank": 0, **default_group()},
        {"Collective name": "allreduce", "Rank": 1, "Process Group Name": "3", "Process Group Description": "mesh_tp", "Group size": 2},
        {"Collective name": "allreduce", "Rank": 9, **default_group()},  # of 4
        {"Collective name": "allreduce", "Rank": -1, **default_group()},
        {"Collective name": "allreduce", **default_group()},
    ],
)
def test_what_rank_in_a_record_does_not_tell(args: dict[str, object]) -> None:
    trace = Trace(rank=None)
    trace.operator("record_param_comms", 10, 5, **{"Group size": 4, **args})
    assert (identity(trace).rank, identity(trace).source) == (None, "none")


def test_a_group_called_0_that_spans_the_world_is_the_default_group() -> None:
    trace = Trace(rank=None)
    allreduce(trace, Rank=3, **{"Process Group Name": "0", "Process Group Description": "undefined"})
    assert identity(trace).rank == 3


def test_records_that_disagree_tell_nothing() -> None:
    trace = Trace(rank=None)
    allreduce(trace, Rank=2, **default_group())
    allreduce(trace, Rank=3, **default_group())
    assert identity(trace).rank is None


def test_two_distributed_infos_are_decided_by_name_and_records() -> None:
    trace = Trace(rank=1, world_size=2)
    document = trace.document() | {"_distributedInfo_all": [{"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2}]}
    found = identify(tables_from_document(document), "rank1.json")
    assert (found.rank, found.source) == (1, "distributedInfo 2")
    assert found.claims == {"distributedInfo": 0, "distributedInfo 2": 1, "file name": 1}
    assert "rank 1 is used because the file's name" in sentences(found.notes)[0]
    assert identify(tables_from_document(document), "x.json").rank == 0


@pytest.mark.parametrize("rank", ["x", None, -1, True, 1.5, [0], {"a": 1}, 10**30, "9" * 5000, float("nan")])
def test_a_rank_that_is_none_is_not_used(rank: object) -> None:
    trace = Trace(rank=None, distributedInfo={"rank": rank, "world_size": rank})
    found = identity(trace, "rank2.json")
    assert (found.rank, found.source, found.world_size) == (2, "file name", None)
    assert "distributedInfo has no usable rank" in sentences(found.notes)[0]


def test_numbers_written_otherwise_are_read() -> None:
    found = identity(Trace(rank=None, distributedInfo={"rank": "3", "world_size": 8.0}))
    assert (found.rank, found.world_size) == (3, 8)


def test_a_rank_beyond_the_world_is_not_used() -> None:
    found = identity(Trace(rank=9, world_size=8))
    assert (found.rank, sentences(found.notes)[0]) == (None, "distributedInfo says rank 9 of 8, which cannot be; that rank is not used")


def test_only_a_rank_in_distributed_info() -> None:
    found = identity(Trace(rank=None, distributedInfo={"rank": 0}))
    assert (found.rank, found.world_size, found.backend) == (0, None, "")


def test_world_size_of_the_default_group() -> None:
    assert identity(Trace(rank=0, distributedInfo={"pg_config": [group("0", "default_pg", [0, 1, 2])]})).world_size == 3


def test_a_world_smaller_than_its_default_group_is_not_believed() -> None:
    found = identity(Trace(rank=1, world_size=1, groups=[group("0", "default_pg", [0, 1])]))
    assert (found.rank, found.world_size) == (1, 2)
    assert sentences(found.notes) == ["distributedInfo says a world of 1, its default group has 2 ranks: 2 is taken"]


def test_nothing_at_all() -> None:
    found = identity(Trace(rank=None, device=None))
    assert found == Identity(None, "none", {}, None, "", "", "", "", [])


@pytest.mark.parametrize(
    ("category", "name", "backend"),
    [
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "nccl"),
        ("kernel", "ncclAllReduceRingLLKernel_sum_f32", "nccl"),
        ("kernel", "rcclGenericKernel", "rccl"),
        ("user_annotation", "gloo:all_reduce", "gloo"),
        ("user_annotation", "nccl:all_reduce", "nccl"),
        ("kernel", "gemm_nccl", ""),
        ("user_annotation", "glooooo", ""),
    ],
)
def test_backend_by_what_ran(category: str, name: str, backend: str) -> None:
    trace = Trace(rank=None)
    trace.add(category, name, 0, 5)
    assert identity(trace).backend == backend


def test_the_device_that_ran_most_kernels() -> None:
    trace = Trace(rank=2, world_size=4, deviceProperties=[{"id": 0, "name": "A"}, {"id": 2, "name": "B"}, "junk", {"id": "3"}])
    trace.kernel("gemm", 0, 5)
    assert identity(trace).device_name == "B"
    assert identity(Trace(deviceProperties=[{"id": 0, "name": "A"}, {"id": 1, "name": "B"}])).device_name == "A"
    assert identity(Trace(deviceProperties="junk", host_name=7)).device_name == ""


# All files of a job --------------------------------------------------------------------------------------------------


def claimant(
    file: str,
    rank: int | None = None,
    span: tuple[int, int] | None = (0, 100),
    process: str = "",
    host: str = "",
    events: int = 10,
    **claims: int,
) -> tuple[Coverage, Identity, tuple[int, int] | None]:
    words = {"info": "distributedInfo", "name": "file name", "records": "record_param_comms"}
    told = {words[key]: value for key, value in claims.items()}
    first = next(iter(told.items()), ("none", None))
    return Coverage(file, events=events), Identity(first[1], first[0], told, None, "", "", host, process), span


def resolved(files):
    """(ranks, sentences on each file, sentences on the job)."""
    ranks, of_file, of_job = resolve(files)
    return ranks, [sentences(notes) for notes in of_file], sentences(of_job)


def test_files_that_agree_keep_their_ranks() -> None:
    files = [claimant("b.json", info=1), claimant("a.json", info=0), claimant("c.json", info=5)]
    ranks, problems, notes = resolved(files)
    assert (ranks, problems, notes) == ([1, 0, 5], [[], [], []], [])
    assert [coverage.rank for coverage, _, _ in files] == [1, 0, 5]


def test_local_ranks_are_replaced_by_the_ranks_of_the_collectives() -> None:
    files = [
        claimant("node0_local0.json", info=0, records=0, process=":901"),
        claimant("node0_local1.json", info=1, records=1, process=":902"),
        claimant("node1_local0.json", info=0, records=2, process=":903"),
        claimant("node1_local1.json", info=1, records=3, process=":904"),
    ]
    ranks, problems, notes = resolved(files)
    assert ranks == [0, 1, 2, 3]
    assert problems[2] == [
        "distributedInfo gives 'node0_local0.json' and 'node1_local0.json' the same rank 0; rank 2 of this file was taken from "
        "record_param_comms (Rank of collectives on the default group)"
    ]
    assert len(notes) == 2
    assert [coverage.status for coverage, _, _ in files] == ["complete"] * 4


def test_collectives_win_over_distributed_info_even_without_a_conflict() -> None:
    ranks, problems, _ = resolved([claimant("node1_local0.json", info=0, records=2), claimant("node1_local1.json", info=1, records=3)])
    assert ranks == [2, 3]
    assert problems[0][0].startswith("distributedInfo says rank 0; rank 2 of this file was taken from record_param_comms")


def test_names_decide_where_the_collectives_say_nothing() -> None:
    files = [claimant(f"rank{i}.json", info=0, name=i, process=f":{i}") for i in range(3)]
    ranks, problems, _ = resolved(files)
    assert ranks == [0, 1, 2]
    assert "'rank0.json' and 'rank1.json' the same rank 0" in problems[1][0]
    assert "the file's name" in problems[1][0]


def test_names_decide_between_two_files_although_others_have_none() -> None:
    files = [claimant("rank1.json", info=0, name=1), claimant("rank0.json", info=0, name=0), claimant("x.json", info=7)]
    assert resolve(files)[0] == [1, 0, 7]


def test_without_better_evidence_the_first_stays_and_the_other_is_named() -> None:
    files = [claimant("a.json", info=0, process=":1"), claimant("b\n<b>.json", info=0, process=":2"), claimant("c.json", info=1)]
    ranks, problems, _ = resolved(files)
    assert ranks == [0, None, 1]
    assert files[1][0].status == "duplicate"
    assert files[1][0].rank == 0
    assert "same rank 0 as 'a.json'" in problems[1][0]
    assert "rank3.json" in problems[1][0]
    assert "\n" not in problems[1][0]
    assert files[1][0].problems == problems[1]


def test_the_whole_file_stays_rather_than_the_one_that_was_cut_off() -> None:
    files = [claimant("a.json", info=0), claimant("b.json", info=0), claimant("c.json", info=0, events=0)]
    files[0][0].note("cut", "truncated")
    assert resolve(files)[0] == [None, 0, None]


def test_a_copy_of_a_file_is_not_counted_twice() -> None:
    files = [claimant("rank0.json", info=0, name=0, process=":1"), claimant("rank0_copy.json.gz", info=0, name=0, process=":1")]
    ranks, problems, _ = resolved(files)
    assert ranks == [0, None]
    assert "same rank 0, process and time as 'rank0.json'" in problems[1][0]


def test_a_part_of_a_recording_is_no_copy() -> None:
    files = [claimant("rank0.json", info=0, process=":1"), claimant("rank0_2.json", info=0, process=":1", span=(40, 120))]
    ranks, problems, _ = resolved(files)
    assert ranks == [0, None]
    assert "holds something else" in problems[1][0]
    assert "put their traceEvents into one file" in problems[1][0]


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["t/trace_1.json", "t/trace_0.json"], [1, 0]),
        (["run2/0/trace.json", "run2/1/trace.json"], [0, 1]),
        (["trace_1.json", "trace_2.json"], [None, None]),
        (["trace_0.json", "other_1.json"], [None, None]),
        (["host0_71.json", "host1_92.json"], [None, None]),
    ],
)
def test_the_number_in_which_names_differ_is_the_rank(names: list[str], ranks: list[int | None]) -> None:
    files = [claimant(name, span=(i, 100 + i), process=f":{i}") for i, name in enumerate(names)]
    found, _, notes = resolved(files)
    assert found == ranks
    assert any("the number in which their names differ" in sentence for sentence in notes) == (ranks[0] is not None)


def test_numbers_of_files_recorded_one_after_the_other_are_no_ranks() -> None:
    assert resolve([claimant(f"trace_{i}.json", span=(200 * i, 200 * i + 100), process=f":{i}") for i in range(3)])[0] == [None] * 3


def test_windows_of_a_rank_share_it() -> None:
    files = [
        claimant(f"iteration_{i}/rank0_trace.json", info=0, name=0, process="h:1", host="h", span=(100 * i, 100 * i + 100))
        for i in range(4)
    ]
    files += [claimant("restarted.json", info=0, process="h:2", host="h", span=(900, 999))]
    files += [claimant("empty.json", info=0, span=None)]
    ranks, problems, notes = resolved(files)
    assert ranks == [0] * 6
    assert problems == [[]] * 6
    assert notes == []


def test_one_rank_on_two_hosts_is_a_conflict_at_any_time() -> None:
    files = [claimant("a.json", info=0, process="h:1", host="h"), claimant("b.json", info=0, process="g:1", host="g", span=(500, 600))]
    assert resolve(files)[0] == [0, None]


def test_a_window_of_a_known_process_needs_no_rank_of_its_own() -> None:
    files = [claimant("a.json", info=3, process="h:7", host="h"), claimant("b.json", process="h:7", host="h", span=(500, 600))]
    ranks, problems, _ = resolved(files)
    assert ranks == [3, 3]
    assert "another window of the same process 'h:7'" in problems[1][0]


def test_a_file_without_a_rank_is_asked_for_one() -> None:
    files = [claimant("a.json", info=0), claimant("b.json"), claimant("c.json")]
    ranks, problems, _ = resolved(files)
    assert ranks == [0, None, None]
    for index in (1, 2):
        assert "rank3.json" in problems[index][0]
        assert files[index][0].status == "skipped"


def test_the_only_process_of_a_job_is_rank_0_with_a_note() -> None:
    one = [claimant("a.json")]
    assert resolve(one)[0] == [0]
    assert one[0][0].rank is None
    assert "taken for rank 0 of a job of one process" in resolved(one)[2][0]
    windows = [claimant("a.json", process=":5"), claimant("b.json", process=":5", span=(500, 600))]
    assert resolve(windows)[0] == [0, 0]
    assert resolve([claimant("a.json", process=":5"), claimant("b.json", process=":6", span=(500, 600))])[0] == [None, None]


def test_nothing_to_resolve() -> None:
    assert resolve([]) == ([], [], [])


# Shared cases and recordings -----------------------------------------------------------------------------------------


def span(tables) -> tuple[int, int]:
    timed = tables.ts != NULL
    return int(tables.ts[timed].min()), int((tables.ts + np.maximum(tables.dur, 0))[timed].max())


def ranks_of(folder: Path, files: Iterable[str]) -> tuple[dict[str, int | None], list[str]]:
    claimants = []
    for name in files:
        tables = read((folder / name).read_text())
        claimants.append((Coverage(name, events=len(tables)), identify(tables, name), span(tables)))
    ranks, problems, notes = resolved(claimants)
    said = [f"{coverage.file}: {text}" for (coverage, _, _), texts in zip(claimants, problems, strict=True) for text in texts]
    return {coverage.file: rank for (coverage, _, _), rank in zip(claimants, ranks, strict=True)}, said + notes


@pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not here")
@pytest.mark.parametrize("case", ["G01", "G02", "G10", "G14", "T09", "P14", "P12"])
def test_shared_cases(case: str) -> None:
    (folder,) = CASES.glob(f"{case}_*")
    expected = json.loads((folder / "expected.json").read_text())
    ranks, said = ranks_of(folder, expected["files"])
    # json keeps the last distributedInfo of P14, rank 0 in both files: the name and the collectives have to tell
    listed = {"G14": [1, 3], "T09": [0, 1, 2, 3], "P12": [0, 1], "P14": [0, 1]}.get(case, [])
    wanted = expected["expect"].get("rank_of_file") or dict(zip(expected["files"], listed, strict=True))
    assert ranks == wanted
    if case in ("G01", "G02", "G10"):
        for word in expected["message_must_mention"]:
            assert any(word in text for text in said), word


@pytest.mark.skipif(not REAL.is_dir(), reason="the shared recordings are not here")
def test_a_real_job_of_eight_ranks() -> None:
    folder = REAL / "dlrm_v100_8ranks"
    ranks, said = ranks_of(folder, [path.name for path in folder.iterdir()])
    assert sorted(ranks.values()) == list(range(8))
    assert all(f"worker{rank}_" in name for name, rank in ranks.items())
    assert said == []
