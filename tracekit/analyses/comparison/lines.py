"""A line of the comparison: predicted beside measured, a verdict, and where they differ the likely cause."""

from __future__ import annotations

from dataclasses import dataclass

MATCH, DIFFERS, NOT_MEASURED = "match", "differs", "not_measured"

#: Largest |ratio - 1| that still counts as a match, by what is compared; where none is given, both have to be equal.
PEAK_TIGHT, PEAK_WIDE, BYTES, SHARE, TIME = 0.02, 0.05, 0.05, 0.10, 0.25
#: Losses and other single numbers [bytes]: where a tolerance is given, this much more or less is a match whatever the ratio.
SCALARS = 64
UNSIZED = "the trace does not tell the sizes of all calls"
#: Why exchanges between experts differ where the manifest does not list what the router did.
UNEVEN = "unevenness: the router sends more tokens to some experts than to others, and the model takes them to be balanced"


@dataclass(frozen=True)
class Line:
    """One figure. ``rank`` None: of the whole job. None for what was not predicted or not measured; ``why``: the reason or the cause."""

    quantity: str
    rank: int | None
    predicted: float | None
    measured: float | None
    unit: str
    verdict: str
    why: str = ""
    tolerance: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where one is missing, or nothing was predicted."""
        if self.predicted is None or self.measured is None:
            return None
        if self.predicted == 0:
            return 1.0 if self.measured == 0 else None
        return self.measured / self.predicted


def line(
    quantity: str, rank: int | None, predicted: float | None, measured: float | None, unit: str, why: str = "", tolerance: float = 0.0
) -> Line:
    """A line with its verdict; ``why`` is kept for what differs or is missing."""
    if predicted is None or measured is None:
        return Line(quantity, rank, predicted, measured, unit, NOT_MEASURED, why or "not measured", tolerance)
    slack = max(tolerance * abs(predicted), SCALARS if unit == "bytes" else 0) if tolerance else 0
    equal = abs(measured - predicted) <= slack
    return Line(quantity, rank, predicted, measured, unit, MATCH if equal else DIFFERS, "" if equal else why, tolerance)
