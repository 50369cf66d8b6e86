"""What is large in a page is packed: base64 of raw deflate, undone by ``unpack.js``."""

from __future__ import annotations

import zlib
from base64 import b64encode


def packed(content: bytes) -> str:
    """base64 of raw deflate. One zlib gives the same bytes everywhere, as a gallery that is compared needs them."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return b64encode(deflate.compress(content) + deflate.flush()).decode("ascii")
