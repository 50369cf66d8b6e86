"""``tracekit estimate``: a model, a mesh and a recipe in; memory, communication and time of a step out, without running anything."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tracekit.cli.common import OutputFile, ParamType
from tracekit.errors import InputError, UsageError
from tracekit.files import open_regular

if TYPE_CHECKING:
    from tracekit.estimate.spec import Spec

MOST_FILE_BYTES = 2**20
_EXAMPLES = """\b
Examples:
  tracekit estimate --model llama3-8b --mesh dp_shard=8 --recompute full
  tracekit estimate --model llama3-70b --mesh pp=4,dp_shard=8,tp=8 --global-batch 512 -o plan.html
  tracekit estimate plan.yaml --set strategy.reshard_after_forward=false --json -
  tracekit estimate --model llama3-70b --fit 80GB --ranks 64 --global-batch 256
  tracekit estimate --model path/to/config.json --mesh dp_shard=8 --hardware h200

\b
A file (YAML, TOML or JSON) holds the same as the options; options win. docs/estimate.md lists all keys.
Exit codes: 0 estimated; 2 the plan cannot be read, or cannot work."""

#: Option -> where its value goes in the plan.
_PLACES = {
    "model": ("model",),
    "mesh": ("mesh",),
    "strategy": ("strategy",),
    "recipe": ("recipe",),
    "optimizer": ("optimizer",),
    "micro_batch": ("batch", "micro_batch"),
    "global_batch": ("batch", "global_batch"),
    "recompute": ("batch", "recompute"),
    "attention": ("batch", "attention"),
    "causal": ("batch", "causal"),
    "sequence": ("model", "sequence"),
    "sequence_parallel": ("sequence_parallel",),
    "schedule": ("schedule",),
    "virtual_stages": ("virtual_stages",),
    "implementation": ("implementation",),
    "hardware": ("hardware",),
    "network": ("network",),
    "efficiency": ("efficiency",),
    "overlap": ("overlap",),
    "latency": ("latency",),
}
#: A key under which a single word may stand, and the key of that word where it becomes a mapping.
_WORD_KEYS = {"model": "preset", "strategy": "name", "hardware": "preset", "implementation": "name"}


_SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class Size(ParamType):
    """``80GB`` (10^9 bytes), ``74.5GiB`` (2^30), or plain bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([a-zA-Z]*)\s*", value)
        scale = _SIZES.get(found[2].lower()) if found else None
        if found is None or scale is None or float(found[1]) * scale < 1:
            self.fail(f"{value!r} is no size; write it as 80GB or 74.5GiB", param, ctx)
        return int(float(found[1]) * scale)


