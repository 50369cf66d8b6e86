"""Everything the program prints for a set of inputs, as files: run before and after a change, then compare the two folders.

    python benchmarks/behaviour.py before/ sample_traces [more folders]
    python benchmarks/behaviour.py after/ sample_traces [more folders]
    diff -r before after

Each entry of a folder is one input of ``tracekit analyze``: its JSON, terminal text and exit code become files. Every ``simulate`` and
``estimate`` example that the documents and the commands' help name is run as well. What differs from run to run (times of the machine,
paths) does not stand in the output; the program's version is replaced.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SKIPPED = {".py", ".md"}
_NO_INPUT = {"README.md", "LICENSE", "truth.json", "expected.json"}


def inputs(folders: list[Path]) -> Iterator[tuple[str, list[str]]]:
    """(name, arguments) of each input: entries of the folders; an entry that holds an ``inputs`` folder is that."""
    for folder in folders:
        for entry in sorted(folder.iterdir()):
            if entry.suffix in _SKIPPED or entry.name in _NO_INPUT:
                continue
            yield f"{folder.name}-{entry.name}", ["analyze", str(entry), "--no-cache", "--no-report", "--operations", "-q"]


def examples() -> Iterator[tuple[str, list[str]]]:
    """(name, arguments) of every ``simulate`` and ``estimate`` line of the documents, and of each experiment's own example."""
    seen: set[str] = set()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for line in re.findall(r"^\$? *tracekit ((?:simulate|estimate) [^#\n]*)", page.read_text(encoding="utf-8"), re.MULTILINE):
            seen.add(line.strip())
    for name in (
        "collectives",
        "fsdp",
        "zero",
        "tensor-parallel",
        "pipeline",
        "context-parallel",
        "experts",
        "mesh",
        "hybrid",
        "sampler",
        "batch",
        "precision",
    ):
        seen.add(f"simulate {name}")
    for text in sorted(seen):
        yield re.sub(r"[^a-z0-9]+", "_", text.lower())[:100], shlex.split(text)


def run(task: tuple[str, list[str], str]) -> str:
    """Run one command in a process of its own and write what it printed; its name."""
    name, arguments, folder = task
    process = os.fork()
    if process == 0:
        for stream, suffix in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{name}.{suffix}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), stream)
        if "plan.yaml" not in arguments:
            arguments = [*_without_outputs(arguments), "--json", f"{folder}/{name}.json"]
        sys.argv = ["tracekit", *arguments]
        from tracekit.cli.main import main

        main()
    _, status = os.waitpid(process, 0)
    Path(f"{folder}/{name}.exit.txt").write_text(f"{os.waitstatus_to_exitcode(status)}\n", encoding="utf-8")
    _normalise(Path(folder), name)
    return name


def _without_outputs(arguments: list[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument not in ("-o", "--output", "--json"):
            kept.append(argument)
        skip = not skip and argument in ("-o", "--output", "--json")
    return kept


def _normalise(folder: Path, name: str) -> None:
    written = folder / f"{name}.json"
    if written.exists():
        document = json.loads(written.read_text(encoding="utf-8"))
        document.pop("tracekit_version", None)
        written.write_text(json.dumps(document, indent=1, ensure_ascii=False), encoding="utf-8")
    for suffix in ("out", "err"):
        path = folder / f"{name}.{suffix}.txt"
        path.write_text(path.read_text(encoding="utf-8", errors="replace").replace(str(folder), "OUT"), encoding="utf-8")


def main() -> None:
    """Run all of it on two processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("folders", nargs="*", type=lambda text: Path(text).resolve())
    parser.add_argument("--only", default="", help="run only what has this in its name")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    out = str(options.output.resolve())
    tasks = [(name, arguments, out) for name, arguments in (*inputs(options.folders), *examples()) if options.only in name]
    os.environ["COLUMNS"] = "120"
    os.chdir(out)

    with multiprocessing.get_context("fork").Pool(2) as pool:
        for name in pool.imap_unordered(run, tasks):
            print(name, flush=True)


if __name__ == "__main__":
    main()
