"""The analytical model beside the job: predicted and measured, line by line, with a verdict and a reason.

Of a job with the recorder's manifest: memory of every rank, calls and bytes of every class of collectives a step, the pipeline's bubble,
the cost of each axis' link. Of a job without one, what the trace itself implies: an FSDP group that scatters U times a step gathers 2U-1
times (U without resharding), in the bytes of its reductions.

Verdicts: match (equal, or within the stated tolerance), differs (with the likely cause), not_measured (with the reason).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tracekit.analyses.collectives.links import Link, links
from tracekit.analyses.comparison import implied as implied
from tracekit.analyses.comparison.lines import DIFFERS, MATCH, NOT_MEASURED, Line
from tracekit.analyses.comparison.tables import LINES, LINKS, lines_frame, lines_table, links_frame, links_table
from tracekit.estimate.hardware import Hardware, hardware_of
from tracekit.findings import Finding, Section, Severity, StackedArea, Subject
from tracekit.job.model import Job
from tracekit.units import format_bytes, format_rate

ORDER = 80

_NO_LINKS = "no collective of known size was seen on all ranks of its group"
_NO_MODEL = "the traces come without the recorder's manifests, and show no strategy whose traffic implies itself"


@dataclass(frozen=True)
class Comparison:
    """``lines`` in order of rank and quantity; ``links`` one an axis; ``problems``: why ranks were not predicted; ``step``: its memory.

    ``modelled``: a manifest says what was run, so that the model predicts; without one the lines hold the traffic against itself.
    """

    lines: list[Line]
    links: list[Link]
    hardware: Hardware | None = None
    problems: list[str] = field(default_factory=list)
    step: StackedArea | None = None
    modelled: bool = True

    def findings(self) -> list[Finding]:
        """How far the job is what the model says, and what differs most."""
        said = [*_agreement(self.lines), *_differences(self.lines)] if self.modelled else _with_itself(self.lines)
        return [*said, *_peaks(self.lines), *_slow_links(self.links, self.hardware)]

    def sections(self) -> list[Section]:
        """Memory over one step, the comparison as a table, and the links."""
        table = lines_table(self.lines, self.modelled)
        charts = [t for t in (self.step, table, links_table(self.links, self.hardware)) if t is not None]
        title, lead = "Predicted and measured", "What the analytical model says of this job, beside what it did."
        if not self.modelled:
            title = "Traffic beside itself" if self.lines else "Links"
            lead = "Nothing tells what was run (no manifest), so nothing is predicted: what one part of the traffic implies of another."
            lead = lead if self.lines else "What a message costs on each axis, by the job's own collectives."
        return [Section(title, lead, tuple(charts), name="model")] if charts else []

    def json(self) -> dict[str, Any]:
        """``comparison`` and ``links``."""
        document: dict[str, Any] = {"links": LINKS.records(links_frame(self.links, self.hardware))}
        reasons = {} if self.links else {"links": _NO_LINKS}
        if self.lines:
            document["comparison"] = LINES.records(lines_frame(self.lines))
        else:
            reasons["comparison"] = self.problems[0] if self.problems else _NO_MODEL
        return {**document, "not_measured": reasons} if reasons else document


def analyze(job: Job) -> Comparison:
    """Predict what can be predicted, and set it beside what was measured."""
    axes, hardware = links(job), hardware_of(job.device)
    manifests = {w.rank: w.manifest for w in job.windows if w.rank is not None and w.manifest is not None}
    if not manifests:
        return Comparison(implied.lines(job), axes, hardware, modelled=False)
    from tracekit.analyses.comparison.model import modelled  # the model is a fifth of the program: loaded where it has something to say

    lines, problems, step = modelled(job, manifests, axes, hardware)
    return Comparison(lines, axes, hardware, problems, step)


# What is said --------------------------------------------------------------------------------------------------------


def _agreement(lines: Sequence[Line]) -> list[Finding]:
    judged = [each for each in lines if each.verdict != NOT_MEASURED and not each.quantity.endswith(".time")]
    if not judged:
        return []
    equal = sum(each.verdict == MATCH for each in judged)
    text = f"{equal} of {len(judged)} predicted figures of memory and traffic are what was measured."
    advice = "" if equal == len(judged) else "The table Predicted and measured says what differs, and why."
    shown = _row(next((each for each in judged if each.verdict != MATCH), judged[0]))
    return [Finding("comparison.agreement", "info", text, equal / len(judged), "share", "comparison", advice, row=shown)]


def _row(line: Line) -> dict[str, int | str]:
    """The row of a figure in its table."""
    return {"Quantity": line.quantity} | ({} if line.rank is None else {"Rank": line.rank})


def _with_itself(lines: Sequence[Line]) -> list[Finding]:
    """Whether the traffic is what other parts of it imply: nothing of it is a prediction."""
    judged = [each for each in lines if each.verdict != NOT_MEASURED]
    odd = [each for each in judged if each.verdict == DIFFERS]
    if not judged:
        return []
    share = 1 - len(odd) / len(judged)
    if not odd:
        text = "Gradient traffic is regular: calls and bytes are the same on every rank and step that was read"
        text += ", and gathers fit reductions." if any("parameter_gather" in each.quantity for each in judged) else "."
        return [Finding("comparison.agreement", "info", text, share, "share", "Traffic beside itself")]
    first = odd[0]
    _, axis, kind, purpose, _figure = first.quantity.split(".", 4)
    text = f"Traffic is not what the rest of it implies: {kind} along {axis} ({purpose}) has {first.measured:,.0f} {first.unit}, not "
    text += f"{first.predicted:,.0f}: {first.why}."
    if first.quantity.endswith("bytes_a_call"):
        moved, reduced = format_bytes(first.measured or 0), format_bytes(first.predicted or 0)
        text = f"Along {axis} a gather moves {moved}, a reduction {reduced}: {first.why}."
    advice = "The table Traffic beside itself has every figure; a manifest of the recorder would tell what was meant."
    return [Finding("comparison.agreement", "info", text, share, "share", "Traffic beside itself", advice, row=_row(first))]


def _differences(lines: Sequence[Line]) -> list[Finding]:
    """One finding a cause among collectives: the same difference on all ranks is one finding."""
    found: dict[tuple[str, str], list[Line]] = {}
    for each in lines:
        if each.verdict == DIFFERS and each.quantity.startswith("collectives.") and each.quantity.endswith((".calls", ".bytes")):
            found.setdefault((each.quantity.rpartition(".")[0], each.why), []).append(each)
    result = []
    for (quantity, why), some in found.items():
        first = some[0]
        _, axis, kind, purpose = quantity.split(".", 3)
        where = f"{kind} over {axis} ({purpose})"
        figures = f"the model predicts {first.predicted:.0f} {first.unit} a step, {first.measured:.0f} were seen"
        result.append(
            Finding("comparison.collectives", "warning", f"{where}: {figures}: {why}.", first.ratio, "ratio", "comparison", row=_row(first))
        )
    return result


def _peaks(lines: Sequence[Line]) -> list[Finding]:
    """The rank whose peak is furthest from the model's; more than it says is what makes a job that should fit run out of memory."""
    off = [each for each in lines if each.quantity == "memory.peak" and each.verdict == DIFFERS and each.ratio is not None]
    if not off:
        return []
    worst = max(off, key=lambda each: abs((each.ratio or 1) - 1))
    sizes = f"{format_bytes(worst.measured or 0)}, not {format_bytes(worst.predicted or 0)}"
    text = f"The peak of rank {worst.rank} is {worst.ratio:.2f} times the model's ({sizes}): {worst.why}."
    severity: Severity = "warning" if (worst.ratio or 1) > 1 else "info"
    return [Finding("comparison.peak", severity, text, worst.ratio, "ratio", "comparison", row=_row(worst))]


