"""Every sample recording shows exactly the collectives its workload states, and every byte at its memory peak has an owner."""

from pathlib import Path

import pytest

from tests.workloads.recording import Recording, check, check_matches
from tracekit import analyses
from tracekit.job.load import LoadOptions, load_job

FOLDER = Path(__file__).resolve().parents[1] / "sample_traces"
SAMPLES = sorted(path.parent.name for path in FOLDER.glob("*/rank_00000.manifest.json"))
ALONE = sorted(path.name for path in FOLDER.glob("*_fake_*") if path.is_dir())


def read(name):
    job = load_job([str(FOLDER / name)], LoadOptions(), {"memory": analyses.reducers()["memory"]})
    return Recording(FOLDER / name, job, "")


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_shows_what_its_workload_states(name):
    recording = read(name)
    check(recording)
    check_matches(recording)
    assert recording.job.mesh.source == "manifest"
    _check_memory(recording)


@pytest.mark.parametrize("name", ALONE)
def test_so_does_one_rank_alone(name):
    recording = read(name)
    check(recording)
    _check_memory(recording)


def test_there_is_a_sample_of_every_workload():
    workloads = {path.stem for path in (FOLDER.parent / "workloads").glob("*.py")} - {"__init__"}
    recorded = {manifest.strategy for name in SAMPLES for manifest in read(name).manifests.values()}
    assert workloads == recorded


def test_samples_are_small_and_name_no_machine():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 25_000_000
    for name in SAMPLES:
        assert {manifest.host for manifest in read(name).manifests.values()} == {"sample-host"}


def _check_memory(recording):
    memory = analyses.run(recording.job, ["memory"])["memory"].json()["memory"]
    assert {entry["rank"] for entry in memory} == set(recording.manifests)
    for entry in memory:
        assert sum(entry["categories"].values()) == entry["peak_bytes"]
        assert (entry["categories"]["unattributed"] or 0) < 0.01 * entry["peak_bytes"]
