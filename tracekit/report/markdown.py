"""The answer as Markdown, for a ticket or a language model: figures with their definitions, findings with their evidence, nothing hidden.

Everything comes from the JSON document. Names of the trace cannot end a table or become markup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tracekit.report import overview
from tracekit.report.glossary import TERMS
from tracekit.report.quantity import quantity
from tracekit.report.text import visible

MOST_ROWS = 20
_MARKUP = re.compile(r"([\\`*_{}\[\]<>|~#])")
_PARTS = (
    ("rank", "rank", ""),
    ("step_us", "step", "us"),
    ("compute_us", "compute", "us"),
    ("exposed_comm_us", "exposed comm", "us"),
    ("hidden_comm_us", "hidden comm", "us"),
    ("memory_copy_us", "exposed copies", "us"),
    ("idle_us", "idle", "us"),
)
_CALLS = (
    ("axis", "axis", ""),
    ("kind", "kind", ""),
    ("purpose", "purpose", ""),
    ("full_bytes", "full size", "bytes"),
    ("count", "count", ""),
    ("p50", "duration p50", "us"),
    ("busbw_gb_s", "busbw", "GB/s"),
)
_MEMORY = (
    ("rank", "rank", ""),
    ("device", "device", ""),
    ("peak_bytes", "peak", "bytes"),
    ("lower_bound", "at least", ""),
    ("reserved_peak_bytes", "reserved, most", "bytes"),
    ("peak_phase", "phase", ""),
    ("source", "owners by", ""),
)


def summary(document: Mapping[str, Any]) -> str:
    """The whole page."""
    lines = [f"# {_plain(overview.answer(document).sentence)}", "", *_first(document), "## The job", ""]
    for fact in overview.facts(document):
        detail = f" ({_plain(fact.detail)})" if fact.detail else ""
        lines.append(f"- {fact.label}: {_plain(fact.value)}{detail}")
    lines += ["", *_findings(document["findings"])]
    lines += _table("Mean step of each rank", [row for row in document.get("mean_step") or [] if row["rank"] is not None], _PARTS)
    calls = [{**row, "p50": (row["duration_us"] or {}).get("p50")} for row in document.get("collectives_by_axis") or []]
    lines += _table("Collectives by axis, the longest total first", calls, _CALLS)
    lines += _table("Memory of every rank and device", document.get("memory") or [], _MEMORY)
    lines += _unknown(document)
    lines += ["## What the words mean", "", *(f"- {term}: {meaning}" for term, meaning in sorted(TERMS.items())), ""]
    lines.append(f"Written by tracekit {document['tracekit_version']}.")
    return "\n".join(lines) + "\n"


def _plain(text: object) -> str:
    """Text that stays text: on one line, with no character that Markdown reads."""
    return _MARKUP.sub(r"\\\1", visible(str(text)))


def _first(document: Mapping[str, Any]) -> list[str]:
    first = overview.first_step(document)
    if first is None:
        return []
    gain = f" (up to {quantity(first.gain_us, 'us')} a step)" if first.gain_us else ""
    return [f"**First:** {_plain(first.text)}{gain} **Next step:** {_plain(first.advice)}", ""]


def _findings(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["## Findings", ""]
    for number, finding in enumerate(findings, 1):
        gain = overview.gain_of(finding)
        wins = f" Up to {quantity(gain, 'us')} a step." if gain else ""
        lines.append(f"{number}. {finding['severity']}: {_plain(finding['text'])}{wins}")
        lines += [f"   - follows: {_plain(text)}" for text in finding.get("consequences") or []]
        more = (("next step", finding["advice"]), ("evidence", finding["evidence"]))
        lines += [f"   - {label}: {_plain(words)}" for label, words in more if words]
    return [*(lines if findings else [*lines, "Nothing stands out."]), ""]


def _table(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str, str]]) -> list[str]:
    if not rows:
        return []
    lines = [f"## {title}", "", "| " + " | ".join(heading for _, heading, _ in columns) + " |", "|" + "-|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(key), unit) for key, _, unit in columns) + " |" for row in rows[:MOST_ROWS]]
    more = [f"{len(rows) - MOST_ROWS} more rows are in the JSON.", ""] if len(rows) > MOST_ROWS else []
    return [*lines, "", *more]


def _cell(value: Any, unit: str) -> str:
    if value is None:
        return "–"
    return quantity(value, unit) if unit else _plain(value)


def _unknown(document: Mapping[str, Any]) -> list[str]:
    """What was not read whole, and what was not measured with the reason."""
    problems = [f"- {_plain(entry['file'])}: {entry['status']}; {_plain('; '.join(entry['problems']))}"
                for entry in document["coverage"] if entry["status"] != "complete" or entry["problems"]]  # fmt: skip
    reasons = [f"- {_plain(key)}: {_plain(reason)}" for key, reason in sorted(document["not_measured"].items())]
    notes = [f"- {_plain(note)}" for note in document["notes"]]
    lines = [*problems, *notes, *reasons]
    return ["## Not known", "", *lines, ""] if lines else []
