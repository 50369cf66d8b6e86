"""DDP and ZeRO stages 1, 2 and 3 side by side on virtual ranks: who holds what, what is sent for it, the same parameters in the end.

Each strategy trains the same model on the same samples; parameters, mean gradients and Adam moments are compared with one process on the
whole batch. Source: ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from tracekit.errors import UsageError
from tracekit.simulate import bounds
from tracekit.simulate._zero_checks import checks
from tracekit.simulate._zero_outcome import Outcome
from tracekit.simulate._zero_tables import tables
from tracekit.simulate.adam import Adam
from tracekit.simulate.experiment import Experiment, Moment
from tracekit.simulate.flat_parameter import flat_layout
from tracekit.simulate.linear_model import LinearStack, Values, batches, layers_from_text, train_in_one_process
from tracekit.simulate.model_units import buckets_of, units_of
from tracekit.simulate.zero_strategies import RECIPES, STRATEGIES, Strategy
from tracekit.simulate.zero_training import Results, Rules, ZeroTraining
from tracekit.units import format_bytes

TITLE = "ZeRO: what can be sharded, and what it costs"
EXAMPLE = "tracekit simulate zero --world 4 --micro-batches 2 -o zero.html"
#: A picture shows every piece on every rank at every moment; beyond this nobody can read it.
MOST_RANKS, MOST_CELLS, MOST_ELEMENTS = 32, 1024, 2_000_000


@dataclass(frozen=True)
class Arguments:
    """What can be chosen."""

    strategy: str = field(
        default="all",
        metadata={"help": "Which strategy; zero1_naive all-reduces where zero1 reduce-scatters, zero1_torch owns whole parameters.",
                  "choices": ("all", *(strategy.key for strategy in STRATEGIES))},
    )  # fmt: skip
    world: int = field(default=4, metadata={"help": "Ranks of the data-parallel group."})
    layers: str = field(default="5x4,3x5", metadata={"help": "Weights of the linear layers, outputs x inputs of each."})
    bias: str = field(default="yes", metadata={"help": "Whether the layers have biases.", "choices": ("yes", "no")})
    units: str = field(
        default="layer",
        metadata={"help": "What is partitioned, reduced and gathered together: each layer, the whole model, or buckets of layers as "
                  "backward fills them.", "choices": ("layer", "model", "bucket")},
    )  # fmt: skip
    bucket_bytes: int = field(default=128, metadata={"help": "With buckets: the gradient that reaches so many bytes closes one."})
    micro_batches: int = field(default=2, metadata={"help": "Micro-batches of a step; their gradients are accumulated."})
    batch: int = field(default=2, metadata={"help": "Samples of a micro-batch on each rank."})
    recipe: str = field(
        default="fp32",
        metadata={"help": "Bytes of a parameter, its gradient, its optimizer state: fp32 4, 4, 8; mixed 2, 2, 12; mixed_fp32_gradients "
                  "2, 4, 12.", "choices": tuple(RECIPES)},
    )  # fmt: skip
    naive_sync: str = field(
        default="all_gather",
        metadata={"help": "How zero1_naive hands updated parameters on.", "choices": ("all_gather", "broadcast")},
    )
    prefetch: str = field(
        default="yes",
        metadata={"help": "zero3: gather the unit that follows in backward before the present one computes.", "choices": ("yes", "no")},
    )
    reshard_last: str = field(
        default="no",
        metadata={"help": "zero3: free the last unit after forward too, though backward begins with it.", "choices": ("yes", "no")},
    )
    steps: int = field(default=1, metadata={"help": "Training steps; the picture shows the first."})
    seed: int = field(default=0, metadata={"help": "Seed of parameters and samples."})


def run(arguments: Arguments) -> Experiment:
    """Train with the chosen strategies. UsageError for layers, ranks or sizes that make no sense."""
    model = _model(arguments)
    chosen = [strategy for strategy in STRATEGIES if arguments.strategy in ("all", strategy.key)]
    outcomes = [_train(arguments, model, strategy) for strategy in chosen]
    found = [check for outcome in outcomes for check in checks(outcome)]
    return Experiment(
        name="zero",
        title=TITLE,
        about="The same model and samples under each strategy. Whole means every rank has all of it, owned that each rank has its part; "
        "real arrays are reduced, scattered and gathered, and bytes are counted from them.",
        arguments=[(f.name, getattr(arguments, f.name)) for f in fields(arguments)],
        verdict=_verdict(outcomes, all(check.holds for check in found)),
        tables=tables(outcomes),
        moments=[moment for outcome in outcomes for moment in _named(outcome, len(outcomes) > 1)],
        checks=found,
        calls=outcomes[0].calls if len(outcomes) == 1 else (),
        notes=_notes(arguments),
    )


def _model(arguments: Arguments) -> LinearStack:
    """The model, after everything was found sensible."""
    bounds.options(arguments, {"world": MOST_RANKS, "micro_batches": 16, "batch": 1024, "bucket_bytes": 2**40, "steps": 20})
    model = LinearStack(layers_from_text(arguments.layers), arguments.bias == "yes")
    if arguments.world * model.layers**2 * arguments.micro_batches > MOST_CELLS:
        size = f"{arguments.world} ranks x {model.layers} layers x {arguments.micro_batches} micro-batches"
        raise UsageError(f"{size} make a picture that nobody can read", f"keep ranks x layers^2 x micro-batches within {MOST_CELLS}")
    widest = max(max(shape) for shape in model.shapes)
    held = arguments.world * (sum(p.elements for p in model.parameters) + arguments.batch * arguments.micro_batches * widest)
    if held > MOST_ELEMENTS:
        raise UsageError(f"{held:,} elements on all ranks together", f"give smaller layers or fewer ranks: at most {MOST_ELEMENTS:,}")
    return model


def _train(arguments: Arguments, model: LinearStack, strategy: Strategy) -> Outcome:
    recipe, adam = RECIPES[arguments.recipe], Adam()
    by_bucket = arguments.units == "bucket"
    units = buckets_of(model, arguments.bucket_bytes, recipe.gradient) if by_bucket else units_of(model, arguments.units)
    layouts = [flat_layout(unit.name, unit.parameters(model), arguments.world) for unit in units]
    data = batches(model, arguments.world * arguments.batch * arguments.micro_batches, arguments.steps, arguments.seed)
    reference = train_in_one_process(model, data, adam, arguments.seed)
    rules = Rules(arguments.naive_sync == "broadcast", arguments.prefetch == "yes", arguments.reshard_last == "yes")
    training = ZeroTraining(model, units, layouts, strategy, recipe, adam, rules)
    training.start(model.initial(arguments.seed))
    moments: Sequence[Moment] = ()
    results: list[Results] = []
    local: list[Values] = []
    for number, batch in enumerate(data, 1):
        training.step(batch, number, arguments.micro_batches)
        results.append(training.results())
        training.finish()
        if number == 1:
            moments, network, local = tuple(training.holdings.moments), training.network, training.local
        training.holdings.moments.clear()
    broadcast = strategy.whole_parameters or (strategy.key == "zero1_naive" and rules.broadcast)
    done = (moments, network, local, results, reference)
    return Outcome(strategy, recipe, model, units, layouts, arguments.micro_batches, broadcast, not rules.reshard_last, *done)


def _named(outcome: Outcome, several: bool) -> list[Moment]:
    """The moments, with the strategy in front of the title where several are shown."""
    return [replace(moment, title=f"{outcome.name}: {moment.title}") if several else moment for moment in outcome.moments]


def _verdict(outcomes: Sequence[Outcome], holds: bool) -> str:
    words = []
    for outcome in outcomes:
        state, sent = outcome.before_update.live_bytes(0), int(outcome.network.sent_bytes.max())
        words.append(f"{outcome.name} {format_bytes(state)} a rank and {format_bytes(sent)} sent")
    end = "parameters equal the single process on every rank" if holds else "NOT every check holds"
    return f"Model state before the update, and bytes of a step: {'; '.join(words)}; {end}."


def _notes(arguments: Arguments) -> list[str]:
    recipe = RECIPES[arguments.recipe]
    notes = [
        "All is computed in float64, so that differences are errors of sharding alone; bytes are counted at "
        f"{recipe.parameter} (parameter, activation), {recipe.gradient} (gradient) and {recipe.optimizer} (optimizer state) an element.",
        "Optimizer state is there from the start, so that the bytes are those of any later step; gradients are reduced unit by unit, "
        "in place; operations run one after the other.",
    ]
    if arguments.strategy == "all":
        notes.append("With one --strategy alone, the collectives of a step are listed as a recording of it shows them.")
    if arguments.world == 1:
        notes.append("One rank: nothing is sent, and every strategy is the same.")
    return notes
