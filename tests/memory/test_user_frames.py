"""The line of the user's own code that a stack stands for."""

import numpy as np
import pytest

from tracekit.memory.snapshot import Stacks
from tracekit.memory.user_frames import is_own, labels


def stacks(*found: list[tuple[str, int, str]]) -> Stacks:
    """Stack 0 is the empty one."""
    strings, frames, flat, start = [""], [], [], [0, 0]
    for stack in found:
        for file, line, name in stack:
            strings += [file, name]
            frames.append((len(strings) - 2, line, len(strings) - 1))
            flat.append(len(frames) - 1)
        start.append(len(flat))
    return Stacks(np.array(start, np.int64), np.array(flat, np.int32), np.array(frames, np.int32).reshape(-1, 3), strings)


UNWIND = ("??", 0, "torch::unwind::unwind()")
CALL = ("/src/Objects/methodobject.c", 543, "cfunction_call")
MM = ("??", 0, "at::_ops::mm::call(at::Tensor const&, at::Tensor const&)")


@pytest.mark.parametrize(
    ("stack", "label"),
    [
        ([UNWIND, MM, CALL, ("/x/torch/nn/modules/linear.py", 116, "forward"), ("/job/model.py", 9, "forward")], "model.py:9 forward"),
        ([UNWIND, ("/x/lib/python3.11/contextlib.py", 80, "inner"), ("/job/train.py", 3, "main")], "train.py:3 main"),
        ([("/x/site-packages/numpy/random/mtrand.pyx", 5, "rand"), ("/job/train.py", 3, "main")], "train.py:3 main"),
        ([UNWIND, ("<eval_with_key>.4", 5, "forward"), ("<ipython-input-3-4a>", 1, "<module>")], "<ipython-input-3-4a>:1 <module>"),
        ([("/x/lib/python3.11/site-packages/einops/einops.py", 9, "einsum"), ("/job/m.py", 1, "f")], "einops.py:9 einsum"),
        (
            [UNWIND, MM, ("??", 0, "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)"), ("t.o", 0, "thread")],
            "mm (MmBackward0)",
        ),
        ([UNWIND, ("??", 0, "torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)")], "AccumulateGrad"),
        ([UNWIND, MM, ("??", 0, "at::_ops::linear::call()"), ("main.c", 1, "main")], "linear"),
        ([UNWIND, ("/x/torch/optim/adam.py", 30, "step")], "adam.py:30 step"),
        ([("/tmp/torchinductor_me/ab/cab.py", 8, "call"), ("/job/train.py", 4, "step")], "train.py:4 step"),
        ([("main.c", 1, "main")], "main.c:1 main"),
    ],
)
def test_a_stack_is_called_by_the_innermost_line_of_own_code_or_by_its_operator(stack, label: str) -> None:
    assert labels(stacks(stack)) == ["", label]


def test_a_project_may_lie_in_a_folder_called_lib() -> None:
    assert is_own("/home/me/lib/models/net.py")
    assert not is_own("/usr/lib/python3.12/asyncio/events.py")
    assert not is_own("/opt/conda/lib/python3.12/functools.py")
