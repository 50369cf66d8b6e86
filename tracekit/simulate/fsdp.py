"""Fully sharded data parallelism on virtual ranks: FSDP1's flat parameter and FSDP2's shards of single parameters, side by side.

Both go through init, all-gather before forward, forward, free, all-gather before backward, local full gradients, reduce-scatter and Adam
on the shards; after the step the joined shards are compared with one step of a single process on the whole batch.
Sources: PyTorch FSDP, arXiv:2304.11277; ZeRO, arXiv:1910.02054 (stage 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from tracekit.errors import UsageError
from tracekit.simulate import bounds
from tracekit.simulate._fsdp_checks import checks
from tracekit.simulate._fsdp_outcome import Outcome
from tracekit.simulate._fsdp_tables import tables
from tracekit.simulate.adam import Adam
from tracekit.simulate.experiment import Experiment, Moment
from tracekit.simulate.flat_parameter import ALIGNMENT_BYTES, flat_layout
from tracekit.simulate.holdings import peak
from tracekit.simulate.linear_model import LinearStack, Trained, Values, batches, layers_from_text, train_in_one_process
from tracekit.simulate.model_units import WAYS, units_of
from tracekit.simulate.sharded_parameter import sharded_layout
from tracekit.simulate.sharded_training import Rules, ShardedTraining
from tracekit.simulate.sharded_units import Widths
from tracekit.units import format_bytes

TITLE = "FSDP: sharded parameters through one training step"
EXAMPLE = "tracekit simulate fsdp --example tutorial -o fsdp.html"
#: A picture shows every piece on every rank at every moment; beyond this nobody can read it.
MOST_RANKS, MOST_CELLS, MOST_ELEMENTS = 32, 1024, 4_000_000


@dataclass(frozen=True)
class Arguments:
    """What can be chosen."""

    example: str = field(
        default="none",
        metadata={
            "help": "tutorial: two linear layers 2x3 and 2x2 with biases as one unit on 2 ranks.",
            "choices": ("none", "tutorial"),
        },
    )
    version: str = field(
        default="both",
        metadata={"help": "1: flat parameter (FullyShardedDataParallel); 2: shards of single parameters (fully_shard).",
                  "choices": ("1", "2", "both")},
    )  # fmt: skip
    world: int = field(default=4, metadata={"help": "Ranks that share the model."})
    replicas: int = field(default=1, metadata={"help": "Hybrid sharding (HSDP): so many groups of ranks, each with the whole model."})
    layers: str = field(default="5x4,6x5,3x6", metadata={"help": "Weights of the linear layers, outputs x inputs of each."})
    bias: str = field(default="yes", metadata={"help": "Whether the layers have biases.", "choices": ("yes", "no")})
    units: str = field(
        default="layer",
        metadata={"help": "What is gathered together: each layer; the whole model; blocks, the first and last layer with the root.",
                  "choices": WAYS},
    )  # fmt: skip
    use_orig_params: str = field(
        default="no",
        metadata={"help": "FSDP1: each parameter begins at a multiple of 16 bytes of the flat parameter.", "choices": ("yes", "no")},
    )
    reshard_after_forward: str = field(
        default="default",
        metadata={"help": "Free gathered units after forward; default: all but the root. (FSDP1 keeps the root in any case.)",
                  "choices": ("default", "yes", "no")},
    )  # fmt: skip
    prefetch: str = field(
        default="yes",
        metadata={"help": "Gather the unit that follows in backward before the present one computes, as torch does.",
                  "choices": ("yes", "no")},
    )  # fmt: skip
    batch: int = field(default=2, metadata={"help": "Samples of each rank."})
    steps: int = field(default=1, metadata={"help": "Training steps; the picture shows the first."})
    seed: int = field(default=0, metadata={"help": "Seed of parameters and samples."})
    stored_bytes: int = field(
        default=4, metadata={"help": "Bytes an element of shards, their gradients and the optimizer state.", "choices": (2, 4, 8)}
    )
    gathered_bytes: int = field(
        default=4, metadata={"help": "Bytes an element of gathered parameters and activations.", "choices": (1, 2, 4, 8)}
    )
    reduced_bytes: int = field(default=4, metadata={"help": "Bytes an element that is reduce-scattered.", "choices": (2, 4, 8)})


#: Two linear layers in one unit on two ranks: 14 elements, 7 a rank, and the cut falls into the first bias.
TUTORIAL = Arguments(example="tutorial", layers="2x3,2x2", world=2, units="model", bias="yes")


def run(arguments: Arguments) -> Experiment:
    """Train with the chosen versions. UsageError for layers, ranks or sizes that make no sense."""
    chosen = _with_example(arguments)
    model = _model(chosen)
    outcomes = [_train(chosen, model, version) for version in (("1", "2") if chosen.version == "both" else (chosen.version,))]
    found = [check for outcome in outcomes for check in checks(outcome)]
    return Experiment(
        name="fsdp",
        title=TITLE,
        about="Every rank keeps a shard of each parameter, gathers a unit when it is needed and frees it afterwards. Real arrays are cut, "
        "moved and joined; bytes are counted from them.",
        arguments=[(f.name, getattr(chosen, f.name)) for f in fields(chosen)],
        verdict=_verdict(outcomes, all(check.holds for check in found)),
        tables=tables(outcomes),
        moments=[moment for outcome in outcomes for moment in _named(outcome, len(outcomes) > 1)],
        checks=found,
        calls=outcomes[0].calls if len(outcomes) == 1 else (),
        notes=_notes(chosen),
    )


def _with_example(arguments: Arguments) -> Arguments:
    """The values of the example in the place of defaults. UsageError where another value was asked for."""
    if arguments.example == "none":
        return arguments
    for name in ("layers", "world", "units", "bias"):
        given, value = getattr(arguments, name), getattr(TUTORIAL, name)
        if given not in (getattr(Arguments(), name), value):
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} {given} contradicts --example tutorial, which has {option} {value}", "leave one of them out")
    return replace(arguments, layers=TUTORIAL.layers, world=TUTORIAL.world, units=TUTORIAL.units, bias=TUTORIAL.bias)


def _model(arguments: Arguments) -> LinearStack:
    """The model, after everything was found sensible."""
    bounds.options(arguments, {"world": MOST_RANKS, "replicas": MOST_RANKS, "batch": 1024, "steps": 20})
    model = LinearStack(layers_from_text(arguments.layers), arguments.bias == "yes")
    ranks = arguments.world * arguments.replicas
    if ranks > MOST_RANKS:
        raise UsageError(f"{arguments.replicas} replicas of {arguments.world} ranks", f"give at most {MOST_RANKS} ranks together")
    if ranks * model.layers**2 > MOST_CELLS:
        problem = f"{ranks} ranks x {model.layers} layers make a picture that nobody can read"
        raise UsageError(problem, f"keep ranks x layers^2 within {MOST_CELLS}")
    held = ranks * (sum(p.elements for p in model.parameters) + arguments.batch * max(max(shape) for shape in model.shapes))
    if held > MOST_ELEMENTS:
        raise UsageError(f"{held:,} elements on all ranks together", f"give smaller layers or fewer ranks: at most {MOST_ELEMENTS:,}")
    return model


def _train(arguments: Arguments, model: LinearStack, version: str) -> Outcome:
    units = units_of(model, arguments.units)
    widths = Widths(arguments.stored_bytes, arguments.gathered_bytes, arguments.reduced_bytes)
    aligned = max(1, ALIGNMENT_BYTES // widths.gathered) if arguments.use_orig_params == "yes" else 0
    layouts = [
        flat_layout(unit.name, unit.parameters(model), arguments.world, aligned)
        if version == "1"
        else sharded_layout(unit.name, unit.parameters(model), arguments.world)
        for unit in units
    ]
    kept_roots = arguments.reshard_after_forward == "default" or version == "1"
    kept = frozenset(u.name for u in units if arguments.reshard_after_forward == "no" or (u.root and kept_roots))
    adam = Adam()
    replicas = arguments.replicas
    data = batches(model, replicas * arguments.world * arguments.batch, arguments.steps, arguments.seed)
    reference = train_in_one_process(model, data, adam, arguments.seed)
    training = ShardedTraining(model, units, layouts, widths, Rules(kept, arguments.prefetch == "yes"), adam, replicas)
    training.start(model.initial(arguments.seed))
    moments: Sequence[Moment] = ()
    results: list[Trained] = []
    local: list[Values] = []
    for number, batch in enumerate(data, 1):
        training.step(batch, number)
        results += [training.result(replica) for replica in range(replicas)]
        training.finish()
        if number == 1:
            moments, network, local = tuple(training.holdings.moments), training.network, training.local
        training.holdings.moments.clear()
    expected = [step for step in reference for _ in range(replicas)]
    return Outcome(version, model, units, layouts, widths, kept, aligned, replicas, moments, network, local, results, expected)


def _named(outcome: Outcome, several: bool) -> list[Moment]:
    """The moments, with the version in front of the title where both are shown."""
    return [replace(moment, title=f"{outcome.name} {moment.title}") if several else moment for moment in outcome.moments]


def _verdict(outcomes: Sequence[Outcome], holds: bool) -> str:
    words = []
    for outcome in outcomes:
        index, rank = peak(outcome.moments)
        most = outcome.moments[index].live_bytes(rank)
        kept = outcome.moments[0].live_bytes(0)
        sent = int(outcome.network.sent_bytes[0])
        sizes = f"keeps {format_bytes(kept)} a rank, has {format_bytes(most)} at its peak and sends {format_bytes(sent)}"
        words.append(f"{outcome.name} {sizes}")
    end = "the joined shards equal the single process" if holds else "NOT every check holds"
    return "; ".join(words) + f"; {end}."


def _notes(arguments: Arguments) -> list[str]:
    notes = [
        "Everything is computed in float64, so that differences are errors of sharding alone; bytes are counted at "
        f"{arguments.stored_bytes} (stored), {arguments.gathered_bytes} (gathered) and {arguments.reduced_bytes} (reduced) an element.",
        "Operations run one after the other, and buffers live as long as torch 2.13 keeps them. Not counted: temporary tensors inside an "
        "operator, Adam's step counters, and what the names of a training loop keep alive (target, output, loss).",
    ]
    if arguments.version == "both":
        notes.append("With one --version alone, the collectives of a step are listed as a recording of it shows them.")
    if arguments.replicas > 1:
        notes.append("Rank r is in replica r div world: shards are gathered within a replica, their gradients all-reduced between them.")
    if arguments.world * arguments.replicas == 1:
        notes.append("One rank: nothing is sent, gathering is a copy.")
    return notes
