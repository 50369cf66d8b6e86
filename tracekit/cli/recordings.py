"""Recordings as the commands that compare are given them: traces, a saved ``--json`` file, or a baseline; one path, one recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracekit.errors import InputError

if TYPE_CHECKING:
    from tracekit.compare.figures import Run
    from tracekit.job.load import LoadOptions

#: Analyses whose figures are compared.
COMPARED = ("breakdown", "overlap", "step_classes", "memory", "pipeline", "comparison")
_HEAD = 4096
LARGEST_DOCUMENT = 2 << 30


def read_side(paths: Sequence[str], options: LoadOptions, quiet: bool) -> list[Run]:
    """The recordings of one side; a baseline brings all of its own. Raises TracekitError."""
    runs = [run for path in paths for run in _read(path, options, quiet)]
    for run in runs:
        if not run.quantities:
            raise InputError(f"{run.name}: nothing was measured", "record whole steps; tracekit analyze says what is missing")
    return runs


def _read(path: str, options: LoadOptions, quiet: bool) -> list[Run]:
    from tracekit.checks.baseline import is_baseline, read_baseline

    head = _head(path)
    if is_baseline(head):
        return read_baseline(path).runs
    if b'"tracekit_version"' in head:
        return [_of_saved(path)]
    return [_of_traces(path, options, quiet)]


def _head(path: str) -> bytes:
    """The first bytes of a plain file; nothing of what is none."""
    file = Path(path)
    if not file.is_file():
        return b""
    with file.open("rb") as stream:
        return stream.read(_HEAD)


def _of_saved(path: str) -> Run:
    """The figures of a file that ``analyze --json`` wrote."""
    import msgspec

    from tracekit.report.document import SCHEMA_VERSION

    remedy = "write it anew with: tracekit analyze TRACES --json FILE"
    try:
        if Path(path).stat().st_size > LARGEST_DOCUMENT:
            raise InputError(f"{path} is too large for the JSON of tracekit analyze", remedy)
        document = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {str(error)[:200]}", remedy) from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise InputError(f"{path} has schema version {str(version)[:20]}, this tracekit reads {SCHEMA_VERSION}", remedy)
    return _figures(document, path, remedy)


def _figures(document: Mapping[str, Any], name: str, remedy: str) -> Run:
    from tracekit.compare.figures import of_document

    try:
        return of_document(document, name)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        problem = f"{name} is not what tracekit analyze --json writes ({type(error).__name__}: {str(error)[:100]})"
        raise InputError(problem, remedy) from error


def _of_traces(path: str, options: LoadOptions, quiet: bool) -> Run:
    from tracekit import analyses
    from tracekit.cli.progress import reading
    from tracekit.compare.figures import of_document
    from tracekit.job.load import load_job
    from tracekit.report.document import document

    reducers = {name: reduce for name, reduce in analyses.reducers().items() if name in COMPARED}
    with reading(quiet) as progress:
        job = load_job([path], options, reducers, progress)
    return of_document(document(job, analyses.run(job, only=COMPARED)), path)
