"""Whole jobs from files, as `tracekit analyze` loads them."""

import pytest

from tests.builder import Trace, group
from tracekit.errors import InputError, UsageError
from tracekit.executors.local import LocalExecutor
from tracekit.job.load import LoadOptions, load_job
from tracekit.notes import sentences
from tracekit.units import NULL


def write(folder, rank, world=2, shift=0, dur=None, seq=7, step=3, **options):
    trace = Trace(rank, world, **options)
    trace.step(step, 0, 1000)
    trace.kernel("gemm", 60, 100, launch=20, op="aten::mm")
    length = 200 - shift if dur is None else dur
    trace.collective("allreduce", 300 + shift, length, elements=1000, launch=200, seq=seq, ranks=list(range(world)))
    trace.write(folder / f"rank{rank}.json")
    return trace


def load(folder, **options):
    return load_job([str(folder)], LoadOptions(**options))


def test_two_ranks_wait_and_transfer(tmp_path):
    write(tmp_path, 0)
    write(tmp_path, 1, shift=50)
    job = load(tmp_path)
    assert (job.world_size, job.ranks, job.missing_ranks, job.steps) == (2, [0, 1], [], [3])
    assert job.operations["wait_ns"].tolist() == [50_000, 0]
    assert job.operations["full_bytes"].tolist() == [4000, 4000]
    match = job.matches.iloc[0]
    assert (match["last_rank"], match["transfer_ns"], match["matched_by"], match["complete"]) == (1, 150_000, "seq", True)


def test_a_barrier_moves_no_bytes_whatever_its_type(tmp_path):
    for rank in (0, 1):
        trace = Trace(rank, 2)
        trace.collective("barrier", 300, 20, elements=0, dtype="", launch=200, seq=1, ranks=[0, 1])
        trace.write(tmp_path / f"rank{rank}.json")
    assert load(tmp_path).operations["full_bytes"].tolist() == [0, 0]


def test_a_missing_rank_is_said_and_nothing_is_renumbered(tmp_path):
    write(tmp_path, 2, world=4)
    write(tmp_path, 0, world=4)
    job = load(tmp_path)
    assert (job.ranks, job.missing_ranks) == ([0, 2], [1, 3])
    assert any("2 of 4 ranks" in note for note in sentences(job.notes))
    assert not job.matches["complete"].any()


def test_bad_files_cost_a_line_each_and_the_rest_is_analyzed(tmp_path):
    write(tmp_path, 0)
    (tmp_path / "rank1.json").write_text("")
    (tmp_path / "other.json").write_text('{"a": 1}')
    job = load(tmp_path)
    assert job.ranks == [0]
    skipped = {c.file.rsplit("/")[-1]: c.problems for c in job.coverage if c.status == "skipped"}
    assert set(skipped) == {"rank1.json", "other.json"}
    assert all(len(p) == 1 and "\n" not in p[0] for p in skipped.values())


def test_nothing_readable_is_an_error(tmp_path):
    (tmp_path / "rank0.json").write_text("{}")
    with pytest.raises(InputError, match=r"rank0\.json"):
        load(tmp_path)


def test_another_host_is_aligned_before_waits_are_measured(tmp_path):
    for rank, (host, ahead) in enumerate([("a", 0), ("a", 0), ("b", 812), ("b", 812)]):
        trace = Trace(rank, 4, host_name=host)
        trace.step(1, ahead, 3000)
        for i in range(3):
            start = 100 + 900 * i + 10 * rank
            trace.collective("allreduce", start + ahead, 500 - 10 * rank, ranks=[0, 1, 2, 3], seq=i)
        trace.write(tmp_path / f"rank{rank}.json")
    job = load(tmp_path)
    assert [round(o / 1000) for o in job.clock.offset_ns.values()] == [0, 0, 812, 812]
    assert job.matches["last_rank"].tolist() == [3, 3, 3]
    assert any("clock" in n and "812" in n for n in sentences(job.notes))


def test_several_windows_of_one_rank(tmp_path):
    for rank in (0, 1):
        for number in (10, 20):
            folder = tmp_path / f"iteration_{number}"
            folder.mkdir(exist_ok=True)
            trace = Trace(rank, 2)
            trace.step(number, number * 10_000, 1000)
            trace.collective("allreduce", number * 10_000 + 100, 50, seq=number, launch=number * 10_000 + 50)
            trace.write(folder / f"rank{rank}_trace.json")
    job = load(tmp_path)
    assert job.ranks == [0, 1]
    assert len(job.windows) == 4
    assert job.steps == [10, 20]
    assert len(job.matches) == 2


