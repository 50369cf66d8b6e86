"""Python imports a module of this name when it starts; in a command of ``tracekit run`` it finds this one.

It prepares for torch, if TRACEKIT_RECORD says where to record, and then makes room for the ``sitecustomize`` that would have been found.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path


def _prepare() -> None:
    if not os.environ.get("TRACEKIT_RECORD"):
        return
    _mark("begun")
    try:
        waiting = importlib.import_module("tracekit.recorder.startup.waiting")
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] == "tracekit":
            print(f"tracekit is not installed for {sys.executable}: nothing is recorded", file=sys.stderr)
            _mark("told")
        return
    waiting.install()


def _mark(what: str) -> None:
    """As ``tracekit.recorder.marks``, which may not be there."""
    word = os.environ.get("TRACEKIT_RUN")
    if word:
        with contextlib.suppress(OSError):
            Path(os.environ["TRACEKIT_RECORD"], ".tracekit-run", f"{word}.{what}").touch()


def _others() -> None:
    """Import the ``sitecustomize`` that this one stands before."""
    here = str(Path(__file__).resolve().parent)
    path, own = list(sys.path), sys.modules.pop("sitecustomize", None)
    sys.path[:] = [entry for entry in path if not entry or str(Path(entry).resolve()) != here]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own
    finally:
        for entry in sys.path:
            if entry not in path:  # what the other one has added stays
                path.append(entry)
        sys.path[:] = [entry for entry in path if not entry or str(Path(entry).resolve()) != here]


if __name__ == "sitecustomize":
    _prepare()
    _others()
