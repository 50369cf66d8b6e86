"""Hold recordings against a baseline: what passed, what fell and why, what could not be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tracekit.checks.thresholds import SMALLEST_SHARE_OF_STEP, VARYING_LIMIT, Threshold, threshold_for
from tracekit.compare.align import Side
from tracekit.compare.causes import Cause, causes
from tracekit.compare.changes import Change, Comparison, compare
from tracekit.compare.words import headline, phrase, sizes

Status = Literal["passed", "fell", "not_measured"]
PASSED, FELL, NOTHING_COMPARED = 0, 1, 2
#: 1.05 / 1 - 1 is more than 0.05 in floating point.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Row:
    """One gated quantity. ``cause`` is the phrase of what made it fall; '' where it did not, or is the cause itself."""

    change: Change
    status: Status
    limit: float
    cause: str = ""


@dataclass(frozen=True)
class Checked:
    """All rows: those that fell first. ``problem`` is why the exit code is 2; '' otherwise."""

    comparison: Comparison
    causes: list[Cause]
    rows: list[Row]
    problem: str

    @property
    def exit_code(self) -> int:
        """0 passed, 1 something fell, 2 nothing could be compared or not all that was asked for."""
        if self.problem:
            return NOTHING_COMPARED
        return FELL if any(row.status == "fell" for row in self.rows) else PASSED

    def of(self, status: Status) -> list[Row]:
        """The rows of one status."""
        return [row for row in self.rows if row.status == status]

    def json(self) -> dict[str, Any]:
        """What ``check --json`` writes, and what its other outputs are made from."""
        return {
            "outcome": ("passed", "fell", "not_compared")[self.exit_code],
            "exit_code": self.exit_code,
            "headline": headline(self.comparison, self.causes),
            "problem": self.problem or None,
            "notes": self.comparison.alignment.notes,
            "causes": [phrase(cause) for cause in self.causes if _fell(cause, self.rows)],
            "quantities": [_row(row) for row in self.rows],
        }


def check(base: Side, new: Side, thresholds: Sequence[Threshold] = ()) -> Checked:
    """Compare NEW with BASE and judge every quantity that a threshold or the defaults gate."""
    comparison = compare(base, new)
    found = causes(comparison.changes)
    said = {change.key: phrase(cause) for cause in found for change in cause.consequences}
    rows = []
    for change in comparison.changes:
        threshold = threshold_for(change.key, change.rule, list(thresholds))
        if threshold.limit is not None and (row := _judged(change, threshold, comparison, said)) is not None:
            rows.append(row)
    order = ("fell", "not_measured", "passed")
    rows.sort(key=lambda row: (order.index(row.status), bool(row.cause)))
    return Checked(comparison, found, rows, _problem(rows))


def _judged(change: Change, threshold: Threshold, comparison: Comparison, said: dict[str, str]) -> Row | None:
    limit = threshold.limit or 0.0
    if change.outcome == "not_measured":
        # What the base has not either was never asked for.
        return None if change.base is None else Row(change, "not_measured", limit)
    wrong = change.outcome == "worse" or (threshold.direction == "both" and change.moved)
    if not wrong or not _beyond(change, limit, comparison.step_us):
        return Row(change, "passed", limit)
    return Row(change, "fell", limit, said.get(change.key, ""))


def _beyond(change: Change, limit: float, step_us: float | None) -> bool:
    if change.rule == "exact" or change.unit in ("calls", "bytes", "ranks", "files"):
        allowed = max(limit, VARYING_LIMIT) if change.noise is None else limit
        return change.relative is None or abs(change.relative) > allowed + ROUNDING or (limit == 0 and change.outcome == "changed")
    if change.unit == "us" and step_us and abs(change.difference) < SMALLEST_SHARE_OF_STEP * step_us:
        return False
    return change.relative is None or abs(change.relative) > limit + ROUNDING


def _problem(rows: Sequence[Row]) -> str:
    missing = [row for row in rows if row.status == "not_measured"]
    if missing:
        keys = ", ".join(row.change.key for row in missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        return f"the baseline asks for {keys}, which the run did not measure ({missing[0].change.why})"
    compared = [row for row in rows if not row.change.key.startswith("coverage.")]
    return "" if compared else "nothing could be compared: the baseline and the run share no gated quantity"


def _fell(cause: Cause, rows: Sequence[Row]) -> bool:
    keys = {change.key for change in (cause.root, *cause.consequences)}
    return any(row.status == "fell" and row.change.key in keys for row in rows)


def _row(row: Row) -> dict[str, Any]:
    change = row.change
    return {
        "quantity": change.key,
        "label": change.label,
        "status": row.status,
        "unit": change.unit,
        "base": change.base,
        "new": change.new,
        "relative": change.relative,
        "limit": row.limit,
        "noise": change.noise,
        "p": change.p,
        "ranks": list(change.ranks),
        "text": sizes(change),
        "cause": row.cause or None,
        "why": change.why or None,
    }
