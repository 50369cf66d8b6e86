"""Who got how many tokens in a mixture of experts: from the recorder's manifests, else from the exchanges between the experts' ranks.

A token is counted once for every expert that it is sent to. Manifests tell it by layer, step and expert. Where an exchange is padded to the
capacity of the experts, a rank does not learn how many of the rows it gets are tokens; then the sum of what the ranks of its group sent to
its experts tells it, if all of them were read. An exchange tells the rows that every rank gets by its split sizes, and neither layer nor
expert; exchanges of equal size tell nothing, they may be padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pandas as pd

from tracekit.collectives.kinds import element_type
from tracekit.collectives.purpose import role_of_axis
from tracekit.job.model import Job
from tracekit.manifest import ExpertLoad
from tracekit.schema import table
from tracekit.units import NULL, plural

#: No layer has more experts, no step more tokens on one rank: what a manifest says beyond is not believed.
MOST_EXPERTS, MOST_TOKENS = 10**5, 10**12

LOADS = table(
    "expert_loads",
    ("layer", "str", "", "name of the layer; '' not known"),
    ("group", "int32", "", "index into job.groups where the rows come from exchanges; -1"),
    ("step", "int64", "", "number of the step; NULL where none is marked"),
    ("part", "int64", "", "what is balanced at once: the step; of exchanges, which match, -1 not matched"),
    ("rank", "int32", "", "global rank"),
    ("expert", "int64", "", "number of the expert; NULL where not known"),
    ("tokens", "int64", "", "tokens it received; NULL where not known"),
    ("bytes", "int64", "bytes", "bytes received; NULL where not known"),
)


@dataclass
class Layer:
    """What a layer is, and what is known of all its ranks together. ``routed`` counts choices of tokens after dropping; None: not known."""

    name: str
    experts: int | None = None
    top_k: int | None = None
    padding: bool | None = None
    capacity: int | None = None
    routed: int | None = None
    dropped: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)


def recorded(job: Job) -> tuple[list[Layer], pd.DataFrame, list[str]]:
    """(layers, table LOADS, notes) by the manifests; no layer where none tells a load."""
    said: dict[tuple[str, int, int], ExpertLoad] = {}
    refused = 0
    for window in job.windows:
        steps = set(window.steps.number.tolist())
        marked = len(window.steps) or window.steps.source != "none"
        for load in window.manifest.experts if window.manifest is not None else ():
            if window.rank is None or (marked and load.step not in steps):
                continue
            if _sound(load):
                said[load.layer, load.step, window.rank] = load
            else:
                refused += 1
    odd = "contradicts itself and is" if refused == 1 else "contradict themselves and are"
    notes = [f"{plural(refused, 'load')} of experts in the manifests {odd} left out"] if refused else []
    members = _members(job)
    rows: dict[str, list[object]] = {name: [] for name in LOADS.names}
    for (layer, step, rank), load in said.items():
        for expert, tokens in zip(load.owned, _received(said, load, rank, members), strict=True):
            for name, value in zip(LOADS.names, (layer, -1, step, step, rank, expert, tokens, NULL), strict=True):
                rows[name].append(value)
    names = list(dict.fromkeys(layer for layer, _, _ in said))
    return [_layer(name, [load for key, load in said.items() if key[0] == name]) for name in names], LOADS.frame(dict(rows)), notes


def _sound(load: ExpertLoad) -> bool:
    counts = [*load.routed, *load.received, load.dropped]
    return (
        len(set(load.owned)) == len(load.owned)
        and all(0 <= expert < MOST_EXPERTS for expert in load.owned)
        and len(load.received) in (0, len(load.owned))
        and (not load.routed or len(load.routed) > max(load.owned, default=0))
        and all(0 <= count <= MOST_TOKENS for count in counts)
    )


def _members(job: Job) -> dict[int, tuple[int, ...]]:
    """The ranks that share one set of experts, of each rank: its group on the expert axis; absent where none is known."""
    found: dict[int, tuple[int, ...]] = {}
    for group in job.groups.groups:
        if group.ranks is not None and role_of_axis(group.axis) == "expert":
            found.update((rank, group.ranks) for rank in group.ranks if len(group.ranks) > len(found.get(rank, ())))
    return found


def _received(said: dict[tuple[str, int, int], ExpertLoad], load: ExpertLoad, rank: int, members: dict[int, tuple[int, ...]]) -> list[int]:
    """Tokens that each expert of a rank received; NULL where that is not known."""
    if load.received:
        return load.received
    sent = [said.get((load.layer, load.step, member)) for member in members.get(rank, ())]
    routed = [other.routed for other in sent if other is not None and other.routed]
    if not sent or len(routed) < len(sent):
        return [NULL] * len(load.owned)
    return [sum(counts[expert] if expert < len(counts) else 0 for counts in routed) for expert in load.owned]


def _layer(name: str, loads: list[ExpertLoad]) -> Layer:
    told = all(load.routed for load in loads)
    limits = {load.capacity for load in loads}
    layer = Layer(
        name,
        experts=max((len(load.routed) or max(load.owned, default=-1) + 1) for load in loads),
        top_k=max(load.top_k for load in loads),
        padding=any(load.padding for load in loads),
        capacity=limits.pop() if len(limits) == 1 else None,
        routed=sum(sum(load.routed) for load in loads) if told else None,
        dropped=sum(load.dropped for load in loads) if told or not any(load.padding for load in loads) else None,
    )
    if layer.dropped is None:
        layer.reasons["dropped_tokens"] = "the exchange is padded, and the router's choices were not recorded"
    return layer


def exchanged(job: Job) -> tuple[dict[int, Layer], pd.DataFrame, list[str]]:
    """(process group -> all of its layers as one without a name, table LOADS, notes) by the dispatches that are not in backward."""
    chosen = job.operations[(job.operations["purpose"] == "expert_dispatch") & (job.operations["phase"] != "backward")]
    if any(len(window.steps) for window in job.windows):
        chosen = chosen[chosen["step_number"] != NULL]
    rows: dict[str, list[object]] = {name: [] for name in LOADS.names}
    for row in _exchanges(job, chosen):
        for name, value in zip(LOADS.names, row, strict=True):
            rows[name].append(value)
    frame = LOADS.frame(dict(rows))
    layers = {group: Layer("") for group in dict.fromkeys(frame["group"].tolist())}
    for layer in layers.values():
        layer.reasons["dropped_tokens"] = "the router's choices are not in a trace"
        layer.reasons["tokens_by_expert"] = "an exchange tells the rank that gets a row, not the expert"
    notes = ["experts are known by the exchanges of their ranks only: all layers of a group together"] if layers else []
    return layers, frame, notes


def _exchanges(job: Job, chosen: pd.DataFrame) -> Iterator[tuple[object, ...]]:
    """A row of LOADS for each dispatch of rows; exchanges of counts (integers) only announce one."""
    windows = [window.operations for window in job.windows]
    columns = ("window", "local", "rank", "group", "match", "dtype", "step_number")
    for window, local, rank, group, match, dtype, step in zip(*(chosen[name].tolist() for name in columns), strict=True):
        size = element_type(str(dtype))[1]
        if str(dtype).startswith(("int", "uint", "bool")):
            continue
        own = windows[window]
        split, elements = str(own["out_split"].iat[local]), int(own["out_elements"].iat[local])
        size_bytes = elements * size if size is not None and elements != NULL else NULL
        yield "", group, step, match, rank, NULL, _rows_of(split), size_bytes


def _rows_of(split: str) -> int:
    """Rows that a rank gets, by the recorded split sizes (``[202, 171]``); NULL where they are not recorded, or cut."""
    text = split.strip()
    parts = text[1:-1].split(",") if text.startswith("[") and text.endswith("]") else []
    numbers = [part.strip() for part in parts]
    if not numbers or not all(number.isascii() and number.isdigit() and len(number) <= 12 for number in numbers):
        return NULL
    return sum(map(int, numbers))
