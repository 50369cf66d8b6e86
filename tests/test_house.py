"""The rules of the house: who may import whom, and what a start of the program costs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh process has loaded after it ran ``code``."""
    report = "import json, sys\nprint(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    return set(json.loads(_python("-c", f"{code}\n{report}").splitlines()[-1]))


def test_import_contracts_hold():
    pytest.importorskip("importlinter")
    out = _python("-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))")
    assert "0 broken" in out


def test_the_analyzer_never_loads_torch():
    every_module = (
        "import importlib, pkgutil, sys, tracekit\n"
        "names = [m.name for m in pkgutil.walk_packages(tracekit.__path__, 'tracekit.') if not m.name.endswith('__main__')]\n"
        "names = [name for name in names if not name.startswith('tracekit.recorder.')]\n"
        "assert len(names) > 20\n"
        "for name in names: importlib.import_module(name)\n"
    )
    loaded = _loaded_after(every_module)
    assert "numpy" in loaded
    assert "torch" not in loaded


def test_help_starts_without_the_heavy_libraries():
    helped = (
        "import os, sys\n"
        "from tracekit.cli.main import main\n"
        "sys.argv = ['tracekit', '--help']\n"
        "os._exit = sys.exit  # the command ends its process at once; here the process has to tell what it loaded\n"
        "try: main()\n"
        "except SystemExit as done: assert done.code == 0\n"
        "else: raise AssertionError('help did not exit')"
    )
    loaded = _loaded_after(helped)
    assert "click" in loaded
    assert not loaded & {"numpy", "pandas", "pyarrow", "numba", "plotly", "jinja2", "fsspec", "isal"}