def test_one_group_name_with_other_members_is_another_group(tmp_path):
    for rank in range(4):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        trace = Trace(rank, 4, groups=[group("0", "default_pg", [0, 1, 2, 3]), group("3", "mesh_tp", pair)])
        trace.step(1, 0, 1000)
        trace.collective("allreduce", 100 + rank, 50, group="3", description="mesh_tp", ranks=pair, seq=1)
        trace.write(tmp_path / f"rank{rank}.json")
    job = load(tmp_path)
    assert sorted(g.ranks for g in job.groups.groups if g.name == "3") == [(0, 1), (2, 3)]
    assert len(job.matches) == 2
    assert set(job.operations["axis"]) == {"tp"}


def test_sends_find_their_receives_by_order_not_by_seq(tmp_path):
    pair = [group("6", "mesh_pp", [0, 1])]
    for rank, name in ((0, "send"), (1, "recv")):
        trace = Trace(rank, 2, groups=[group("0", "default_pg", [0, 1]), *pair])
        trace.step(1, 0, 1000)
        for i in range(2):
            peer = {"Dst Rank": 1} if name == "send" else {"Src Rank": 0}
            start = 100 + 300 * i + (40 if rank == 0 else 0)
            trace.collective(name, start, 160 - start % 100, group="6", description="mesh_pp", seq=1 + i + 5 * rank, **peer)
        trace.write(tmp_path / f"rank{rank}.json")
    job = load(tmp_path)
    assert job.matches["kind"].tolist() == ["send", "send"]
    assert job.operations["wait_ns"][job.operations["kind"] == "recv"].tolist() == [40_000, 40_000]
    assert set(job.operations["purpose"]) == {"pipeline"}


def test_without_group_and_seq_order_inside_a_step(tmp_path):
    for rank in (0, 1):
        trace = Trace(rank, 2, groups=[])
        trace.step(1, 0, 1000)
        for i in range(2):
            trace.annotation("nccl:all_to_all", 10 + 20 * i, 15)
            trace.kernel("ncclKernel_SendRecv_RING", 100 + 200 * i + 20 * rank, 100 - 20 * rank, stream=84, launch=12 + 20 * i)
        trace.write(tmp_path / f"rank{rank}.json")
    job = load(tmp_path)
    assert job.matches["matched_by"].tolist() == ["order", "order"]
    assert job.operations["wait_ns"].tolist() == [20_000, 20_000, 0, 0]
    assert (job.operations["full_bytes"] == NULL).all()
    assert any("process group is not recorded" in n for n in sentences(job.notes))


def test_chosen_ranks_and_steps(tmp_path):
    for rank in range(3):
        write(tmp_path, rank, world=3)
    assert load(tmp_path, ranks=frozenset({0, 2})).ranks == [0, 2]
    with pytest.raises(UsageError, match="--ranks"):
        load(tmp_path, ranks=frozenset({9}))
    with pytest.raises(UsageError, match="--steps"):
        load(tmp_path, steps=(50, 60))


def test_the_same_job_whoever_reads_it(tmp_path):
    for rank in range(3):
        write(tmp_path, rank, world=3, shift=10 * rank)
    one = load(tmp_path, jobs=1)
    cache = str(tmp_path / "cache")
    for other in (load(tmp_path, jobs=3), load(tmp_path, cache=cache), load(tmp_path, cache=cache)):
        assert other.operations.astype("str").equals(one.operations.astype("str"))
        assert other.matches.astype("str").equals(one.matches.astype("str"))


def double(x):
    return 2 * x


@pytest.mark.parametrize("executor", [LocalExecutor(1), LocalExecutor(3), LocalExecutor(2, "processes")], ids=str)
def test_executors_give_every_result_with_its_place(executor):
    assert dict(executor.map(double, [3, 4, 5])) == {0: 6, 1: 8, 2: 10}


