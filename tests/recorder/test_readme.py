"""The programs of the README run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
AROUND = """
import torch
torch.distributed.init_process_group("gloo", init_method="file://" + {store!r}, rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
loader = [torch.randn(2, 4) for _ in range(20)]
del torch

def train_step(batch):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

"""


@pytest.mark.parametrize("block", BLOCKS)
def test_it_leaves_a_trace_in_a_folder_that_was_not_there(block, tmp_path):
    program = AROUND.format(store=str(tmp_path / "store")) + block
    command = [sys.executable, "-W", "error::UserWarning:__main__", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "traces").rglob("*.json.gz"))
