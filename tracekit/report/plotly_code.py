"""The code that draws figures in a page."""

from __future__ import annotations

from base64 import b64encode
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


@cache
def plotly_element() -> bytes:
    """plotly for one page: packed, to be run by ``page.js`` when a chart is about to be seen. It makes up most of a page otherwise."""
    from isal import isal_zlib

    source = plotly_source()
    deflate = isal_zlib.compressobj(3, isal_zlib.DEFLATED, -isal_zlib.MAX_WBITS)  # a tenth of zlib's time for a tenth more bytes
    text = b64encode(deflate.compress(source) + deflate.flush()).decode("ascii")
    return f'<script type="text/plain" id="plotly" data-size="{len(source)}">{text}</script>'.encode()