@click.command("estimate", epilog=_EXAMPLES)
@click.argument("file", metavar="[FILE]", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option("--model", metavar="NAME", help="A known model (llama3-8b, qwen3-30b-a3b, ...), or the path of its config.json.")
@click.option("--mesh", metavar="AXES", help="Ranks by axis: pp=2,dp_replicate=2,dp_shard=8,cp=1,tp=8,ep=1.")
@click.option("--strategy", metavar="NAME", help="none, ddp, zero1, zero2, zero3, fsdp1, fsdp2 or hsdp.")
@click.option("--recipe", metavar="NAME", help="Precision: fp32, fsdp_bf16, fsdp_bf16_fp32_reduce, megatron_bf16, bf16_zero, ...")
@click.option("--optimizer", metavar="NAME", help="adamw, adam, momentum or sgd.")
@click.option("--micro-batch", metavar="N", type=click.IntRange(1, 10**6), help="Sequences that go through the model at once.")
@click.option("--global-batch", metavar="N", type=click.IntRange(1, 10**9), help="Sequences a step over all ranks.")
@click.option("--sequence", metavar="N", type=click.IntRange(1, 10**9), help="Tokens a sequence, instead of the model's own.")
@click.option("--recompute", metavar="HOW", help="none, selective-megatron, selective-torchtitan or full.")
@click.option("--attention", metavar="KIND", help="flash, or eager (which keeps all scores).")
@click.option("--causal/--no-causal", default=None, help="Count only the scores that a causal mask leaves as FLOP.")
@click.option("--sequence-parallel/--no-sequence-parallel", default=None, help="With tp: norms and dropout on shards of the sequence.")
@click.option("--schedule", metavar="NAME", help="Of the pipeline: gpipe, 1f1b, interleaved_1f1b, zb_h1 or zb_h2.")
@click.option("--virtual-stages", metavar="N", type=click.IntRange(1, 1000), help="Model chunks a rank, for interleaved_1f1b.")
@click.option("--implementation", metavar="NAME", help="Whose habits: torch, megatron (that of its recipes) or deepspeed.")
@click.option("--hardware", metavar="NAME", help="v100, a100, h100, h200, h800, b200, gb200, gb300, mi250x, mi300x, mi355x, rtx4090.")
@click.option("--network", metavar="NAME", help="Between nodes: infiniband-hdr, -ndr, -xdr, ethernet-100g, ethernet-400g.")
@click.option("--efficiency", metavar="SHARE", type=click.FloatRange(0, 1, min_open=True), help="Of peak FLOP/s, while computing.")
@click.option("--overlap", metavar="SHARE", type=click.FloatRange(0, 1), help="Of compute, behind which gathers and reductions hide.")
@click.option("--latency", type=click.Choice(["preset", "nccl"]), help="Of collectives: the hardware's preset, or NCCL's own constants.")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Any other key of the file: strategy.bucket_cap_mb=50.")
@click.option("--module", metavar="MODULE:FUNCTION", help="A function that builds a torch.nn.Module; needs the extra 'record'.")
@click.option("--fit", metavar="SIZE", type=Size(), help="Search meshes of --ranks ranks, and settings, for this much memory.")
@click.option("--ranks", "--world", "ranks", metavar="N", type=click.IntRange(1, 10**7), help="Ranks, for --fit.")
@click.option("-o", "--output", type=OutputFile(), help="Write charts and tables to this HTML file.")
@click.option("--json", "json_file", type=OutputFile(dash=True), help="Write all figures as JSON; - is standard output.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def command(
    file: str | None,
    settings: tuple[str, ...],
    module: str | None,
    fit: int | None,
    ranks: int | None,
    output: str | None,
    json_file: str | None,
    quiet: bool,
    **given: Any,
) -> None:
    """Say what training a model on a mesh would need and send: memory by category, communication by axis, pipeline bubble, time of a step.

    Nothing is run and no trace is read: every figure is a formula.
    """
    if (fit is None) != (ranks is None):
        raise click.UsageError("--fit SIZE and --ranks N belong together")
    if output is not None and json_file is not None and os.path.realpath(output) == os.path.realpath(json_file):
        raise click.UsageError(f"the page and the JSON cannot both be written to {output!r}")
    values = merged_values(read_file(file) if file is not None else {}, given, settings)
    out = sys.stderr if json_file == "-" else sys.stdout
    if module is not None:
        _module(module, values, json_file, None if quiet else out, output)
        return
    from tracekit.estimate.fit import SEARCHED
    from tracekit.estimate.spec import spec_of

    if fit is not None and ranks is not None:
        values.pop("mesh", None)  # all of them are tried
        batch = values.get("batch")
        given_batch = batch if isinstance(batch, Mapping) else {}
        fixed = {*given_batch, *values} & set(SEARCHED)
        total = None if "global_batch" in given_batch else ranks
        _search(spec_of(values), ranks, fit, total, fixed, output, json_file, None if quiet else out)
        return
    _estimate(spec_of(values), output, json_file, None if quiet else out)


def _estimate(spec: Spec, output: str | None, json_file: str | None, out: Any) -> None:
    from tracekit.cli.estimate_text import print_estimate
    from tracekit.estimate.estimate import estimate
    from tracekit.report import estimate as report
    from tracekit.report import estimate_json

    result = estimate(spec.shape, spec.plan, spec.hardware, spec.assumptions)
    if output is not None:
        report.write(output, result)
    _write_json(json_file, estimate_json.document(result))
    if out is not None:
        print_estimate(result, output, out)


def _search(
    spec: Spec, ranks: int, memory_bytes: int, data_ranks: int | None, fixed: set[str], output: str | None, json_file: str | None, out: Any
) -> None:
    """``data_ranks``: no global batch is given; a step is then what so many ranks work on, at most ``MOST_TOKENS``."""
    from tracekit.cli.estimate_text import print_fit
    from tracekit.cli.progress import searching
    from tracekit.estimate.fit import fitting, search, usual_batch, why_best
    from tracekit.report import estimate as report
    from tracekit.report import estimate_json
    from tracekit.units import format_bytes

    batch = spec.plan.global_batch if data_ranks is None else usual_batch(spec, data_ranks)
    with searching(out is None) as progress:
        candidates = search(spec, ranks, memory_bytes, batch, fixed, progress)
    fit = len(fitting(candidates))
    sentence = f"{fit} of {len(candidates)} meshes of {ranks} ranks fit into {format_bytes(memory_bytes)}, for {batch} sequences a step."
    why = why_best(candidates)
    if output is not None:
        report.write_fit(output, candidates, spec.shape.name, f"{sentence} {why}".strip())
    _write_json(json_file, estimate_json.fit_document(candidates, ranks, memory_bytes))
    if out is not None:
        print_fit(candidates, f"{sentence} {why}".strip(), output, out)


def _module(target: str, values: dict[str, Any], json_file: str | None, out: Any, output: str | None) -> None:
    """A module that is built on the meta device: its parameters are exact, its activations and FLOP are not known."""
    if output is not None:
        raise click.UsageError("--module has no HTML page; leave --output out")
    try:
        parameters_of_module = importlib.import_module("tracekit.recorder.meta").parameters_of_module
    except ImportError as error:
        raise UsageError("--module needs torch", "pip install 'tracekit[record]'") from error
    from tracekit.cli.estimate_text import print_role
    from tracekit.estimate.estimate import estimate_parameters
    from tracekit.estimate.spec import spec_of
    from tracekit.report import estimate_json

    spec = spec_of({**values, "model": "llama3-8b"})  # the shape is not used
    if spec.plan.mesh.pp * spec.plan.mesh.tp * spec.plan.mesh.cp * spec.plan.mesh.ep > 1:
        raise UsageError("--module knows parameters, not how layers are divided", "leave pp, cp, tp and ep out, or give a model's sizes")
    role = estimate_parameters(parameters_of_module(target), spec.plan, spec.hardware)
    _write_json(json_file, estimate_json.role_document(role, spec.plan, spec.hardware))
    if out is not None:
        print_role(role, spec, out)


def _write_json(json_file: str | None, document: Mapping[str, Any]) -> None:
    if json_file is None:
        return
    from tracekit.files import write_atomically
    from tracekit.report.encoding import encode

    data = encode(document, indent=2) + b"\n"
    if json_file == "-":
        sys.stdout.buffer.write(data)
    else:
        write_atomically(json_file, [data])


def read_file(path: str) -> dict[str, Any]:
    """The plan in a YAML, TOML or JSON file. InputError says what is wrong with it."""
    with open_regular(path) as file:
        data = file.read(MOST_FILE_BYTES + 1)
    if len(data) > MOST_FILE_BYTES:
        raise InputError(f"{path}: larger than {MOST_FILE_BYTES} bytes", "a plan is a few lines; is this the right file?")
    try:
        text = data.decode("utf-8")
        values = _parsed(path, text)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: no UTF-8 text (byte {error.start})", "save it as UTF-8") from error
    except RecursionError as error:
        raise InputError(f"{path}: nested too deeply", "a plan has keys and values of two levels") from error
    except ValueError as error:  # of json, tomllib, and numbers that are too long
        raise InputError(f"{path}: {_first_line(error)}", "see docs/estimate.md for what a plan looks like") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds no keys with values", "see docs/estimate.md for what a plan looks like")
    return values


def _parsed(path: str, text: str) -> Any:
    suffix = Path(path).suffix.lower()
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text)
    if suffix not in (".yaml", ".yml"):
        raise InputError(f"{path}: neither .yaml, .toml nor .json", "name the file by what it holds")
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    """What a parser says, on one line."""
    return " ".join(str(error).split())[:300]