def test_an_executor_raises_what_the_function_raised():
    with pytest.raises(ZeroDivisionError):
        list(LocalExecutor(2).map(lambda x: 1 // x, [1, 0, 2]))


def test_a_mesh_given_by_the_user(tmp_path):
    for rank in (0, 1):
        write(tmp_path, rank)
    job = load(tmp_path, mesh="fsdp=2")
    assert (job.mesh.source, [(a.name, a.size) for a in job.mesh.axes]) == ("user", [("fsdp", 2)])
    assert set(job.operations["axis"]) == {"fsdp"}
    with pytest.raises(UsageError, match="3 ranks"):
        load(tmp_path, mesh="tp=3")


def test_hosts_that_are_far_apart_are_aligned_though_only_order_matches(tmp_path):
    for rank, (host, ahead) in enumerate([("a", 0), ("b", 3000)]):
        trace = Trace(rank, 2, host_name=host)
        trace.step(1, ahead, 3000)
        for i in range(4):
            trace.collective("allreduce", 100 + 700 * i + 20 * rank + ahead, 300 - 20 * rank)
        trace.write(tmp_path / f"rank{rank}.json")
    job = load(tmp_path)
    assert job.matches["matched_by"].tolist() == ["order"] * 4
    assert round(job.clock.offset_ns[1] / 1000) == 3000
    assert job.operations["wait_ns"].tolist() == [20_000] * 4 + [0] * 4


def test_an_uneven_exchange_sends_all_but_its_own_piece(tmp_path):
    splits = {0: [3, 5], 1: [6, 2]}
    for rank in (0, 1):
        trace = Trace(rank, 2)
        trace.step(1, 0, 1000)
        trace.collective("all_to_allv", 100, 50, elements=8, seq=1, **{"In split size": str(splits[rank])})
        trace.write(tmp_path / f"rank{rank}.json")
    job = load(tmp_path)
    assert job.operations["full_bytes"].tolist() == [32, 32]
    assert job.operations["sent_bytes"].tolist() == [5 * 4, 6 * 4]


def test_processes_give_what_threads_give(tmp_path, monkeypatch):
    from tracekit import analyses
    from tracekit.executors import local

    for rank in range(3):
        write(tmp_path, rank, world=3, shift=10 * rank)
    seen = []
    one = load_job([str(tmp_path)], LoadOptions(jobs=2), analyses.reducers())
    monkeypatch.setattr(local, "PROCESSES_FROM_BYTES", 0)
    many = load_job([str(tmp_path)], LoadOptions(jobs=2), analyses.reducers(), progress=lambda done, total: seen.append((done, total)))
    assert many.operations.astype("str").equals(one.operations.astype("str"))
    assert seen[-1][0] == seen[-1][1] > 0
    left, right = (analyses.run(job)["breakdown"].json() for job in (one, many))
    assert left == right


def test_ranks_left_out_by_request_are_not_missing(tmp_path):
    for rank in range(3):
        write(tmp_path, rank, world=4)
    assert load(tmp_path, ranks=frozenset({0, 1})).missing_ranks == []
    job = load(tmp_path, ranks=frozenset({0, 3}))
    assert job.missing_ranks == [3]
    assert any("1 of the 2 chosen ranks" in n for n in sentences(job.notes))


def test_ranks_without_a_common_step_are_named(tmp_path):
    write(tmp_path, 0, step=3)
    write(tmp_path, 1, step=30)
    job = load(tmp_path)
    assert job.steps == []
    assert any("no step was recorded by every rank (rank 0: 3; rank 1: 30)" in n for n in sentences(job.notes))


def test_between_clocks_that_nothing_aligns_there_is_neither_wait_nor_transfer(tmp_path):
    for rank, host in enumerate("aab"):
        trace = Trace(rank, 3, host_name=host, groups=[group("0", "default_pg", [0, 1, 2]), group("1", "mesh_tp", [0, 1])])
        trace.step(1, 0, 10_000_000)
        for i in range(4):
            far = i * i * 100_000 if host == "b" else 0  # no offset brings these together
            trace.collective("allreduce", 1_000_000 * i + 100 + far, 300, seq=i, ranks=[0, 1, 2])
        if host == "a":
            trace.collective("allreduce", 5_000_100, 300, group="1", seq=1, ranks=[0, 1], description="mesh_tp")
        trace.write(tmp_path / f"rank{rank}.json")
    job = load(tmp_path)
    assert not job.clock.aligned
    assert (job.matches["transfer_ns"] == NULL).tolist() == [True] * 4 + [False]  # those of one host are known all the same
    assert (job.operations["wait_ns"] == NULL).sum() == 12
