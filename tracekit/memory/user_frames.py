"""The line of the user's own code that a stack stands for.

A stack of a snapshot runs from the allocator through torch's C++ and CPython's own C functions to Python. What is stepped over: everything
that is no Python source (C, C++, Cython), torch's own Python, the standard library and code that torch generates. A stack without any other
frame is the autograd engine's: it is named by its operator and its node (``bmm (BmmBackward0)``).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tracekit.memory.snapshot import Stacks
from tracekit.trace.events import BoolArray

#: Python source: files, and cells of a notebook or a prompt.
_SOURCE = re.compile(r"\.py$|^<ipython-input|^<stdin>$|^<string>$|^Cell In")
#: Not the user's: torch, the code that its compiler writes, the standard library, frozen modules.
_STEPPED_OVER = re.compile(
    r"(?:^|/)(?:torch|torchgen|triton|torchinductor_[^/]*)/|(?:^|/)[Ll]ib(?:64)?/(?:python3\.\d+t?/)?(?!python3|site-packages|dist-packages)(?:[a-z_0-9]+\.py$|"
    r"(?:asyncio|collections|concurrent|ctypes|email|encodings|importlib|json|logging|multiprocessing|unittest|xml)/)"
)
_OPERATOR = re.compile(r"^at::_ops::(\w+)::(?:call|redispatch)\b")
_NODE = re.compile(r"^torch::autograd::(?:generated::)?(\w+)::apply\b")
_NODE_FUNCTION = re.compile(r"^torch::autograd::(?:generated::)?(\w+Backward\d*)_apply_functional\b")


def is_own(file: str) -> bool:
    """Whether a frame of this file is the user's own code, or that of a library beside torch."""
    return _SOURCE.search(file) is not None and _STEPPED_OVER.search(file) is None


def labels(stacks: Stacks) -> list[str]:
    """What each stack is called: its innermost frame of own code (``model.py:88 forward``), else its operator, else its innermost frame."""
    own = _each(stacks, 0, lambda text: is_own(text.replace("\\", "/")))
    operator = stacks.last(_each(stacks, 2, lambda text: _OPERATOR.match(text) is not None))
    node = stacks.first(_each(stacks, 2, lambda text: _node(text) != ""))
    source = stacks.first(_each(stacks, 0, lambda text: _SOURCE.search(text) is not None))
    innermost = stacks.first(np.ones(len(stacks.frames), np.bool_))
    described = [stacks.describe(frame) for frame in range(len(stacks.frames))]
    found = []
    rows = zip(*(column.tolist() for column in (stacks.first(own), operator, node, source, innermost)), strict=True)
    for mine, called, applied, python, first in rows:
        if mine >= 0:
            found.append(described[mine])
        elif called >= 0 or applied >= 0:
            found.append(_engine(stacks, called, applied))
        else:
            fallback = python if python >= 0 else first
            found.append(described[fallback] if fallback >= 0 else "")
    return found


def _engine(stacks: Stacks, operator: int, node: int) -> str:
    match = _OPERATOR.match(stacks.function(operator))
    called, applied = match[1] if match else "", _node(stacks.function(node))
    return f"{called} ({applied})" if called and applied else called or applied


def _node(function: str) -> str:
    match = _NODE.match(function) or _NODE_FUNCTION.match(function)
    return match[1] if match else ""


def _each(stacks: Stacks, column: int, wanted: Callable[[str], bool]) -> BoolArray:
    """Which frames have a wanted text in a column of ``frames``, asked once a distinct text."""
    codes, inverse = np.unique(stacks.frames[:, column], return_inverse=True)
    answers = np.array([wanted(stacks.strings[code]) for code in codes.tolist()], np.bool_)
    return np.asarray(answers[inverse] if len(codes) else np.zeros(0, np.bool_), np.bool_)
