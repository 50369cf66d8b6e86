"""Rows of torch's ``export_memory_timeline(... .raw.json.gz)``: its own categories over time, without addresses.

A row is [time ns, action, signed bytes, category]. The sign of the bytes decides, whatever the action (1 there before, 2 created, 3 moved
to another category, 4 destroyed); time -1 stands for what was there before the profile.
"""

from __future__ import annotations

import numpy as np

from tracekit.memory.downsample import downsample
from tracekit.memory.ownership import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    TEMPORARIES,
    UNKNOWN,
)
from tracekit.memory.peak import Holding
from tracekit.memory.summary import BUCKETS, Curve, DeviceMemory
from tracekit.trace.events import Int64Array
from tracekit.units import NULL
from tracekit.vocabulary import CATEGORIES

#: torch's order: parameter, optimizer state, input, temporary, activation, gradient, autograd detail, none.
_CATEGORIES = (PARAMETERS, OPTIMIZER_STATE, INPUTS, TEMPORARIES, ACTIVATIONS, GRADIENTS, TEMPORARIES, UNKNOWN)
_NAMES = ("", "", "", "", "", "", "autograd detail", "")


def of_rows(rows: Int64Array, device: str) -> DeviceMemory:
    """The memory of one device by these rows, an array of four columns; peak, categories and curve."""
    before = rows[:, 0] < 0
    order = np.concatenate([np.flatnonzero(before), np.flatnonzero(~before)[np.argsort(rows[~before, 0], kind="stable")]])
    rows = rows[order]
    older = int(before.sum())
    codes = np.where((rows[:, 3] >= 0) & (rows[:, 3] < len(_CATEGORIES)), rows[:, 3], len(_CATEGORIES) - 1)
    curves = np.stack([_running(np.where(codes == code, rows[:, 2], 0), older) for code in range(len(_CATEGORIES))])
    # A move is two rows of one moment, out of one category and into another: only the end of a moment was ever true.
    time = rows[older:, 0]
    ends = np.concatenate([[0], 1 + np.flatnonzero(np.append(time[1:] != time[:-1], True)[: len(time)])]).astype(np.int64)
    curves, time = curves[:, ends], np.concatenate([time[:1], time[ends[1:] - 1]])
    allocated = curves.sum(axis=0)
    peak = int(allocated.argmax())
    amounts: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for code, amount in zip(_CATEGORIES, curves[:, peak].tolist(), strict=True):
        amounts[CATEGORIES[code]] += amount
    found = [
        Holding(CATEGORIES[code], "", name, amount, 0)
        for code, name, amount in zip(_CATEGORIES, _NAMES, curves[:, peak].tolist(), strict=True)
        if amount
    ]
    places = downsample(allocated, BUCKETS)
    totals: dict[str, int] = {name: sum(curves[i] for i, code in enumerate(_CATEGORIES) if CATEGORIES[code] == name) for name in CATEGORIES}
    return DeviceMemory(
        device=device,
        source="timeline",
        peak=int(allocated[peak]),
        peak_ns=int(time[peak]) if len(time) else None,
        start=int(allocated[0]),
        end=int(allocated[-1]),
        categories=amounts,
        holdings=sorted(found, key=lambda row: -row.bytes),
        curve=Curve(
            time[places] if len(time) else np.zeros(len(places), np.int64),
            allocated[places],
            np.full(len(places), NULL, np.int64),
            {name: np.asarray(curve)[places] for name, curve in totals.items() if np.any(curve)},
        ),
    )


def _running(change: Int64Array, older: int) -> Int64Array:
    """Running sum behind the rows that are older than the profile: entry 0 is their sum."""
    total = np.cumsum(change, dtype=np.int64)
    start = total[older - 1 : older] if older else np.zeros(1, np.int64)
    return np.concatenate([start, total[older:]])
