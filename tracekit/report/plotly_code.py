"""The code that draws figures in a page."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tracekit.errors import TracekitError


@cache
def plotly_source() -> bytes:
    """plotly.js as the installed plotly package ships it, read without importing that package."""
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        raise TracekitError("the package plotly is not installed", "pip install plotly")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_bytes()
