"""Names from a trace in HTML: escaped, and shown by their code where they would act."""

from __future__ import annotations

from markupsafe import Markup, escape

from tracekit.report.text import pieces


def named(text: str) -> Markup:
    """Text of the trace as HTML: escaped, with characters that would act shown by their code (see ``.ctl`` in the style sheet)."""
    parts = pieces(text)
    if len(parts) == 1 and not parts[0][1]:
        return escape(text)
    return Markup("").join(
        Markup('<span class="ctl" data-code="{}">{}</span>').format(code, part) if code else escape(part) for part, code in parts
    )
