"""Logs made as NCCL of several versions writes them, and RAS' text: communicators, and who is behind."""

import json

import pytest

from tests.analyses.hang.made import STARTED, RankDump, hang_of
from tracekit.analyses.hang import analyze
from tracekit.errors import InputError
from tracekit.job.load import LoadOptions, load_job

INIT = {
    "2.10": "comm {comm} rank {rank} nranks {ranks} cudaDev {rank} busId {rank}000 - Init COMPLETE",
    "2.18": "comm {comm} rank {rank} nranks {ranks} cudaDev {rank} busId {rank}000 commId 0x9a{ranks} - Init COMPLETE",
    "2.21": "ncclCommInitRank comm {comm} rank {rank} nranks {ranks} cudaDev {rank} nvmlDev {rank} busId {rank}000 "
    "commId 0x9a{ranks} - Init COMPLETE",
    "2.27": "ncclCommSplit comm {comm} rank {rank} nranks {ranks} cudaDev {rank} nvmlDev {rank} busId {rank}000 parent 0x1 color 3 key 0 "
    "- Init COMPLETE commId 0x9a{ranks}",
}  # fmt: skip


def log(rank: int, calls: int, version: str = "2.21", pid: int | None = None) -> str:
    before = f"node{rank // 2}:{100 + rank if pid is None else pid}:{200 + rank} [{rank}] NCCL INFO "
    comm = f"0x55aa{rank}0"
    lines = [f"NCCL version {version}.3+cuda12.4", f"{before}NET/IB : Using [0]mlx5_0:1/RoCE"]
    if version != "2.10":
        lines.append(f"{before}comm {comm} rank {rank} nRanks 4 nNodes 2 localRanks 2 localRank {rank % 2} MNNVL 0")
    lines.append(f"{before}16 coll channels, 0 nvls channels, 16 p2p channels")
    lines.append(before + INIT[version].format(comm=comm, rank=rank, ranks=4))
    tail = "sendbuff 0x7f00 recvbuff 0x7f00 count 1024 datatype 7 op 0 root 0"
    lines += [f"{before}AllReduce: opCount {n:x} {tail} comm {comm} [nranks=4] stream 0x7" for n in range(calls)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("version", ["2.18", "2.21", "2.27"])
def test_a_rank_that_is_behind_is_named_by_the_logs_alone(version, tmp_path):
    for rank in range(4):
        (tmp_path / f"nccl_debug.{rank}.log").write_text(log(rank, 17 if rank == 2 else 18, version))
    hang = analyze(load_job([str(tmp_path)], LoadOptions()))
    assert hang.findings()[0].text == (
        "Ranks 0, 1, 3 wait in AllReduce (call 18 of communicator 0x9a4 of 4 ranks) for rank 2, which has made 17, by NCCL's logs."
    )
    told = hang.json()
    assert told["hang"]["root"]["ranks"] == [2]
    (one,) = told["nccl"][2]["communicators"]
    assert (one["id"], one["members"], one["calls"], one["channels"], one["nodes"], one["complete"]) == (
        "0x9a4",
        [0, 1, 2, 3],
        17,
        16,
        2,
        True,
    )
    assert (told["nccl"][0]["version"], told["nccl"][0]["network"]) == (f"{version}.3", "[0]mlx5_0:1/RoCE")


def test_all_processes_in_one_log(tmp_path):
    (tmp_path / "nccl.log").write_text("".join(log(rank, 3 if rank == 0 else 4) for rank in range(4)))
    assert "for rank 0, which has made 3" in analyze(load_job([str(tmp_path)], LoadOptions())).findings()[0].text


def test_addresses_of_the_first_versions_join_nothing(tmp_path):
    for rank in range(4):
        (tmp_path / f"nccl_{rank}.log").write_text(log(rank, 3 + rank % 2, "2.10"))
    hang = analyze(load_job([str(tmp_path)], LoadOptions()))
    assert (hang.json()["hang"], hang.json()["nccl"][1]["communicators"][0]["calls"]) == (None, 4)


def test_even_logs_are_no_hang(tmp_path):
    for rank in range(4):
        (tmp_path / f"nccl_{rank}.log").write_text(log(rank, 5))
    hang = analyze(load_job([str(tmp_path)], LoadOptions()))
    assert (hang.json()["hang"], [finding for finding in hang.findings() if finding.severity != "info"]) == (None, [])


def test_beside_dumps_a_communicator_has_its_group_and_errors_stand_there(tmp_path):
    for rank in range(4):
        warn = f"node0:1{rank}:2 [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer\n"
        (tmp_path / f"nccl_{rank}.log").write_text(log(rank, 5) + warn)
    dumps = {rank: RankDump().call().call(state=STARTED) for rank in (0, 1, 3)} | {2: RankDump().call()}
    told = hang_of(tmp_path, dumps).json()
    assert told["hang"]["root"]["ranks"] == [2]
    assert [log["communicators"][0]["group"] for log in told["nccl"]] == ["the default group"] * 4
    assert told["nccl"][0]["warnings"] == ["socketProgress: Connection closed by remote peer"]


RAS = """NCCL version 2.24.3 compiled with CUDA 12.4

Warnings
========

#0-0 (5a0c0f6) MISMATCH
  Communicator ranks have different AllReduce operation counts
  31 ranks have launched up to operation 6650
  Rank 7 has launched up to operation 6649 -- GPU 7 managed by process 483079 on node 10.0.0.1
"""
DEAD = """NCCL version 2.26.2 compiled with CUDA 12.8

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 10.0.0.3 managing GPU 5

#0-0 (cf264af) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

#0-1 (aaaa) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  2 ranks have not launched any operations
  Rank 0 -- GPU 0 managed by process 1 on node 10.0.0.1
  Rank 2 -- GPU 2 managed by process 2 on node 10.0.0.1
"""


def told(tmp_path):
    return analyze(load_job([str(tmp_path)], LoadOptions()))


def test_the_text_of_ras(tmp_path):
    (tmp_path / "ncclras.txt").write_text(RAS)
    result = told(tmp_path)
    (log,) = result.json()["nccl"]
    assert log["version"] == "2.24.3"
    assert "RAS: communicator 5a0c0f6 MISMATCH: 31 ranks have launched up to operation 6650" in log["warnings"]
    (finding,) = result.findings()
    text = "31 ranks wait in AllReduce (call 6650 of communicator 5a0c0f6) for rank 7, which has launched 6649, by NCCL's RAS."
    assert (finding.id, finding.severity, finding.text) == ("hang.behind", "warning", text)


def test_a_process_that_ras_does_not_reach_comes_first(tmp_path):
    (tmp_path / "ras.out").write_text(DEAD)
    result = told(tmp_path)
    assert result.json()["hang"]["root"]["ranks"] == [21]
    (finding,) = result.findings()
    assert (finding.id, finding.severity) == ("hang.root", "critical")
    assert finding.text == "Rank 21 of communicator cf264af is considered dead (process 3487984 on 10.0.0.3), by NCCL's RAS."


def ras_json(counts, gone=()):
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    ranks = [{"rank": r, "host": "n0", "pid": 9 + r, "cuda_dev": r, "status": status, "collective_counts": c} for r, c in enumerate(counts)]
    lost = {"unresponsive": True, "considered_dead": False}
    missing = [{"rank": r, "host": "n1", "pid": 7, "cuda_dev": 0, "nvml_dev": 3, "status": lost} for r in gone]
    one = {"hash": "0xae", "size": len(ranks) + len(missing), "ranks": ranks, "missing_ranks": missing}
    return json.dumps({"nccl_version": "2.28.9", "communicators_count": 1, "communicators": [one]}, indent=2)


def test_the_json_of_ras(tmp_path):
    counts = [{"Broadcast": 1, "AllReduce": 12}, {"Broadcast": 1, "AllReduce": 12}, {"Broadcast": 1, "AllReduce": 11}]
    (tmp_path / "status.json").write_text(ras_json(counts))
    result = told(tmp_path)
    text = "Ranks 0-1 wait in AllReduce (call 13 of communicator 0xae of 3 ranks) for rank 2, which has launched 12, by NCCL's RAS."
    assert [finding.text for finding in result.findings()] == [text.replace("0-1", "0, 1")]
    (section,) = result.sections()
    (table,) = section.charts
    row = table.frame.iloc[0]
    assert (row["group"], row["ranks"], row["calls"], row["last"], row["fewest"]) == ("communicator 0xae", 3, "12 to 13", "AllReduce", "2")


def test_a_missing_rank_in_the_json_of_ras_whose_comma_is_missing(tmp_path):
    text = ras_json([{"AllReduce": 12}] * 2, gone=[2]).replace('"nvml_dev": 3,', '"nvml_dev": 3')
    (tmp_path / "status.json").write_text(text)
    assert [finding.text for finding in told(tmp_path).findings()] == [
        "Rank 2 of communicator 0xae is unresponsive (process 7 on n1), by NCCL's RAS."
    ]


@pytest.mark.parametrize("change", [lambda t: t[:-30], lambda t: t.replace('"ranks": [', '"ranks": ["x", {"rank": "a"}, {"rank": 1e99}, ')])
def test_a_damaged_json_of_ras_is_read_or_refused(tmp_path, change):
    (tmp_path / "status.json").write_text(change(ras_json([{"AllReduce": 12}] * 2)))
    try:
        told(tmp_path)
    except InputError as error:
        assert "no JSON of ncclras to its end" in str(error)


def test_communicators_stand_beside_a_hang(tmp_path):
    for rank in range(4):
        (tmp_path / f"nccl_{rank}.log").write_text(log(rank, 5))
    dumps = {rank: RankDump().call().call(state=STARTED) for rank in (0, 1, 3)} | {2: RankDump().call()}
    (section,) = hang_of(tmp_path, dumps).sections()
    table = section.charts[-1]
    assert table.title == "NCCL's communicators"
    assert table.frame["group"].tolist() == ["the default group"]