def merged_values(base: Mapping[str, Any], options: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The file's plan with options and ``--set`` put over it."""
    values = dict(base)
    for option, place in _PLACES.items():
        if options.get(option) is not None:
            _put(values, place, options[option])
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise click.UsageError(f"--set {setting!r} is not KEY=VALUE; write it like strategy.bucket_cap_mb=50")
        _put(values, tuple(part.strip() for part in key.split(".")), _value(text.strip()))
    return values


def _put(values: dict[str, Any], place: Sequence[str], value: Any) -> None:
    """Set a key of the plan; where a single word stands (``strategy: fsdp2``) and one of its keys is meant, it becomes a mapping."""
    inner = values
    for key in place[:-1]:
        held = inner.get(key)
        if isinstance(held, str) and key in _WORD_KEYS:
            held = {_WORD_KEYS[key]: held}
        if held is not None and not isinstance(held, Mapping):
            raise UsageError(f"{key} holds no keys, so {'.'.join(place)} cannot be set", "give it as keys with values")
        inner[key] = dict(held or {})
        inner = inner[key]
    if place == ("batch", "global_batch"):
        inner.pop("micro_batches", None)
    if place == ("batch", "micro_batches"):
        inner.pop("global_batch", None)
    inner[place[-1]] = value


def _value(text: str) -> Any:
    """A word of ``--set`` as a plain value: a number, true, false, null, or the word itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
