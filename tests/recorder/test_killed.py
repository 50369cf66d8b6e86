"""A job that is killed while it records loses at most the file that is being written.

One process imports torch and is forked for each kill, so that many kills are cheap. Thirty of them:
`python -m pytest -m frameworks tests/recorder/test_killed.py`; without the marker four.
"""

import gzip
import json
import random
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from tracekit.job.load import LoadOptions, load_job
from tracekit.manifest import decode

#: For each moment (a share of the time that two recordings take, behind the first) prints how many the killed process had finished.
RECORDING = """
import os, signal, sys, time, torch, warnings
from tracekit import record
warnings.simplefilter("ignore")
torch.set_num_threads(1)

def job(folder, told, count):
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20)))
    optimizer = torch.optim.Adam(net.parameters())
    for number in range(count):
        with record(f"{folder}/{number}", model=net, optimizer=optimizer, wait=0, active=2) as recorder:
            for step in range(3):
                net(torch.randn(8, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step()
        assert len(recorder.files) == 2
        os.write(told, b"d")

def forked(folder, count):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            job(folder, write, count)
        finally:
            os._exit(0)
    os.close(write)
    return child, read

folder, *moments = sys.argv[1:]
child, read = forked(f"{folder}/whole", 3)
assert os.read(read, 1) == b"d"
start = time.monotonic()
os.waitpid(child, 0)
two = time.monotonic() - start
for attempt, moment in enumerate(moments):
    child, read = forked(f"{folder}/{attempt}", 50)
    assert os.read(read, 1) == b"d"
    time.sleep(float(moment) * two)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    finished = b"d" + b"".join(iter(lambda: os.read(read, 100), b""))
    print(len(finished))
    os.close(read)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(30, marks=pytest.mark.frameworks)])
def test_what_a_killed_job_had_finished_is_whole(kills, tmp_path):
    chance = random.Random(kills)
    moments = [f"{chance.random():.4f}" for _ in range(kills)]
    done = subprocess.run([sys.executable, "-c", RECORDING, str(tmp_path), *moments], capture_output=True, text=True, check=True)
    finished = [int(line) for line in done.stdout.split()]
    assert len(finished) == kills
    begun = [names(folder) for attempt in range(kills) for folder in (tmp_path / str(attempt)).iterdir()]
    assert sum(len(found) < 2 for found in begun) <= kills  # of the one that it died in, the file in work is lost, if any
    for attempt, number in enumerate(finished):
        for whole in range(number):
            assert names(tmp_path / str(attempt) / str(whole)) == ["rank_00000.manifest.json", "rank_00000.pt.trace.json.gz"]
        for path in (tmp_path / str(attempt)).rglob("rank_*"):
            data = path.read_bytes()
            if path.suffix == ".gz":
                assert json.loads(gzip.decompress(data))["traceEvents"]
            else:
                assert decode(data, path.name).steps == [1, 2]
    last = tmp_path / "0" / str(finished[0] - 1)
    assert load_job([str(last)], LoadOptions()).steps == [1, 2]


def names(folder):
    """Of the files that a reader sees; what was being written has a hidden name."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
