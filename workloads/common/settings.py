"""What every workload can be told on its command line, and how that text becomes values. No torch in here: a mistake is told at once."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tracekit.errors import UsageError
from tracekit.mesh.mesh import parse_mesh

BACKENDS = ("auto", "gloo", "nccl", "fake")
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
#: Largest size of anything; ranks that the fake group can list in a moment; processes on one machine.
MOST, MOST_FAKE, MOST_HERE = 10**7, 65_536, 512
_SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "sequence", "batch", "micro_batches", "active", "threads")
LABELS = ("auto", "flight_recorder", "dispatch", "none")


def option(default: Any, text: str, choices: Sequence[Any] | None = None) -> Any:
    """A field of a dataclass of options, with its help."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """Options of all workloads."""

    mesh: str = option("", "axes and sizes, outermost first: pp=2,dp_shard=4,tp=2")
    nproc: int = option(0, "ranks; 0: what the mesh says")
    backend: str = option("auto", "auto: nccl where there are enough GPUs, else gloo; fake: one rank of any mesh, alone", BACKENDS)
    rank: int = option(0, "which rank to be, with --backend fake")
    output: str = option("", "folder of the recording; empty: nothing is recorded")
    replace: bool = option(False, "replace the recording that the folder holds")
    precision: str = option("fp32", "fp32; bf16; fp16 with loss scaling; fp8 where the hardware has it", PRECISIONS)
    loss_scale: float = option(4096.0, "scale of the loss under --precision fp16, at the start; where it is too large steps are skipped")
    layers: int = option(4, "blocks of the transformer")
    hidden: int = option(128, "hidden size")
    heads: int = option(4, "attention heads")
    kv_heads: int = option(4, "heads of keys and values")
    ffn: int = option(512, "size inside the MLP")
    vocabulary: int = option(512, "vocabulary")
    sequence: int = option(64, "tokens a sample")
    swiglu: bool = option(False, "a gated MLP: three matrices, SiLU")
    batch: int = option(4, "samples a step of each data-parallel rank (fixed local batch)")
    global_batch: int = option(0, "samples a step of all ranks together (fixed global batch); 0: --batch times the data-parallel ranks")
    micro_batches: int = option(1, "pieces in which a rank works on its samples (gradient accumulation, or the pipeline's micro-batches)")
    learning_rate: float = option(1e-3, "of Adam")
    seed: int = option(0, "of parameters and data")
    wait: int = option(1, "steps not looked at")
    warmup: int = option(1, "steps to warm up the profiler")
    active: int = option(3, "steps recorded")
    labels: str = option("auto", "how collectives get group and sequence where the backend records none", LABELS)
    saved_tensors: bool = option(False, "register every tensor that autograd saves")
    stacks: bool = option(False, "record Python stacks")
    memory: bool = option(True, "record allocations and who owns them")
    verify: bool = option(False, "after the first step, compare the gathered parameters with the single-process reference")
    threads: int = option(1, "compute threads of a rank on the CPU")
    die: str = option("", "RANK:STEP, a rank that kills itself in a step, to see what is left of a job that fails")
    share_gpu: bool = option(False, "let all ranks share one GPU (NCCL 2.30.3 or newer)")

    @property
    def steps(self) -> int:
        """Steps in all."""
        return self.wait + self.warmup + self.active


def defaults(workload: ModuleType) -> dict[str, Any]:
    """Defaults of ``Settings`` that a workload has changed: its ``DEFAULTS``, field -> value (may be missing)."""
    return dict(getattr(workload, "DEFAULTS", {}))


def options_type(workload: ModuleType) -> type:
    """The dataclass of a workload's own options; an empty one where it has none."""
    return getattr(workload, "Options", dataclasses.make_dataclass("Options", []))


def parser(workload: ModuleType) -> argparse.ArgumentParser:
    """Command line of one workload."""
    name = workload.__name__.rpartition(".")[2]
    text = argparse.ArgumentParser(
        prog=f"tracekit record {name}",
        description=workload.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    _add(text.add_argument_group("options of this workload"), options_type(workload), {})
    _add(text.add_argument_group("options of all workloads"), Settings, defaults(workload))
    return text


def _add(group: argparse._ArgumentGroup, kind: type, changed: Mapping[str, Any]) -> None:
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        names = [f"--{item.name.replace('_', '-')}"] + (["-o"] if item.name == "output" else [])
        default = changed.get(item.name, item.default)
        shown = f"{item.metadata.get('help', '')} (default: {default!r})"
        if hints[item.name] is bool:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, default=default, dest=item.name, help=shown)
        else:
            choices = item.metadata.get("choices")
            group.add_argument(*names, type=hints[item.name], default=default, dest=item.name, choices=choices, help=shown)