#: A rate so many times the link's is none that the link had.
_TOO_FAST = 1.1


def _slow_links(found: Sequence[Link], hardware: Hardware | None) -> list[Finding]:
    if hardware is None:
        return []
    result = []
    for link in found:
        best = next((call for call in link.large if _shows_bandwidth(call, link, hardware)), None)
        if best is None:
            continue
        rate, _, _, inside = best
        name, peak = path(link, hardware, inside)
        doubt = {None: ", if its ranks share a node (no host names)", True: f" ({peak:g} GB/s), if that is the network"}.get(
            link.crosses, ""
        )
        crosses = f"{link.axis} crosses nodes at" if link.crosses else f"Communication along {link.axis} reaches"
        text = f"{crosses} {rate:.1f} GB/s at best, {rate / peak:.0%} of {name}{doubt}."
        if rate > _TOO_FAST * peak:
            text = f"{crosses} {format_rate(rate)} at best, more than {name} can ({format_rate(peak)}): its ranks share another link, or "
            text += "sizes or times in the traces are wrong."
        result.append(Finding("comparison.link", "info", text, rate / peak, "share", "Links", subject=Subject(axis=link.axis)))
    return result


def _shows_bandwidth(call: tuple[float, float, int, int], link: Link, hardware: Hardware) -> bool:
    """Whether moving its bytes takes longer than the latency of its steps, on the link as sold."""
    _, sent, steps, inside = call
    latency = hardware.outside.latency_us if link.crosses else hardware.inside.latency_us
    return sent / path(link, hardware, inside)[1] / 1000 >= latency * steps


def path(link: Link, hardware: Hardware, inside: int) -> tuple[str, float]:
    """(name, GB/s of one rank) of the slowest part of the way: between nodes all ``inside`` ranks of a node share the ports of the ring."""
    if not link.crosses:
        return hardware.inside.name, hardware.inside.gb_s
    ports = hardware.outside.gb_s * inside
    name = hardware.outside.name if inside == 1 else f"{inside} ports of {hardware.outside.name}"
    return (name, ports) if inside == 1 or ports < hardware.inside.gb_s else (hardware.inside.name, hardware.inside.gb_s)
