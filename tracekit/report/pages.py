"""What all pages share: the templates, style sheets and scripts of this folder, and how a name from a trace gets into HTML."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from tracekit.report import overview
from tracekit.report.text import pieces, visible

_TEMPLATES = Path(__file__).parent / "templates"


@cache
def template(name: str) -> jinja2.Template:
    """A template by its file name. Filters: ``named`` for names from a trace, ``visible`` for them in attributes, figures of a report."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["named"] = named
    environment.filters["visible"] = visible
    environment.filters["quantity"] = overview.format_us
    environment.filters["percent"] = overview.percent
    return environment.get_template(name)


def asset(name: str) -> Markup:
    """A style sheet or script, to stand in the page itself."""
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


def named(text: str) -> Markup:
    """Text of the trace as HTML: escaped, with characters that would act shown by their code (see ``.ctl`` in the style sheet)."""
    parts = pieces(text)
    if len(parts) == 1 and not parts[0][1]:
        return escape(text)
    return Markup("").join(
        Markup('<span class="ctl" data-code="{}">{}</span>').format(code, part) if code else escape(part) for part, code in parts
    )