def parse(workload: ModuleType, arguments: Sequence[str]) -> tuple[Settings, Any]:
    """(settings, the workload's own options). Raises UsageError; ``--help`` prints and exits."""
    reader = parser(workload)
    try:
        found, unknown = reader.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise UsageError(str(error).replace("\n", " "), f"see {reader.prog} --help") from error
    if unknown:
        raise UsageError(f"{reader.prog.rpartition(' ')[2]} has no option {unknown[0]}", f"see {reader.prog} --help")
    values = vars(found)
    _possible(values, arguments)
    settings = Settings(**{f.name: values[f.name] for f in dataclasses.fields(Settings)})
    kind = options_type(workload)
    return settings, kind(**{f.name: values[f.name] for f in dataclasses.fields(kind)})


def _possible(values: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """UsageError for sizes that no job can have."""
    given = any(word == "--nproc" or word.startswith("--nproc=") for word in arguments)
    if not 0 < values["loss_scale"] < 2.0**120:
        raise UsageError(f"--loss-scale {values['loss_scale']} is no scale of a loss", "give a number above 0, a power of two")
    least = dict.fromkeys(_SIZES, 1) | dict.fromkeys(("wait", "warmup", "global_batch", "nproc"), 0) | ({"nproc": 1} if given else {})
    for name, smallest in least.items():
        if not smallest <= values[name] <= MOST:
            raise UsageError(f"--{name.replace('_', '-')} {values[name]} is no size that a job can have", f"give {smallest} to {MOST}")


def mesh_sizes(workload: ModuleType, settings: Settings) -> dict[str, int]:
    """Axis -> size, outermost first, from --mesh, --nproc and the workload's default. Raises UsageError where they do not fit."""
    default: Mapping[str, int] = workload.MESH
    if settings.mesh:
        sizes = {axis.name: axis.size for axis in parse_mesh(settings.mesh)}
        left = [name for name, size in sizes.items() if size == -1]
        known = math.prod(size for size in sizes.values() if size != -1)
        if left:
            if not settings.nproc or settings.nproc % known:
                raise UsageError(f"--mesh {settings.mesh}: {left[0]}=-1 needs an --nproc that {known} divides", "give every axis its size")
            sizes[left[0]] = settings.nproc // known
    else:
        sizes = dict(default)
        if settings.nproc and settings.nproc != math.prod(sizes.values()):
            if len(sizes) > 1:
                shown = ",".join(f"{name}={size}" for name, size in sizes.items())
                raise UsageError(f"{settings.nproc} ranks do not make up the usual mesh {shown}", "say which mesh: --mesh NAME=SIZE,...")
            sizes = dict.fromkeys(sizes, settings.nproc)
    world = math.prod(sizes.values())
    if settings.nproc and settings.nproc != world:
        raise UsageError(f"--mesh {settings.mesh} has {world} ranks, --nproc says {settings.nproc}", "leave --nproc out")
    missing = [name for name in default if name not in sizes]
    if missing:
        raise UsageError(f"the mesh has no axis {missing[0]}, along which this workload works", f"its axes are {', '.join(default)}")
    most = MOST_FAKE if settings.backend == "fake" else MOST_HERE
    if world > most:
        where = "one process can play" if settings.backend == "fake" else "one machine can run"
        raise UsageError(f"a mesh of {world} ranks is more than {where}", f"at most {most}")
    if not 0 <= settings.rank < world:
        raise UsageError(f"rank {settings.rank} is none of {world} ranks", f"ranks are 0 to {world - 1}")
    return sizes


def available() -> dict[str, str]:
    """Workload -> first sentence of its docstring, in alphabetical order, without importing any of them."""
    import ast

    spec = importlib.util.find_spec("tracekit.workloads")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    result = {}
    for folder in folders:
        for path in sorted(Path(folder).glob("*.py")):
            if path.stem != "__init__":
                text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
                result[path.stem] = " ".join(text.partition("\n\n")[0].split())
    return result
