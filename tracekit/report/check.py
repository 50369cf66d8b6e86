"""The outcome of ``tracekit check`` for machines and pull requests: JUnit XML, Markdown, annotations of GitHub Actions.

All three are made from the check's JSON (docs/json.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from tracekit.report.text import visible

#: Rows of the Markdown table that passed; those that fell are all there.
MOST_PASSED = 20


def junit(document: Mapping[str, Any]) -> bytes:
    """One test case a gated quantity: fell is a failure, not measured an error."""
    rows = document["quantities"]
    counts = {status: sum(row["status"] == status for row in rows) for status in ("fell", "not_measured")}
    suite = ElementTree.Element(
        "testsuite", name="tracekit check", tests=str(len(rows)), failures=str(counts["fell"]), errors=str(counts["not_measured"])
    )
    for row in rows:
        group, _, name = row["quantity"].partition(".")
        case = ElementTree.SubElement(suite, "testcase", classname=f"tracekit.{visible(group)}", name=visible(name or group))
        if row["status"] == "passed":
            continue
        wrong = ElementTree.SubElement(case, "failure" if row["status"] == "fell" else "error", message=visible(_line(row)))
        wrong.text = visible(row["cause"] or row["why"] or row["text"])
    if document["problem"]:
        ElementTree.SubElement(suite, "system-err").text = visible(document["problem"])
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    data: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return data + b"\n"


def markdown(document: Mapping[str, Any]) -> str:
    """A comment for a pull request: the answer, the causes, a table of what fell, what passed folded away."""
    rows = document["quantities"]
    title = {"passed": "passed", "fell": "found a regression", "not_compared": "could not compare"}[document["outcome"]]
    lines = [f"### tracekit check {title}", "", _escaped(document["headline"]), ""]
    lines += [f"> {_escaped(document['problem'])}", ""] if document["problem"] else []
    lines += [f"- {_escaped(text)}" for text in document["causes"]]
    lines += [f"- note: {_escaped(text)}" for text in document["notes"]]
    wrong = [row for row in rows if row["status"] != "passed"]
    if wrong:
        lines += ["", *_table(wrong)]
    passed = [row for row in rows if row["status"] == "passed"]
    if passed:
        shown = _table(passed[:MOST_PASSED])
        more = ["", f"and {len(passed) - MOST_PASSED} more"] if len(passed) > MOST_PASSED else []
        lines += ["", f"<details><summary>{len(passed)} passed</summary>", "", *shown, *more, "", "</details>"]
    return "\n".join(lines) + "\n"


def _table(rows: list[Mapping[str, Any]]) -> list[str]:
    head = ["| quantity | base → new | limit | outcome | because |", "|-|-|-|-|-|"]
    cells = [
        (
            f"`{_code(row['quantity'])}`",
            row["text"],
            limit_text(row["limit"]),
            row["status"].replace("_", " "),
            row["cause"] or row["why"] or "",
        )
        for row in rows
    ]
    return head + ["| " + " | ".join([first, *(_escaped(cell) for cell in rest)]) + " |" for first, *rest in cells]


def limit_text(limit: float) -> str:
    """``exact``, ``5%``."""
    return f"{limit * 100:.3g}%" if limit else "exact"


def workflow_commands(document: Mapping[str, Any]) -> list[str]:
    """Workflow commands of GitHub Actions: an error for each cause of a fall, and for what could not be compared."""
    said = [f"::error title=tracekit check::{_command(text)}" for text in document["causes"]]
    if not said:
        fallen = [row for row in document["quantities"] if row["status"] == "fell"]
        said = [f"::error title=tracekit check::{_command(_line(row))}" for row in fallen]
    if document["problem"]:
        said.append(f"::error title=tracekit check::{_command(document['problem'])}")
    return said or [f"::notice title=tracekit check::{_command(document['headline'])}"]


def _line(row: Mapping[str, Any]) -> str:
    return f"{row['label']}: {row['text']}, limit {limit_text(row['limit'])}"


def _command(text: str) -> str:
    """Text that cannot start another workflow command."""
    return visible(text).replace("%", "%25").replace("::", ": :")


#: Characters that Markdown reads: those of HTML and of mentions by their number, the others behind a backslash.
_MARKDOWN = {ord(c): f"&#{ord(c)};" for c in "<>&|@"} | {ord(c): f"\\{c}" for c in "\\`*_[]#~$!"}


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is written."""
    return visible(text).translate(_MARKDOWN)


def _code(text: str) -> str:
    return visible(text).replace("`", "'").replace("|", "¦")
