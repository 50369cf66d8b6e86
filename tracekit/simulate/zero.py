"""DDP and ZeRO stages 1, 2 and 3 side by side on virtual ranks: who holds what, what is sent for it, the same parameters in the end.

Each strategy trains the same model on the same samples; parameters, mean gradients and Adam moments are compared with one process on the
whole batch. Source: ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracekit.errors import UsageError
from tracekit.simulate.arguments import check, option, seed_of, values
from tracekit.simulate.data_parallel import narration
from tracekit.simulate.data_parallel.layouts import flat_layout
from tracekit.simulate.data_parallel.model import LinearStack, layers_from_text
from tracekit.simulate.data_parallel.run import StrategyRun, named_moments, train
from tracekit.simulate.data_parallel.strategies import RECIPES, ZERO, Sharding, Strategy
from tracekit.simulate.data_parallel.units import buckets_of, units_of
from tracekit.simulate.data_parallel.zero_figures import before_update, checks, tables
from tracekit.simulate.experiment import Experiment
from tracekit.units import format_bytes

TITLE = "ZeRO: what can be sharded, and what it costs"
EXAMPLE = "tracekit simulate zero --world 4 --micro-batches 2 -o zero.html"
#: A picture shows every piece on every rank at every moment; beyond this nobody can read it.
MOST_RANKS, MOST_CELLS, MOST_ELEMENTS = 32, 1024, 2_000_000
_YES = ("yes", "no")


@dataclass(frozen=True)
class Arguments:
    """What can be chosen."""

    strategy: str = option(
        "all",
        "Which strategy; zero1_naive all-reduces where zero1 reduce-scatters, zero1_torch owns whole parameters.",
        ("all", *(strategy.key for strategy in ZERO)),
    )
    world: int = option(4, "Ranks of the data-parallel group.", most=MOST_RANKS)
    layers: str = option("5x4,3x5", "Weights of the linear layers, outputs x inputs of each.")
    bias: str = option("yes", "Whether the layers have biases.", _YES)
    units: str = option(
        "layer",
        "What is partitioned, reduced and gathered together: each layer, the whole model, or buckets of layers as backward fills them.",
        ("layer", "model", "bucket"),
    )
    bucket_bytes: int = option(128, "With buckets: the gradient that reaches so many bytes closes one.", most=2**40)
    micro_batches: int = option(2, "Micro-batches of a step; their gradients are accumulated.", most=16)
    batch: int = option(2, "Samples of a micro-batch on each rank.", most=1024)
    recipe: str = option(
        "fp32",
        "Bytes of a parameter, its gradient, its optimizer state: fp32 4, 4, 8; mixed 2, 2, 12; mixed_fp32_gradients 2, 4, 12.",
        tuple(RECIPES),
    )
    naive_sync: str = option("all_gather", "How zero1_naive hands updated parameters on.", ("all_gather", "broadcast"))
    prefetch: str = option("yes", "zero3: gather the unit that follows in backward before the present one computes.", _YES)
    reshard_last: str = option("no", "zero3: free the last unit after forward too, though backward begins with it.", _YES)
    steps: int = option(1, "Training steps; the picture shows the first.", most=20)
    seed: int = seed_of("parameters and samples")


def run(arguments: Arguments) -> Experiment:
    """Train with the chosen strategies. UsageError for layers, ranks or sizes that make no sense."""
    model = _model(arguments)
    runs = [_train(arguments, model, strategy) for strategy in ZERO if arguments.strategy in ("all", strategy.key)]
    found = [one for run in runs for one in checks(run)]
    return Experiment(
        name="zero",
        title=TITLE,
        about="The same model and samples under each strategy. Whole means every rank has all of it, owned that each rank has its part; "
        "real arrays are reduced, scattered and gathered, and bytes are counted from them.",
        arguments=values(arguments),
        verdict=_verdict(runs, all(one.holds for one in found)),
        tables=tables(runs),
        moments=named_moments(runs, ": "),
        checks=found,
        calls=runs[0].calls if len(runs) == 1 else (),
        notes=_notes(arguments),
    )


def _model(arguments: Arguments) -> LinearStack:
    """The model, after everything was found sensible."""
    check(arguments)
    model = LinearStack(layers_from_text(arguments.layers), arguments.bias == "yes")
    if arguments.world * model.layers**2 * arguments.micro_batches > MOST_CELLS:
        size = f"{arguments.world} ranks x {model.layers} layers x {arguments.micro_batches} micro-batches"
        raise UsageError(f"{size} make a picture that nobody can read", f"keep ranks x layers^2 x micro-batches within {MOST_CELLS}")
    model.refuse_large(arguments.world, arguments.batch * arguments.micro_batches, MOST_ELEMENTS)
    return model


def _train(arguments: Arguments, model: LinearStack, strategy: Strategy) -> StrategyRun:
    widths = RECIPES[arguments.recipe]
    by_bucket = arguments.units == "bucket"
    units = buckets_of(model, arguments.bucket_bytes, widths.gradient) if by_bucket else units_of(model, arguments.units)
    layouts = [flat_layout(unit.name, unit.parameters(model), arguments.world) for unit in units]
    last = {unit.name for unit in units if model.layers - 1 in unit.layers}
    sharding = Sharding(
        strategy,
        units,
        layouts,
        widths,
        narration.ZERO,
        kept=frozenset() if arguments.reshard_last == "yes" else frozenset(last),
        prefetch=arguments.prefetch == "yes",
        broadcast=strategy.layout == "owners" or (strategy.key == "zero1_naive" and arguments.naive_sync == "broadcast"),
    )
    return train(model, sharding, arguments.batch, arguments.micro_batches, arguments.steps, arguments.seed)


def _verdict(runs: Sequence[StrategyRun], holds: bool) -> str:
    sizes = [
        f"{run.name} {format_bytes(before_update(run).live_bytes(0))} a rank and {format_bytes(int(run.network.sent_bytes.max()))} sent"
        for run in runs
    ]
    end = "parameters equal the single process on every rank" if holds else "NOT every check holds"
    return f"Model state before the update, and bytes of a step: {'; '.join(sizes)}; {end}."


def _notes(arguments: Arguments) -> list[str]:
    widths = RECIPES[arguments.recipe]
    notes = [
        "All is computed in float64, so that differences are errors of sharding alone; bytes are counted at "
        f"{widths.stored} (parameter, activation), {widths.gradient} (gradient) and {widths.optimizer} (optimizer state) an element.",
        "Optimizer state is there from the start, so that the bytes are those of any later step; gradients are reduced unit by unit, "
        "in place; operations run one after the other.",
    ]
    if arguments.strategy == "all":
        notes.append("With one --strategy alone, the collectives of a step are listed as a recording of it shows them.")
    if arguments.world == 1:
        notes.append("One rank: nothing is sent, and every strategy is the same.")
    return notes
