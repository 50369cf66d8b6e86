"""One file an analysis: ``analyze(job)`` and, where raw events are needed, ``reduce(activity)``.

The list of analyses is the list of modules in this package: adding a file adds an analysis to the command, the JSON and the report.
A module whose name starts with ``_`` is a helper. ``ORDER`` of a module gives its place in the report.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from tracekit.errors import UsageError
from tracekit.findings import Held, Result
from tracekit.job.activity import Activity
from tracekit.job.model import Job


def modules() -> dict[str, ModuleType]:
    """Every analysis by name, in reading order; modules without ``ORDER`` come last."""
    names = [info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")]
    found = {name: importlib.import_module(f"{__name__}.{name}") for name in names}
    return dict(sorted(found.items(), key=lambda item: (getattr(item[1], "ORDER", 1000), item[0])))


def reducers() -> dict[str, Callable[[Activity], Any]]:
    """The per-rank part of each analysis that has one; it runs where the file is read."""
    return {name: module.reduce for name, module in modules().items() if hasattr(module, "reduce")}


def run(job: Job, only: Collection[str] | None = None) -> dict[str, Result]:
    """Results of all analyses (or of those in ``only``), in reading order. Raises UsageError for a name that is none."""
    found = modules()
    unknown = sorted(set(only or ()) - set(found))
    if unknown:
        raise UsageError(f"there is no analysis called {unknown[0]}", f"there are {', '.join(found)}")
    return {name: Held(module.analyze(job)) for name, module in found.items() if only is None or name in only}
