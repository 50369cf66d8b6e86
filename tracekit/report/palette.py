"""Colours by what they stand for, in a light and a dark version: the same part of a step has one colour in every chart."""

from __future__ import annotations

from collections.abc import Iterable

#: role -> (on a light page, on a dark page). What stands in one chart can be told apart without red or green sight as well (a test).
COLORS = {
    "compute": ("#2f6f95", "#58aade"),
    "hidden": ("#a5c9d9", "#31596d"),
    "exposed": ("#dc240b", "#d95e4f"),
    "copy": ("#f0b10a", "#f6ba4a"),
    "idle": ("#d3d8d5", "#3d4745"),
    "c1": ("#eeb279", "#c66a00"),
    "c2": ("#ad2f5f", "#b9226f"),
    "c3": ("#4a0908", "#eebd90"),
    "c4": ("#c594a2", "#f5c2e6"),
    "c5": ("#7a522e", "#ebf024"),
    "p0": ("#5a5fc0", "#5439eb"),
    "p1": ("#34a984", "#66a384"),
    "p2": ("#512545", "#c982b4"),
    "p3": ("#4f2f04", "#cfc2b3"),
    "p4": ("#4583b8", "#a0b8ef"),
    "p5": ("#98593a", "#c98a6a"),
    "p6": ("#5c7d3d", "#506f28"),
    "p7": ("#b59bc6", "#7140b5"),
}
#: Colour scale of a heat map from nothing to the maximum.
HEAT = (("#f1f3f1", "#f6d9b8", "#ea9a5f", "#d64a2a", "#7f1d17"), ("#1b2221", "#4a2f23", "#95452c", "#e0653f", "#ffd3a6"))

#: Colours that stand for nothing in particular, in order.
PLAIN = tuple(role for role in COLORS if role.startswith("p") and role[1:].isdigit())
#: What communicates is warm, what computes is cold.
_EXACT = {
    "all_reduce": "exposed",
    "all_gather": "c1",
    "reduce_scatter": "c2",
    "all_to_all": "c3",
    "send": "c4",
    "recv": "c5",
    "phase": "p0",
    "parameters": "p0",
    "gradients": "p2",
    "optimizer state": "p4",
    "buffers": "p5",
    "gathered parameters": "c1",
    "unsharded gradients": "c2",
    "communication buffers": "exposed",
    "activations": "p1",
    "inputs": "p6",
    "temporaries": "p3",
    "before recording": "idle",
    "unattributed": "p7",
    "waiting": "p7",
    "finding": "p1",
    "reserved": "c3",
}
#: First hit decides; words of a name in lower case.
_WORDS = (
    ("hidden", "hidden"),
    ("overlapped", "hidden"),
    ("idle", "idle"),
    ("copies", "copy"),
    ("copy", "copy"),
    ("memcpy", "copy"),
    ("memset", "copy"),
    ("compute", "compute"),
    ("exposed", "exposed"),
    ("communication", "exposed"),
    ("wait", "exposed"),
)


def roles(names: Iterable[str]) -> list[str]:
    """A role for each name; no two names of one chart share one while there are enough."""
    names = list(names)
    taken: set[str] = {_EXACT[name] for name in names if name in _EXACT}
    result: list[str] = []
    for name in names:
        if name in _EXACT:
            result.append(_EXACT[name])
            continue
        lowered = name.lower()
        role = next((role for word, role in _WORDS if word in lowered and role not in taken), None)
        if role is None:
            role = next((plain for plain in PLAIN if plain not in taken), PLAIN[len(result) % len(PLAIN)])
        taken.add(role)
        result.append(role)
    return result


def css() -> str:
    """Custom properties ``--role-compute`` ... for both colour schemes."""

    def block(index: int) -> str:
        lines = [f"--role-{role}:{pair[index]}" for role, pair in COLORS.items()]
        lines += [f"--heat-{step}:{color}" for step, color in enumerate(HEAT[index])]
        return ";".join(lines)

    return f":root{{{block(0)}}}@media (prefers-color-scheme:dark){{:root:not(.paper){{{block(1)}}}}}"
