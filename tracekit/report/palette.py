"""Colours by what they stand for, in a light and a dark version: the same part of a step has one colour in every chart."""

from __future__ import annotations

from collections.abc import Iterable

#: role -> (on a light page, on a dark page)
COLORS = {
    "compute": ("#2f6f95", "#5b9fc4"),
    "hidden": ("#a5c9d9", "#31596d"),
    "exposed": ("#d64a2a", "#ef6b4b"),
    "copy": ("#cf9a28", "#dcb04c"),
    "idle": ("#d3d8d5", "#3d4745"),
    "c1": ("#e0873a", "#f2a862"),
    "c2": ("#ad2f5f", "#e0708f"),
    "c3": ("#8c3c22", "#c67552"),
    "c4": ("#a0487f", "#d685b4"),
    "c5": ("#b0891f", "#dcc35c"),
    "p0": ("#5a5fc0", "#8e93e6"),
    "p1": ("#1e9474", "#47bb9a"),
    "p2": ("#ad4a80", "#d479a9"),
    "p3": ("#7d6a1c", "#b39d48"),
    "p4": ("#4583b8", "#74abd8"),
    "p5": ("#98593a", "#c98a6a"),
    "p6": ("#6b8a2b", "#9dbb5c"),
    "p7": ("#776a8d", "#a698bd"),
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
    "gathered parameters": "c1",
    "unsharded gradients": "c2",
    "communication buffers": "exposed",
    "activations": "p1",
    "inputs": "p6",
    "temporaries": "p3",
    "before recording": "idle",
    "unattributed": "p7",
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
