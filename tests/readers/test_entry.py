"""The compiled code on disk: what it is keyed by, and reading without it."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numba

from tracekit import readers
from tracekit.readers import entry


def test_a_change_of_any_compiled_source_is_a_change_of_the_key(monkeypatch):
    folder = Path(readers.__file__).parent
    modules = [import_module(f"tracekit.readers.{path.stem}") for path in folder.glob("*.py") if path.stem not in ("__init__", "entry")]
    compiled = [
        module
        for module in modules
        if any(isinstance(v, numba.core.dispatcher.Dispatcher) and v.py_func.__module__ == module.__name__ for v in vars(module).values())
    ]
    assert len(compiled) >= 5
    # Constants are compiled in: those that come from other modules, too.
    texts = [Path(module.__file__).read_text() for module in compiled]
    sources = {name for text in texts for name in re.findall(r"^from (tracekit\.[\w.]+) import", text, re.M)}
    assert {"tracekit.trace.events", "tracekit.units"} <= sources
    compiled += [import_module(name) for name in sorted(sources)]
    before = entry._digest()
    original = Path.read_bytes
    for module in compiled:
        changed = Path(module.__file__)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda path, changed=changed: original(path) + b"#" * (path == changed))
            assert entry._digest() != before, module.__name__
    assert entry._digest() == before


def test_a_cache_that_cannot_be_read_or_written_costs_time_only(monkeypatch):
    made = entry.entries()
    tried = []

    def make(digest, cache):
        tried.append(cache)
        if cache:
            raise OSError(28, "No space left on device")
        return made

    monkeypatch.setattr(entry, "_entries", make)
    monkeypatch.setattr(entry, "kept", lambda: True)
    again = entry.entries.__wrapped__()
    assert tried == [True, False]
    assert "NUMBA_CACHE_DIR" in again.problem
    assert again[:-1] == made[:-1]


def test_numba_is_not_imported_before_a_trace_is_read():
    code = "import sys, tracekit.readers.kineto; print([m for m in ('numba', 'pandas', 'pyarrow', 'zstandard') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
