"""Fully sharded data parallelism on virtual ranks: FSDP1's flat parameter and FSDP2's shards of single parameters, side by side.

Both go through init, all-gather before forward, forward, free, all-gather before backward, local full gradients, reduce-scatter and Adam
on the shards; after the step the joined shards are compared with one step of a single process on the whole batch.
Sources: PyTorch FSDP, arXiv:2304.11277; ZeRO, arXiv:1910.02054 (stage 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tracekit.errors import UsageError
from tracekit.simulate.arguments import check, option, seed_of, spelled, values
from tracekit.simulate.data_parallel import narration
from tracekit.simulate.data_parallel.fsdp_figures import checks, tables
from tracekit.simulate.data_parallel.layouts import ALIGNMENT_BYTES, flat_layout, rows_layout
from tracekit.simulate.data_parallel.model import LinearStack, layers_from_text
from tracekit.simulate.data_parallel.run import StrategyRun, named_moments, train
from tracekit.simulate.data_parallel.strategies import FSDP, Sharding, Strategy, fsdp_widths
from tracekit.simulate.data_parallel.units import WAYS, units_of
from tracekit.simulate.experiment import Experiment
from tracekit.simulate.holdings import peak
from tracekit.units import format_bytes

TITLE = "FSDP: sharded parameters through one training step"
EXAMPLE = "tracekit simulate fsdp --example tutorial -o fsdp.html"
#: A picture shows every piece on every rank at every moment; beyond this nobody can read it.
MOST_RANKS, MOST_CELLS, MOST_ELEMENTS = 32, 1024, 4_000_000
_YES, _TYPES = ("yes", "no"), (2, 4, 8)


@dataclass(frozen=True)
class Arguments:
    """What can be chosen."""

    example: str = option(
        "none",
        "tutorial: linear layers 2x3 and 2x2 with biases on 2 ranks, as one unit; then a unit for each layer.",
        ("none", "tutorial"),
    )
    version: str = option(
        "both", "1: flat parameter (FullyShardedDataParallel); 2: shards of single parameters (fully_shard).", ("1", "2", "both")
    )
    world: int = option(4, "Ranks that share the model.", most=MOST_RANKS)
    replicas: int = option(1, "Hybrid sharding (HSDP): so many groups of ranks, each with the whole model.", most=MOST_RANKS)
    layers: str = option("5x4,6x5,3x6", "Weights of the linear layers, outputs x inputs of each.")
    bias: str = option("yes", "Whether the layers have biases.", _YES)
    units: str = option(
        "layer", "What is gathered together: each layer; the whole model; blocks, the first and last layer with the root.", WAYS
    )
    use_orig_params: str = option("no", "FSDP1: each parameter begins at a multiple of 16 bytes of the flat parameter.", _YES)
    reshard_after_forward: str = option(
        "default",
        "Free gathered units after forward; default: all but the root. (FSDP1 keeps the root in any case.)",
        ("default", *_YES),
    )
    prefetch: str = option("yes", "Gather the unit that follows in backward before the present one computes, as torch does.", _YES)
    batch: int = option(2, "Samples of each rank.", most=1024)
    steps: int = option(1, "Training steps; the picture shows the first.", most=20)
    seed: int = seed_of("parameters and samples")
    stored_bytes: int = option(4, "Bytes an element of shards, their gradients and the optimizer state.", _TYPES)
    gathered_bytes: int = option(4, "Bytes an element of gathered parameters and activations.", (1, *_TYPES))
    reduced_bytes: int = option(4, "Bytes an element that is reduce-scattered.", _TYPES)


#: Two linear layers in one unit on two ranks: 14 elements, 7 a rank, and the cut falls into the first bias.
TUTORIAL = {"layers": "2x3,2x2", "world": 2, "units": "model", "bias": "yes"}


def run(arguments: Arguments) -> Experiment:
    """Train with the chosen versions. UsageError for layers, ranks or sizes that make no sense."""
    chosen = _with_example(arguments)
    model = _model(chosen)
    runs = [_train(chosen, model, strategy) for strategy in FSDP if chosen.version in ("both", strategy.key)]
    life = [_train(replace(chosen, units="layer"), model, run.sharding.strategy) for run in runs] if chosen.example == "tutorial" else []
    found = [one for run in runs for one in checks(run)]
    found += [replace(one, quantity=f"{one.quantity}, a unit for each layer") for run in life for one in checks(run)]
    return Experiment(
        name="fsdp",
        title=TITLE,
        about="Every rank keeps a shard of each parameter, gathers a unit when it is needed and frees it afterwards. Real arrays are cut, "
        "moved and joined; bytes are counted from them.",
        arguments=values(chosen),
        verdict=_verdict(runs, all(one.holds for one in found)),
        tables=tables(runs, life),
        moments=[*named_moments(runs, " "), *named_moments(life, ", a unit for each layer: ", always=True)],
        checks=found,
        calls=runs[0].calls if len(runs) == 1 else (),
        notes=_notes(chosen),
    )


def _with_example(arguments: Arguments) -> Arguments:
    """The values of the example in the place of defaults. UsageError where another value was asked for."""
    if arguments.example == "none":
        return arguments
    for name, value in TUTORIAL.items():
        given = getattr(arguments, name)
        if given not in (getattr(Arguments(), name), value):
            problem = f"{spelled(name)} {given} contradicts --example tutorial, which has {spelled(name)} {value}"
            raise UsageError(problem, "leave one of them out")
    return replace(arguments, **TUTORIAL)  # type: ignore[arg-type]


def _model(arguments: Arguments) -> LinearStack:
    """The model, after everything was found sensible."""
    check(arguments)
    ranks = arguments.world * arguments.replicas
    model = LinearStack(layers_from_text(arguments.layers), arguments.bias == "yes")
    if ranks > MOST_RANKS:
        raise UsageError(f"{arguments.replicas} replicas of {arguments.world} ranks", f"give at most {MOST_RANKS} ranks together")
    if ranks * model.layers**2 > MOST_CELLS:
        problem = f"{ranks} ranks x {model.layers} layers make a picture that nobody can read"
        raise UsageError(problem, f"keep ranks x layers^2 within {MOST_CELLS}")
    model.refuse_large(ranks, arguments.batch, MOST_ELEMENTS)
    return model


def _train(arguments: Arguments, model: LinearStack, strategy: Strategy) -> StrategyRun:
    units, world = units_of(model, arguments.units), arguments.world
    widths = fsdp_widths(arguments.stored_bytes, arguments.gathered_bytes, arguments.reduced_bytes)
    aligned = max(1, ALIGNMENT_BYTES // widths.gathered) if arguments.use_orig_params == "yes" else 0
    layouts = [
        flat_layout(unit.name, unit.parameters(model), world, aligned)
        if strategy.layout == "flat"
        else rows_layout(unit.name, unit.parameters(model), world)
        for unit in units
    ]
    kept_roots = arguments.reshard_after_forward == "default" or strategy.layout == "flat"
    kept = frozenset(u.name for u in units if arguments.reshard_after_forward == "no" or (u.root and kept_roots))
    sharding = Sharding(
        strategy,
        units,
        layouts,
        widths,
        narration.FSDP,
        kept=kept,
        prefetch=arguments.prefetch == "yes",
        replicas=arguments.replicas,
        as_torch=True,
    )
    return train(model, sharding, arguments.batch, 1, arguments.steps, arguments.seed)


def _verdict(runs: Sequence[StrategyRun], holds: bool) -> str:
    sentences = []
    for run in runs:
        index, rank = peak(run.moments)
        kept, most = run.moments[0].live_bytes(0), run.moments[index].live_bytes(rank)
        sent = int(run.network.sent_bytes[0])
        sizes = f"keeps {format_bytes(kept)} a rank, has {format_bytes(most)} at its peak and sends {format_bytes(sent)}"
        sentences.append(f"{run.name} {sizes}")
    end = "the joined shards equal the single process" if holds else "NOT every check holds"
    return "; ".join(sentences) + f"; {end}."


def _notes(arguments: Arguments) -> list[str]:
    notes = [
        "Everything is computed in float64, so that differences are errors of sharding alone; bytes are counted at "
        f"{arguments.stored_bytes} (stored), {arguments.gathered_bytes} (gathered) and {arguments.reduced_bytes} (reduced) an element.",
        "Operations run one after the other, and buffers live as long as torch 2.13 keeps them. Not counted: temporary tensors inside an "
        "operator, Adam's step counters, and what the names of a training loop keep alive (target, output, loss).",
    ]
    if arguments.example == "tutorial":
        notes.append("Tables of shards, elements and bytes are of the model as one unit; the life cycles, of a unit for each layer.")
    if arguments.version == "both":
        notes.append("With one --version alone, the collectives of a step are listed as a recording of it shows them.")
    if arguments.replicas > 1:
        notes.append("Rank r is in replica r div world: shards are gathered within a replica, their gradients all-reduced between them.")
    if arguments.world * arguments.replicas == 1:
        notes.append("One rank: nothing is sent, gathering is a copy.")
    return notes
