"""Text from a trace made safe for each place it is shown in: a terminal, HTML, plotly's labels, a script element.

Names in a trace are data. A kernel may be called ``</script>``, hold an ANSI escape, or turn the rest of a line around with U+202E.
"""

from __future__ import annotations

import re

#: Characters that act instead of being seen: C0 and C1 controls, separators that end a line, marks that change the writing
#: direction, invisible spaces, byte order marks, and halves of surrogate pairs (which no UTF-8 can hold).
_ACTING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def code_point(character: str) -> str:
    """``U+202E`` of one character."""
    return f"U+{ord(character):04X}"


def visible(text: str) -> str:
    """``text`` on one line without any character that acts: controls become pictures (``␛``), others their code (``[U+202E]``)."""
    return _ACTING.sub(lambda found: _picture(found[0]), text)


def _picture(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if 0xD800 <= code <= 0xDFFF:
        return "\ufffd"
    return f"[{code_point(character)}]"


def encodable(text: str) -> str:
    """``text`` with halves of surrogate pairs replaced by U+FFFD: what UTF-8 can hold."""
    return _SURROGATE.sub("\ufffd", text)


def pieces(text: str) -> list[tuple[str, str]]:
    """``text`` as (plain text, '') and (character, ``U+202E``) in order, for a page that shows acting characters by their code.

    Controls (C0, C1) come as their picture, because HTML cannot hold them all; the rest stay what they are.
    """
    result: list[tuple[str, str]] = []
    end = 0
    for found in _ACTING.finditer(text):
        if found.start() > end:
            result.append((text[end : found.start()], ""))
        character = found[0]
        shown = character if ord(character) >= 0xA0 and not "\ud800" <= character <= "\udfff" else _picture(character)
        result.append((shown, code_point(character)))
        end = found.end()
    if end < len(text):
        result.append((text[end:], ""))
    return result


def plotly_text(text: str) -> str:
    """``text`` for a plotly label or hover, which understand ``<b>``, ``<a>``, ``<br>`` and entities: all of it is shown as written."""
    return visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def script_json(data: bytes) -> bytes:
    """JSON for ``<script type="application/json">``: nothing in it can end the element, and no line separator is left raw."""
    for raw, escaped in _SCRIPT_ESCAPES:
        data = data.replace(raw, escaped)
    return data


_SCRIPT_ESCAPES = (
    (b"<", b"\\u003c"),
    (b">", b"\\u003e"),
    (b"&", b"\\u0026"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)
