"""Number formats of training: range and rounding, gradients that vanish or overflow, loss scaling, and sums in 16 against 32 bits.

Everything is rounded in software (``number_formats``) and that rounding is checked against the numbers decoded from their bits. The sums
go round a ring of virtual ranks, which rounds after each addition as a device does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.errors import UsageError
from tracekit.findings import Table
from tracekit.simulate.arguments import check, option, seed_of, values
from tracekit.simulate.experiment import Check, Experiment
from tracekit.simulate.precision.formats import BY_NAME, FORMATS, Floats, NumberFormat, nearest_by_search
from tracekit.simulate.tables import Columns, table
from tracekit.simulate.virtual import Network, even_splits

TITLE = "Number formats: range, rounding, loss scaling, sums"
EXAMPLE = "tracekit simulate precision --ranks 8 --gradient-exponent -26"
#: One after another: a value in each format. Half a step beyond 1 in bf16, the ends of fp16 and e4m3, a gradient that fp16 loses.
SAMPLES = (0.1, 1 + 2.0**-9, 448.0, 1000.0, 65504.0, 70000.0, 1e-5, 2.0**-26, 3e38)
MOST_ELEMENTS, MOST_RANKS, MOST_STEPS = 1_000_000, 256, 200


@dataclass(frozen=True)
class Arguments:
    """What can be chosen."""

    elements: int = option(4096, "Gradients that are drawn.", most=MOST_ELEMENTS)
    ranks: int = option(8, "Ranks whose gradients are summed.", most=MOST_RANKS)
    gradient_exponent: int = option(-24, "Typical gradient: 2 to this power; they spread over orders of magnitude.", least=-140, most=100)
    loss_scale: float = option(65536.0, "Loss scale at the start; 65536 is the default of torch's GradScaler.")
    growth_interval: int = option(1, "Steps without overflow after which the scale doubles (GradScaler: 2000).", most=10**9)
    steps: int = option(24, "Steps of dynamic loss scaling that are shown.", most=MOST_STEPS)
    seed: int = seed_of("the random gradients")


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
        arguments=values(arguments),
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
    check(arguments)
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
    columns: Columns = {
        "format": ("format", [each.name for each in FORMATS]),
        "bytes": ("size [bytes]", [each.bytes for each in FORMATS]),
        "bits": ("sign + exponent + mantissa bits", [f"1 + {each.exponent_bits} + {each.mantissa_bits}" for each in FORMATS]),
        "largest": ("largest", [_short(each.largest) for each in FORMATS]),
        "normal": ("least normal", [_short(each.least_normal) for each in FORMATS]),
        "least": ("least above 0", [_short(each.least) for each in FORMATS]),
        "epsilon": ("epsilon", [_short(each.epsilon) for each in FORMATS]),
        "digits": ("decimal digits", [round((each.mantissa_bits + 1) * np.log10(2), 1) for each in FORMATS]),
    }
    return table("Formats", columns, "Epsilon: from 1 to the next larger number.")


def _samples() -> Table:
    columns: dict[str, list[str]] = {"value": [_short(value) for value in SAMPLES]}
    columns |= {each.name: [_short(float(rounded)) for rounded in each.round(SAMPLES)] for each in FORMATS}
    named: Columns = {name: (name, values) for name, values in columns.items()}
    return table("The same values in each format", named, "inf or nan: overflow; 0: underflow.")


def _scaling(gradients: Floats) -> Table:
    """What of the gradients survives in fp16 and e5m2 under static loss scales."""
    powers = (0, 8, 12, 16, 20, 24, 32, 40)
    columns: dict[str, tuple[str, list[object]]] = {"scale": ("loss scale", [f"2^{power}" for power in powers])}
    for name in ("fp16", "fp8 e5m2", "bf16"):
        survived = [_survived(BY_NAME[name], gradients, power) for power in powers]
        headings = {"zero": "become 0 [share]", "over": "overflow [share]", "error": "error"}
        for (key, heading), found in zip(headings.items(), zip(*survived, strict=True), strict=True):
            columns[f"{name} {key}"] = (f"{name}: {heading}", list(found))
    note = "Backward starts from loss x scale, gradients are divided by it afterwards. Error: sum of errors over sum of sizes."
    return table("Loss scaling", columns, note, missing={name: "nothing finite is left" for name in columns if name.endswith(" error")})


def _survived(into: NumberFormat, gradients: Floats, power: int) -> tuple[float, float, float | None]:
    """(share that becomes 0, share that overflows, error of the rest) of scaled gradients."""
    scaled = into.round(gradients * 2.0**power)
    finite = np.isfinite(scaled)
    errors, sizes = np.abs(scaled[finite] / 2.0**power - gradients[finite]), np.abs(gradients[finite])
    error = float(errors.sum() / sizes.sum()) if sizes.sum() > 0 else None
    return float(((scaled == 0) & (gradients != 0)).mean()), float((~finite).mean()), error


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
    columns: Columns = {
        "step": ("step", [row[0] for row in rows]),
        "scale": ("loss scale", [row[1] for row in rows]),
        "largest": ("largest scaled gradient", [f"{row[2]:.4g}" for row in rows]),
        "zero": ("become 0 [share]", [row[3] for row in rows]),
        "update": ("optimizer step", [row[4] for row in rows]),
    }
    return table("Dynamic loss scaling in fp16", columns, "After an overflow the step is skipped and the scale halved.")


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
    columns: Columns = {
        "what": ("gradients and sum in", [row[0] for row in rows]),
        "bytes": ("sent element [bytes]", [row[1] for row in rows]),
        "sent": ("sent by a rank [bytes]", [row[2] for row in rows]),
        "error": ("error of the sum", [f"{row[3]:.3g}" for row in rows]),
        "adding": ("of it by adding", [f"{row[4]:.3g}" for row in rows]),
        "worst": ("largest error by adding", [f"{row[5]:.3g}" for row in rows]),
    }
    note = f"A ring over {arguments.ranks} ranks rounds after each addition. Error: sum of errors over sum of sizes."
    factor = error["bf16"] / error["bf16 gradients, sum in fp32"] if error["bf16 gradients, sum in fp32"] else 1.0
    verdict = f"summing {arguments.ranks} ranks in bf16 has {factor:.1f} times the error of summing the same gradients in fp32"
    return table("Sums over ranks", columns, note), checks, verdict


def _updates() -> Table:
    """A weight of 1 that gets 1000 updates of 0.001 each: what a copy in fp32 (a master weight) is for."""
    rows = []
    for name in ("fp32", "fp16", "bf16"):
        chosen, weight = BY_NAME[name], np.array([1.0])
        update = chosen.round([0.001])
        for _ in range(1000):
            weight = chosen.round(weight + update)
        rows.append((name, _short(float(weight[0])), _short(abs(float(weight[0]) - 2.0)), _short(chosen.epsilon / 2)))
    columns: Columns = {
        "format": ("weight kept in", [row[0] for row in rows]),
        "weight": ("after 1000 updates of 0.001 to 1", [row[1] for row in rows]),
        "error": ("error (2 is exact)", [row[2] for row in rows]),
        "half": ("updates of 1 that small are lost", [row[3] for row in rows]),
    }
    note = "An update below half the gap behind the weight is rounded away: mixed precision keeps a master copy in fp32."
    return table("Small updates", columns, note)


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
