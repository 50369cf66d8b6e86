"""How far ``tracekit run`` has come into the processes of its command: empty files in the recording's folder. No torch in here.

Each run has a word of its own (TRACEKIT_RUN), because under srun several record into one folder. ``begun`` is left by every Python that
the start-up hook came into (``startup/sitecustomize.py``, which cannot import this), ``stepped`` by the first step of an optimizer,
``told`` where a process has said itself why nothing is recorded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

#: Below the recording's folder; a folder, so that a run that begins beside another one leaves its marks alone.
MARKS = ".tracekit-run"


def leave(what: str, environment: Mapping[str, str] = os.environ) -> None:
    """Leave a mark; nothing where the folder is not to be had, or no ``tracekit run`` waits for it."""
    folder, word = environment.get("TRACEKIT_RECORD"), environment.get("TRACEKIT_RUN")
    if folder and word:
        with contextlib.suppress(OSError):
            (Path(folder) / MARKS / f"{word}.{what}").touch()


def prepare(folder: Path) -> None:
    """Make room for the marks of a run. Raises OSError."""
    (folder / MARKS).mkdir(exist_ok=True)


def taken(folder: Path, word: str) -> set[str]:
    """The marks of a run, which are gone afterwards."""
    found = set()
    with contextlib.suppress(OSError):
        for path in (folder / MARKS).glob(f"{word}.*"):
            found.add(path.suffix[1:])
            path.unlink(missing_ok=True)
        (folder / MARKS).rmdir()  # the last run takes it away
    return found


def without_hook(words: list[str]) -> str:
    """What in a command keeps the start-up hook out of its Python, as it was written; '' where nothing shows.

    ``python -I`` and ``-E`` (``-Es``, ``-IB``...) ignore PYTHONPATH, ``-S`` imports no start-up module, ``env -i`` and ``sudo`` drop it.
    """
    for at, word in enumerate(words):
        program = Path(word).name
        following = words[at + 1 :]
        if program == "sudo" or (program == "env" and {"-i", "-", "--ignore-environment"}.intersection(following[:3])):
            return program if program == "sudo" else f"env {following[0]}"
        if program.startswith(("python", "pypy")):
            option = next((o for o in _options(following) if set("IES").intersection(o[1:])), "")
            if option:
                return f"{program} {option}"
    return ""


def _options(words: list[str]) -> list[str]:
    """The options of a Python command, up to what it runs."""
    found = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif not word.startswith("-") or word in ("-", "--") or word[1:2] in ("c", "m"):
            break
        elif word in ("-X", "-W"):
            skip = True
        elif not word.startswith("--") and word[1:2] not in ("X", "W"):
            found.append(word)
    return found
