"""What a numeric experiment hands on: pictures of what every rank holds, messages, tables, and checks of counted against expected figures.

An experiment computes on virtual ranks and fills one ``Experiment``. Printing, JSON and HTML are made from it elsewhere and know nothing of
the single experiments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tracekit.findings import Table

#: What a cell can hold, in the order of the legend. One name per thing (docs/glossary.md).
CELL_KINDS = (
    "parameter",
    "gathered_parameter",
    "gradient",
    "optimizer_state",
    "activation",
    "input",
    "chunk",
    "partial_sum",
    "buffer",
    "padding",
)

Number = int | float | Fraction


@dataclass(frozen=True)
class Cell:
    """One piece of data on one rank. ``label`` is shown (``W1[0:2]``, ``c0 = r0+r1``), ``kind`` is one of CELL_KINDS and gives the colour.

    ``detail`` is shown on hover or below: values, an interval of elements, an offset.
    """

    label: str
    kind: str
    bytes: int
    detail: str = ""


@dataclass(frozen=True)
class Message:
    """One transfer between two ranks in one logical step. ``label`` says what travels, ``bytes`` how much."""

    source: int
    target: int
    label: str
    bytes: int


@dataclass(frozen=True)
class Moment:
    """What every rank holds at one moment, and the messages that led to it.

    ``holds[r]`` are the cells of rank ``r`` (all ranks of the experiment, in order); ``messages`` were under way in the step that ends
    here, ``logical_step`` counts the steps in which something was sent (None where nothing is: a purely local moment).
    """

    title: str
    text: str
    holds: Sequence[Sequence[Cell]]
    messages: Sequence[Message] = ()
    logical_step: int | None = None

    def live_bytes(self, rank: int) -> int:
        """Bytes that ``rank`` holds at this moment."""
        return sum(cell.bytes for cell in self.holds[rank])


@dataclass(frozen=True)
class Bar:
    """One piece of work of a Gantt chart.

    ``start``, ``end`` in the unit of the chart, ``kind`` gives the colour (forward, backward, ...).
    """

    lane: str
    start: float
    end: float
    label: str
    kind: str


@dataclass(frozen=True)
class Gantt:
    """Work over time, one lane a stage or rank."""

    title: str
    lanes: Sequence[str]
    bars: Sequence[Bar]
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Check:
    """A figure that was counted or computed by moving data, beside what it has to be.

    ``tolerance`` 0 asks for equality (counts and bytes are integers or fractions), otherwise ``|counted - expected| <= tolerance``.
    ``formula`` is the closed form in words and symbols, with its source where it is published.
    """

    quantity: str
    counted: Number
    expected: Number
    unit: str
    formula: str
    tolerance: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the counted figure is what it has to be; NaN never is."""
        if self.tolerance == 0:
            return self.counted == self.expected
        return bool(abs(float(self.counted) - float(self.expected)) <= self.tolerance)


@dataclass(frozen=True)
class Call:
    """One collective that a rank takes part in, as a recording of the same strategy shows it.

    ``axis`` is the mesh axis of its process group, ``full_bytes`` the full tensor (``tracekit.collectives.semantics``), ``purpose`` one of
    ``tracekit.vocabulary.PURPOSES``, ``phase`` forward, backward or optimizer.
    """

    kind: str
    axis: str
    purpose: str
    full_bytes: int
    phase: str
    label: str = ""


@dataclass(frozen=True)
class Experiment:
    """One finished experiment.

    ``arguments`` are the values it ran with, printed and stored; ``verdict`` is one sentence with the main figure; ``moments`` the step by
    step picture (empty where there is none); ``calls`` the collectives of one rank and step in order, for strategies that have recordings.
    """

    name: str
    title: str
    about: str
    arguments: Sequence[tuple[str, object]]
    verdict: str
    tables: Sequence[Table] = ()
    moments: Sequence[Moment] = ()
    charts: Sequence[Gantt] = ()
    checks: Sequence[Check] = ()
    calls: Sequence[Call] = ()
    notes: Sequence[str] = ()

    @property
    def holds(self) -> bool:
        """Whether every check holds."""
        return all(check.holds for check in self.checks)
