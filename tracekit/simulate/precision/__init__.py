"""Number formats of training: range and rounding, gradients that vanish or overflow, loss scaling, and sums in 16 against 32 bits.

Everything is rounded in software (``number_formats``) and that rounding is checked against the numbers decoded from their bits. The sums
go round a ring of virtual ranks, which rounds after each addition as a device does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from tracekit.errors import UsageError
from tracekit.findings import Table
from tracekit.simulate.experiment import Check, Experiment
from tracekit.simulate.precision.formats import BY_NAME, FORMATS, Floats, NumberFormat, nearest_by_search
from tracekit.simulate.virtual import Network, even_splits

TITLE = "Number formats: range, rounding, loss scaling, sums"
EXAMPLE = "tracekit simulate precision --ranks 8 --gradient-exponent -26"
#: One after another: a value in each format. Half a step beyond 1 in bf16, the ends of fp16 and e4m3, a gradient that fp16 loses.
SAMPLES = (0.1, 1 + 2.0**-9, 448.0, 1000.0, 65504.0, 70000.0, 1e-5, 2.0**-26, 3e38)
MOST_ELEMENTS, MOST_RANKS, MOST_STEPS = 1_000_000, 256, 200


@dataclass(frozen=True)
class Arguments:
    """What can be chosen."""

    elements: int = field(default=4096, metadata={"help": "Gradients that are drawn."})
    ranks: int = field(default=8, metadata={"help": "Ranks whose gradients are summed."})
    gradient_exponent: int = field(
        default=-24, metadata={"help": "Typical gradient: 2 to this power; they spread over orders of magnitude."}
    )
    loss_scale: float = field(default=65536.0, metadata={"help": "Loss scale at the start; 65536 is the default of torch's GradScaler."})
    growth_interval: int = field(default=1, metadata={"help": "Steps without overflow after which the scale doubles (GradScaler: 2000)."})
    steps: int = field(default=24, metadata={"help": "Steps of dynamic loss scaling that are shown."})
    seed: int = field(default=0, metadata={"help": "Seed of the random gradients."})


def run(arguments: Arguments) -> Experiment:
    """Make the tables and check the rounding. UsageError for sizes out of range."""
    _refuse(arguments)
    random = np.random.default_rng(arguments.seed)
    gradients = random.standard_normal(arguments.elements) * 2.0 ** (
        arguments.gradient_exponent + 2 * random.standard_normal(arguments.elements)
    )
    sums, sum_checks, sum_verdict = _sums(arguments, random)
    scaling = _scaling(gradients)
    lost = float((BY_NAME["fp16"].round(gradients) == 0).mean())
    kept = float((BY_NAME["fp16"].round(gradients * arguments.loss_scale) == 0).mean())
    return Experiment(
        name="precision",
        title=TITLE,
        about="The same values in each format, rounded to nearest as hardware does; errors are against 64 bits.",
        arguments=[(name, getattr(arguments, name)) for name in Arguments.__dataclass_fields__],
        verdict=f"fp16 loses {lost:.1%} of these gradients, {kept:.1%} with a loss scale of {arguments.loss_scale:g}; {sum_verdict}",
        tables=[_formats(), _samples(), scaling, _dynamic(arguments, random), sums, _updates()],
        checks=[*_format_checks(random), *sum_checks],
        notes=[
            "tf32 is a format of multiplication: inputs are rounded to it, memory holds fp32.",
            "A value between two numbers of a format becomes the nearer one; half way, the one whose last bit is 0.",
            "e4m3 has no infinity: what is too large becomes NaN (a library may clamp it to 448 instead).",
        ],
    )


def _refuse(arguments: Arguments) -> None:
    limits = (
        ("elements", 1, MOST_ELEMENTS),
        ("ranks", 1, MOST_RANKS),
        ("steps", 1, MOST_STEPS),
        ("growth_interval", 1, 10**9),
        ("gradient_exponent", -140, 100),
        ("seed", 0, 2**63),
    )
    for name, low, high in limits:
        if not low <= getattr(arguments, name) <= high:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(arguments, name)}", f"give {low} to {high}")
    if arguments.elements * arguments.ranks > 4 * MOST_ELEMENTS:
        raise UsageError(
            f"{arguments.elements} elements on {arguments.ranks} ranks are too many", f"give {4 * MOST_ELEMENTS} in all at most"
        )
    if not 2.0**-60 <= arguments.loss_scale <= 2.0**60:
        raise UsageError(f"--loss-scale {arguments.loss_scale:g}", "give a scale above 0, up to 2^60")


def _short(value: float) -> str:
    """``65504``, ``5.96e-08``, ``inf``."""
    if not np.isfinite(value):
        return str(value)
    return f"{value:.10g}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"


def _formats() -> Table:
    frame = pd.DataFrame(
        {
            "format": [chosen.name for chosen in FORMATS],
            "bytes": [chosen.bytes for chosen in FORMATS],
            "bits": [f"1 + {chosen.exponent_bits} + {chosen.mantissa_bits}" for chosen in FORMATS],
            "largest": [_short(chosen.largest) for chosen in FORMATS],
            "normal": [_short(chosen.least_normal) for chosen in FORMATS],
            "least": [_short(chosen.least) for chosen in FORMATS],
            "epsilon": [_short(chosen.epsilon) for chosen in FORMATS],
            "digits": [round((chosen.mantissa_bits + 1) * np.log10(2), 1) for chosen in FORMATS],
        }
    )
    heads = {
        "format": "format",
        "bytes": "size [bytes]",
        "bits": "sign + exponent + mantissa bits",
        "largest": "largest",
        "normal": "least normal",
        "least": "least above 0",
        "epsilon": "epsilon",
        "digits": "decimal digits",
    }
    return Table("Formats", frame, heads, "Epsilon: from 1 to the next larger number.", preview=len(frame))


def _samples() -> Table:
    frame = pd.DataFrame({"value": [_short(value) for value in SAMPLES]})
    for chosen in FORMATS:
        frame[chosen.name] = [_short(float(rounded)) for rounded in chosen.round(SAMPLES)]
    note = "inf or nan: overflow; 0: underflow."
    return Table("The same values in each format", frame, {name: name for name in frame.columns}, note, preview=len(frame))


def _scaling(gradients: Floats) -> Table:
    """What of the gradients survives in fp16 and e5m2 under static loss scales."""
    rows = []
    for power in (0, 8, 12, 16, 20, 24, 32, 40):
        row: dict[str, object] = {"scale": f"2^{power}"}
        for name in ("fp16", "fp8 e5m2", "bf16"):
            scaled = BY_NAME[name].round(gradients * 2.0**power)
            finite = np.isfinite(scaled)
            error = np.abs(scaled[finite] / 2.0**power - gradients[finite])
            size = np.abs(gradients[finite])
            row[f"{name} zero"] = float(((scaled == 0) & (gradients != 0)).mean())
            row[f"{name} over"] = float((~finite).mean())
            row[f"{name} error"] = float(error.sum() / size.sum()) if size.sum() > 0 else None
        rows.append(row)
    heads = {"scale": "loss scale"}
    for name in ("fp16", "fp8 e5m2", "bf16"):
        heads |= {
            f"{name} zero": f"{name}: become 0 [share]",
            f"{name} over": f"{name}: overflow [share]",
            f"{name} error": f"{name}: error",
        }
    note = "Backward starts from loss x scale, gradients are divided by it afterwards. Error: sum of errors over sum of sizes."
    missing = {f"{name} error": "nothing finite is left" for name in ("fp16", "fp8 e5m2", "bf16")}
    return Table("Loss scaling", pd.DataFrame(rows), heads, note, preview=len(rows), missing=missing)


def _dynamic(arguments: Arguments, random: np.random.Generator) -> Table:
    """Dynamic loss scaling: halve and skip after an overflow, double after some steps without (Micikevicius et al., arXiv:1710.03740)."""
    half = BY_NAME["fp16"]
    scale, good, rows = arguments.loss_scale, 0, []
    for step in range(arguments.steps):
        size = 2.0 ** (arguments.gradient_exponent + 2 * random.standard_normal(arguments.elements))
        gradients = half.round(random.standard_normal(arguments.elements) * size * scale)
        overflow = not bool(np.isfinite(gradients).all())
        rows.append(
            (step, f"{scale:g}", float(np.nanmax(np.abs(gradients))), float((gradients == 0).mean()), "skipped" if overflow else "done")
        )
        good = 0 if overflow else good + 1
        if overflow:
            scale /= 2
        elif good == arguments.growth_interval:
            scale, good = scale * 2, 0
    frame = pd.DataFrame(rows, columns=["step", "scale", "largest", "zero", "update"])
    frame["largest"] = [f"{value:.4g}" for value in frame["largest"]]
    heads = {
        "step": "step",
        "scale": "loss scale",
        "largest": "largest scaled gradient",
        "zero": "become 0 [share]",
        "update": "optimizer step",
    }
    return Table(
        "Dynamic loss scaling in fp16", frame, heads, "After an overflow the step is skipped and the scale halved.", preview=len(frame)
    )


def ring_sum(inputs: Sequence[Floats], sent: NumberFormat) -> tuple[Floats, Network]:
    """The sum of all ranks' inputs by a ring reduce-scatter that keeps, sends and adds in one format; (the sum, the network).

    Each rank rounds its input, then each partial sum after each addition.
    """
    size = len(inputs)
    network = Network(size, sent.bytes)
    cuts = np.cumsum(even_splits(len(inputs[0]), size))[:-1].tolist()
    held = [np.split(sent.round(values), cuts) for values in inputs]
    for step in range(size - 1):
        with network.step():
            arrived = [network.send(i, (i + 1) % size, held[i][(i - 1 - step) % size], f"c{(i - 1 - step) % size}") for i in range(size)]
        for i, partial in enumerate(arrived):
            own, chunk = held[(i + 1) % size], (i - 1 - step) % size
            own[chunk] = sent.round(np.add(own[chunk], partial))
    return np.concatenate([held[i][i] for i in range(size)]), network


def _sums(arguments: Arguments, random: np.random.Generator) -> tuple[Table, list[Check], str]:
    """Gradients of one order, summed over the ranks in several formats."""
    exact = [random.standard_normal(arguments.elements) for _ in range(arguments.ranks)]
    size = float(np.abs(np.sum(exact, axis=0)).sum())
    rows, checks = [], []
    error: dict[str, float] = {}
    for label, kept, sent in (
        ("fp32", "fp32", "fp32"),
        ("bf16 gradients, sum in fp32", "bf16", "fp32"),
        ("fp16 gradients, sum in fp32", "fp16", "fp32"),
        ("fp16", "fp16", "fp16"),
        ("bf16", "bf16", "bf16"),
        ("fp8 e5m2", "fp8 e5m2", "fp8 e5m2"),
    ):
        inputs = [BY_NAME[kept].round(values) for values in exact]
        result, network = ring_sum(inputs, BY_NAME[sent])
        rounded = np.sum(inputs, axis=0)
        error[label] = float(np.abs(result - np.sum(exact, axis=0)).sum()) / size
        adding = float(np.abs(result - rounded).sum()) / size
        rows.append(
            (label, BY_NAME[sent].bytes, int(network.sent_bytes.max()), error[label], adding, float(np.abs(result - rounded).max()))
        )
        chunks = even_splits(arguments.elements, arguments.ranks)
        most = (arguments.elements - (min(chunks) if arguments.ranks > 1 else arguments.elements)) * BY_NAME[sent].bytes
        checks.append(
            Check(f"{label}: most sent by a rank", int(network.sent_bytes.max()), most, "bytes", "S - S/x, elements times their bytes")
        )
    bound = (arguments.ranks - 1) * BY_NAME["bf16"].epsilon / 2 * float(np.abs(exact).sum(axis=0).max()) * 1.1
    checks.append(Check("bf16: largest error of adding", rows[4][5], 0, "", "(x-1) eps/2 times the sum of sizes, at most", tolerance=bound))
    frame = pd.DataFrame(rows, columns=["what", "bytes", "sent", "error", "adding", "worst"])
    for name in ("error", "adding", "worst"):
        frame[name] = [f"{value:.3g}" for value in frame[name]]
    heads = {
        "what": "gradients and sum in",
        "bytes": "sent element [bytes]",
        "sent": "sent by a rank [bytes]",
        "error": "error of the sum",
        "adding": "of it by adding",
        "worst": "largest error by adding",
    }
    note = f"A ring over {arguments.ranks} ranks rounds after each addition. Error: sum of errors over sum of sizes."
    factor = error["bf16"] / error["bf16 gradients, sum in fp32"] if error["bf16 gradients, sum in fp32"] else 1.0
    verdict = f"summing {arguments.ranks} ranks in bf16 has {factor:.1f} times the error of summing the same gradients in fp32"
    return Table("Sums over ranks", frame, heads, note, preview=len(frame)), checks, verdict


def _updates() -> Table:
    """A weight of 1 that gets 1000 updates of 0.001 each: what a copy in fp32 (a master weight) is for."""
    rows = []
    for name in ("fp32", "fp16", "bf16"):
        chosen, weight = BY_NAME[name], np.array([1.0])
        update = chosen.round([0.001])
        for _ in range(1000):
            weight = chosen.round(weight + update)
        rows.append((name, _short(float(weight[0])), _short(abs(float(weight[0]) - 2.0)), _short(chosen.epsilon / 2)))
    frame = pd.DataFrame(rows, columns=["format", "weight", "error", "half"])
    heads = {
        "format": "weight kept in",
        "weight": "after 1000 updates of 0.001 to 1",
        "error": "error (2 is exact)",
        "half": "updates of 1 that small are lost",
    }
    note = "An update below half the gap behind the weight is rounded away: mixed precision keeps a master copy in fp32."
    return Table("Small updates", frame, heads, note, preview=len(rows))


def _format_checks(random: np.random.Generator) -> list[Check]:
    """Closed forms against numbers decoded from all bit patterns, and rounding against a search among them."""
    checks = []
    for chosen in FORMATS:
        if chosen.exponent_bits + chosen.mantissa_bits > 15:
            continue
        numbers = chosen.every_number()
        top = "1.75 * 2^8" if chosen.finite else "(2 - 2^-m) 2^b"
        checks.append(Check(f"{chosen.name}: largest", float(numbers[-1]), chosen.largest, "", f"{top}, against all bit patterns"))
        checks.append(Check(f"{chosen.name}: least above 0", float(numbers[1]), chosen.least, "", "2^(1-b-m), against all bit patterns"))
        after = float(numbers[np.searchsorted(numbers, 1.0) + 1]) - 1
        checks.append(Check(f"{chosen.name}: epsilon", after, chosen.epsilon, "", "2^-m, against all bit patterns"))
        values = random.standard_normal(5000) * 2.0 ** random.uniform(np.log2(chosen.least) - 2, np.log2(chosen.largest) - 3, 5000)
        halves = (numbers[:-1] + numbers[1:]) / 2
        values = np.concatenate([values[np.abs(values) <= chosen.largest], halves])
        differ = int((chosen.round(values) != nearest_by_search(values, numbers)).sum())
        checks.append(Check(f"{chosen.name}: values rounded otherwise than by search", differ, 0, "values", "nearest, ties to even"))
    single, half = np.finfo(np.float32), np.finfo(np.float16)
    fp32, fp16 = BY_NAME["fp32"], BY_NAME["fp16"]
    checks += [
        Check("fp32: largest", fp32.largest, float(single.max), "", "numpy's float32"),
        Check("fp32: least above 0", fp32.least, float(single.smallest_subnormal), "", "numpy's float32"),
        Check("fp16: largest", fp16.largest, float(half.max), "", "numpy's float16"),
    ]
    values = random.standard_normal(5000) * 2.0 ** random.uniform(-150, 100, 5000)
    checks.append(
        Check(
            "fp32: values rounded otherwise than numpy",
            int((fp32.round(values) != values.astype(np.float32)).sum()),
            0,
            "values",
            "nearest",
        )
    )
    return checks
