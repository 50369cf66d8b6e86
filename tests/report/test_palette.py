"""Colours that stand in one chart can be told apart, also by readers who see no red or no green."""

from itertools import combinations

import numpy as np
import pytest

from tracekit.report.palette import COLORS

#: Linear RGB as it is seen: everybody; protanopia and deuteranopia after Machado, Oliveira and Fernandes (2009), severity 1.
SIGHT = {
    "normal": np.eye(3),
    "protan": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deutan": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
}
TOGETHER = {
    "kinds of work": ("compute", "copy", "idle", "exposed", "c1", "c2", "c3", "c4", "c5"),
    "parts of a step": ("compute", "hidden", "exposed", "copy", "idle"),
    "owners of memory": ("p0", "p2", "p4", "c1", "c2", "exposed", "p1", "p6", "p3", "idle", "p7"),
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])


def lab(color: str, sight: str) -> np.ndarray:
    """CIE L*a*b* of an sRGB colour as it is seen."""
    coded = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    relative = XYZ @ np.clip(SIGHT[sight] @ linear, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    x, y, z = np.where(relative > 0.008856, np.cbrt(relative), 7.787 * relative + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", [0, 1])
@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("chart", TOGETHER)
def test_colours_of_one_chart_differ(scheme: int, sight: str, chart: str) -> None:
    seen = {role: lab(COLORS[role][scheme], sight) for role in TOGETHER[chart]}
    near = {(a, b): float(np.linalg.norm(seen[a] - seen[b])) for a, b in combinations(seen, 2)}
    assert min(near.values()) >= 12, min(near, key=near.__getitem__)
