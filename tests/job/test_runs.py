"""Several runs in one folder are found, told and chosen from; what one launch recorded is one job."""

import pytest

from tests.builder import BASE, Trace
from tracekit.errors import UsageError
from tracekit.job.load import LoadOptions, load_job

DAY = 86_400 * 10**9


def record(folder, rank, world=2, *, pid=4000, base=BASE, step=10, device="NVIDIA H100 80GB HBM3", name=None, **top):
    folder.mkdir(exist_ok=True, parents=True)
    trace = Trace(rank, world, pid=pid, base=base, device=device, **top)
    trace.step(step, 0, 1000)
    trace.collective("allreduce", 300, 100, launch=20, seq=step, ranks=list(range(world)))
    trace.write(folder / (name or f"rank{rank}.json"))


def load(folder, **options):
    return load_job([str(folder)], LoadOptions(**options))


def runs_of(folder):
    """(the message, the runs) where a folder holds several."""
    with pytest.raises(UsageError) as caught:
        load(folder)
    return str(caught.value)


def test_a_job_started_again_is_another_run_and_one_of_them_is_chosen(tmp_path):
    for number in range(3):
        for rank in (0, 1):
            record(tmp_path / f"rec{number}", rank, pid=4000 + 100 * number, base=BASE + number * 10**10)
    message = runs_of(tmp_path)
    assert message.startswith("these are 3 runs, not one job: rec0 (ranks 0, 1 of 2, 20")
    assert "2 files" in message and "rank0.json" in message and message.endswith("--run rec0, or give its path alone")
    job = load(tmp_path, run="rec1")
    assert (job.ranks, len(job.operations), len(job.matches)) == ([0, 1], 2, 1)
    assert [(run.name, run.ranks, run.steps) for run in job.runs] == [(f"rec{n}", (0, 1), (10,)) for n in range(3)]
    with pytest.raises(UsageError, match="no run 'x'; these are 3 runs"):
        load(tmp_path, run="x")


def test_runs_in_one_folder_are_numbered_by_time(tmp_path):
    for number in (1, 0):
        record(tmp_path, 0, 1, pid=4000 + number, base=BASE + number * 10**10, name=f"host_{4000 + number}.{number}.pt.trace.json")
    assert "run1 (rank 0" in runs_of(tmp_path)
    assert load(tmp_path, run="run2").windows[0].coverage.file.endswith("host_4001.1.pt.trace.json")


@pytest.mark.parametrize(
    "other",
    [
        {"world": 8, "pid": 5000},
        {"base": BASE + DAY, "pid": 5000},
        {"device": "NVIDIA A100", "pid": 5000},
    ],
)
def test_another_world_day_or_device_is_another_job(tmp_path, other):
    world = other.pop("world", 4)
    record(tmp_path / "a", 0, 4)
    record(tmp_path / "a", 1, 4)
    record(tmp_path / "b", 2, world, **other)
    record(tmp_path / "b", 3, world, **other)
    message = runs_of(tmp_path)
    assert "a (ranks 0, 1" in message and "b (ranks 2, 3" in message


def test_one_process_that_goes_on_is_one_run_days_later_too(tmp_path):
    for number in range(3):
        for rank in (0, 1):
            where = tmp_path / f"iteration_{number}"
            record(where, rank, base=BASE + number * DAY, step=10 + number, name=f"rank{rank}_trace.json", host_name="a")
    job = load(tmp_path)
    assert (len(job.windows), len(job.matches), job.runs) == (6, 3, [])


def test_windows_of_unknown_processes_are_one_run_where_the_steps_go_on(tmp_path):
    for number in range(2):
        record(tmp_path / str(number), 0, 1, base=BASE + number * 10**10, step=10 + number)
    assert len(load(tmp_path).windows) == 2


def test_files_that_claim_one_rank_at_one_time_are_a_mistake_about_ranks_not_runs(tmp_path):
    for place, rank in enumerate((0, 0)):
        record(tmp_path, rank, 4, pid=4000 + 7 * place, name=f"local{place}.json")
    job = load(tmp_path)
    assert len(job.windows) == 1
    assert any("same rank 0" in problem for entry in job.coverage for problem in entry.problems)


def test_a_run_is_not_chosen_where_there_is_one(tmp_path):
    record(tmp_path, 0, 1)
    with pytest.raises(UsageError, match="leave --run out"):
        load(tmp_path, run="a")


def test_a_step_range_beyond_the_trace_is_said(tmp_path):
    record(tmp_path, 0, 1)
    assert [found.code for found in load(tmp_path, steps=(5, 90)).notes if found.code == "steps_beyond"] == ["steps_beyond"]
    assert not [found for found in load(tmp_path, steps=(10, 11)).notes if found.code == "steps_beyond"]


def test_steps_that_one_process_records_again_are_other_steps(tmp_path):
    for number in range(2):
        for rank in (0, 1):
            record(tmp_path / str(number), rank, base=BASE + number * 10**10, name=f"rank{rank}_{number}.json", host_name="a")
    job = load(tmp_path)
    assert (job.steps, sorted(set(job.operations["step_number"])), len(job.matches)) == ([10, 11], [10, 11], 2)
