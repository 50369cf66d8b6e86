"""Logs made as NCCL of several versions writes them, and RAS' text: communicators, and who is behind."""

import pytest

from tests.analyses.hang.made import STARTED, RankDump, hang_of
from tracekit.analyses.hang import analyze
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

Errors
======

#0-0 (5a0c0f6) MISMATCH
  Communicator ranks have different collective operation counts
  31 ranks have launched up to operation 6650
  1 rank has launched up to operation 6649: 7
"""


def test_the_text_of_ras(tmp_path):
    (tmp_path / "ncclras.txt").write_text(RAS)
    (log,) = analyze(load_job([str(tmp_path)], LoadOptions())).json()["nccl"]
    assert log["version"] == "2.24.3"
    assert log["warnings"][0] == "RAS: communicator 5a0c0f6 MISMATCH: 31 ranks have launched up to operation 6650"
