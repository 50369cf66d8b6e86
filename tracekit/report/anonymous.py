"""Results without what only their owner should see: hosts, paths, and names that a program gave itself.

Names that torch and its libraries give (``aten::mm``, ``ncclDevKernel_...``) stay. Every other name of a kernel, operator, range, unit or
layer becomes ``name-1``, ``name-2``, ... wherever it stands, in sentences too; hosts become ``host-1``, files ``file-1.json``. One name
has one alias in everything that is written together, so that a reader can still tell what is the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pandas as pd

from tracekit.findings import Chart, Finding, Held, Result, Section, Table, Timeline, Treemap
from tracekit.job.model import Job

#: Names that everybody knows. A kernel's own template arguments are cut where they are none of these.
_PUBLIC = re.compile(
    r"^(aten|c10d|c10|torch|autograd|profiler|prims|_c10d_functional)(::|\.)|^(nccl|rccl|gloo|mscclpp)[:A-Z_]|^(cuda|hip|cu|xpu|ze)[A-Z]\w*$|"
    r"^(Memcpy|Memset|ProfilerStep|PP:|FSDP|DistributedDataParallel|Optimizer\.|record_param_comms|DDP|others?$)|"
    r"^(void )?(at::|cub::|cutlass|cublas|cudnn|thrust::|ampere_|volta_|turing_|hopper_|sm\d+_|gemm|pytorch_flash|flash_fwd|flash_bwd)|"
    r"^(annotations?|host phases|forward|backward|optimizer|stream)\b|^full (parameters|gradient)"
)
#: Columns and keys whose text is a name of the program.
_NAMES = {"name", "unit", "layer", "label", "module", "frame", "context", "operator", "peak_unit", "stack"}
#: Columns and keys whose text is tracekit's own.
_OWN_WORDS = {"category", "kind", "purpose", "axis", "status", "severity", "id", "source", "phase", "peak_phase", "dtype", "work"}
#: Units of figures, which some tables keep in a column called unit.
_UNITS = frozenset(["bytes", "us", "ns", "calls", "share", "tokens", "GB/s", "ratio", "%"])
#: A name that is no word of a sentence.
_TELLING = re.compile(r"[^a-zA-Z ]|[a-z][A-Z]|.{16}")
_SHORTEST = 3


class Anonymous:
    """Aliases of one job. ``learn`` what stands in the results, then take their ``result`` and the ``plain`` document."""

    def __init__(self, job: Job) -> None:
        self._aliases: dict[str, str] = {}
        for number, entry in enumerate(job.coverage, 1):
            suffix = "".join(re.findall(r"\.(?:json|gz|zst|pickle|pt)\b", entry.file)[-2:])
            alias = f"file-{number}{suffix}"
            for text in (entry.file, entry.file.replace("\\", "/").rsplit("/", 1)[-1]):
                self._add(text, alias)
            self._add(entry.file.replace("\\", "/").rpartition("/")[0], "folder")
        hosts = dict.fromkeys(window.identity.host for window in job.windows if window.identity.host)
        for number, host in enumerate(hosts, 1):
            self._add(host, f"host-{number}")
        self._pattern: re.Pattern[str] | None = None
        self._names = 0

    def learn(self, results: Mapping[str, Result]) -> None:
        """Give every private name of the results its alias."""
        for result in results.values():
            self._learn_value(result.json(), "")
            for section in result.sections():
                for chart in section.charts:
                    for name in _names_of(chart):
                        self._name(name)

    def result(self, result: Result) -> Held:
        """The same result with aliases."""
        return Held(_Hidden(result, self))

    def text(self, text: str) -> str:
        """A sentence or label with aliases in place of names; a name that is a plain word stays where it is one word among others."""
        if text in self._aliases:
            return self._aliases[text]
        if self._pattern is None:
            known = sorted((name for name in self._aliases if _TELLING.search(name)), key=len, reverse=True)
            self._pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, known)) or '(?!)'})(?!\w)")
        return self._pattern.sub(lambda found: self._aliases[found[0]], text)

    def plain(self, value: Any) -> Any:
        """A document, or a part of one, with aliases. Keys stay: they are the document's own words."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self.plain(item) if key not in _OWN_WORDS else item for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.plain(item) for item in value)
        return value

    def frame(self, frame: pd.DataFrame) -> pd.DataFrame:
        """A table with aliases in its columns of text."""
        texts = [str(name) for name in frame if frame[name].dtype.kind not in "iufbM" and name not in _OWN_WORDS]
        return frame.assign(**{name: self._column(frame[name]) for name in texts})

    def _column(self, column: pd.Series[Any]) -> pd.Series[Any]:
        """A column of texts; of one with categories each is looked at once."""
        if isinstance(column.dtype, pd.CategoricalDtype):
            told = np.array([*(self.plain(text) for text in column.cat.categories), None], dtype=object)
            return pd.Series(told[column.cat.codes.to_numpy()], index=column.index, dtype=object)
        return pd.Series([self.plain(value) for value in column.tolist()], index=column.index, dtype=object)

    def _add(self, text: str, alias: str) -> None:
        if len(text) >= _SHORTEST:
            self._aliases.setdefault(text, alias)

    def _name(self, name: str) -> None:
        if name not in self._aliases and name not in _UNITS and len(name) >= _SHORTEST and not _PUBLIC.search(name) and not name.isdigit():
            self._names += 1
            self._aliases[name] = f"name-{self._names}"
            self._pattern = None

    def _learn_value(self, value: Any, key: str) -> None:
        if isinstance(value, str):
            if key in _NAMES:
                self._name(value)
        elif isinstance(value, Mapping):
            for inner, item in value.items():
                self._learn_value(item, str(inner))
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._learn_value(item, key)


class _Hidden:
    """A result seen through its aliases."""

    def __init__(self, result: Result, aliases: Anonymous) -> None:
        self._result, self._aliases = result, aliases

    def findings(self) -> list[Finding]:
        plain = self._aliases.plain
        return [
            replace(f, text=plain(f.text), evidence=plain(f.evidence), advice=plain(f.advice), consequences=plain(f.consequences))
            for f in self._result.findings()
        ]

    def json(self) -> dict[str, Any]:
        return {key: self._aliases.plain(value) for key, value in self._result.json().items()}

    def sections(self) -> list[Section]:
        return [replace(section, lead=self._aliases.text(section.lead), charts=[self._chart(c) for c in section.charts])
                for section in self._result.sections()]  # fmt: skip

    def _chart(self, chart: Chart) -> Chart:
        hidden = self._aliases
        if isinstance(chart, Table):
            return replace(chart, title=hidden.text(chart.title), note=hidden.text(chart.note), frame=hidden.frame(chart.frame))
        if isinstance(chart, Timeline):
            return replace(chart, title=hidden.text(chart.title), spans=hidden.frame(chart.spans))
        changes = {field.name: hidden.plain(getattr(chart, field.name)) for field in fields(chart)}
        return replace(chart, **changes)


def _names_of(chart: Chart) -> Sequence[str]:
    """Names of the program that a chart shows."""
    if isinstance(chart, Treemap):
        return [str(part) for path in chart.paths for part in path[1:]]
    frame = chart.frame if isinstance(chart, Table) else chart.spans if isinstance(chart, Timeline) else None
    if frame is None:
        return []
    return [str(value) for name in frame if name in _NAMES for value in frame[name].dropna().unique().tolist()]
