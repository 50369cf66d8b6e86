"""Waits until a program imports torch's optimizers (scalers, DeepSpeed's engine), and attaches the recorder then. No torch in here.

Every Python process of the command comes through here: launchers, workers of data loaders, and the ranks. Only a process in which an
optimizer steps is ever recorded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Module -> function of ``tracekit.recorder.attach`` that is called, with the module, when a program has imported it.
_AWAITED = {
    "torch.optim.optimizer": "optimizers_are_there",
    "torch.amp.grad_scaler": "scaler_is_there",
    "deepspeed.runtime.engine": "deepspeed_is_there",
}


def install() -> None:
    """Wait. SIGUSR2 asks for a recording where nobody else has a use for it."""
    sys.meta_path.insert(0, _Finder())
    with contextlib.suppress(ValueError, OSError):
        if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR2, _asked)


def _asked(number: int, frame: Any) -> None:  # noqa: ARG001
    """By a signal: leave the request where all ranks look for it."""
    with contextlib.suppress(OSError):
        os.close(os.open(os.path.join(os.environ["TRACEKIT_RECORD"], "record"), os.O_CREAT | os.O_WRONLY, 0o666))  # noqa: PTH118


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find, and comes back when the module is complete."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of an awaited module, with a loader that tells when it has loaded; None for every other."""
        if name not in _AWAITED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, lambda module: _attach(_AWAITED[name], module))
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads as the original does, puts it back, and calls ``then``."""

    def __init__(self, original: Any, then: Callable[[ModuleType], None]) -> None:
        self._original = original
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the original."""
        return self._original.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """As the original, and then what was waited for."""
        module.__loader__ = self._original
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        self._original.exec_module(module)
        self._then(module)


def _attach(function: str, module: ModuleType) -> None:
    try:
        getattr(importlib.import_module("tracekit.recorder.attach"), function)(module)
    except Exception as error:  # noqa: BLE001 - the program goes on whatever happens here
        _tell_once(f"tracekit does not record: {type(error).__name__}: {error}")


@functools.cache
def _tell_once(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
