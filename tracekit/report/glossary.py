"""Terms of docs/glossary.md in one sentence each, for the page to say what a word means where it stands."""

from __future__ import annotations

import re

from markupsafe import Markup

from tracekit.report.named import named

TERMS = {
    "process group": "a set of ranks that communicate with each other, in a fixed order",
    "mesh axis": "one direction of the mesh of ranks; the groups along an axis do the same at the same time",
    "micro-batch": "a part of the batch that passes through the pipeline, or is accumulated, on its own",
    "in flight": "begun in forward and not yet through backward, so that its activations are kept",
    "bubble": "time in which a pipeline stage has nothing to do between the first and the last work of a run",
    "stage": "the layers that one rank of the pipeline axis holds",
    "unit": "the parameters that are gathered and freed together, mostly a layer",
    "exposed": "communication that no compute covers; a copy that neither compute nor communication covers",
    "hidden": "communication or copies while the same rank computes",
    "idle": "nothing on the device",
    "host-bound": "idle because the host had not launched what comes next",
    "wait": "from a rank's own start of a collective until the last rank has arrived",
    "transfer": "from the last arrival in a collective to its end",
    "busbw": "bus bandwidth: what a link carries, algorithm bandwidth times the factor of the kind",
    "algbw": "algorithm bandwidth: full bytes over transfer time",
    "straggler": "the rank that the others wait for",
    "peak": "the most memory that was allocated at one time",
    "reserved": "memory that the allocator took from the device, in use or not",
    "matched": "seen on several ranks and known to be one and the same collective",
}
_WORD = re.compile(r"\b(" + "|".join(sorted(map(re.escape, TERMS), key=len, reverse=True)) + r")(s|es)?\b", re.IGNORECASE)


def explained(text: str) -> Markup:
    """Text as HTML in which the first mention of each term can be asked for its meaning."""
    said: set[str] = set()
    parts: list[Markup] = []
    end = 0
    for found in _WORD.finditer(text):
        term = found[1].lower()
        if term in said:
            continue
        said.add(term)
        parts += [named(text[end : found.start()]), Markup('<dfn tabindex="0" data-tip="{}">{}</dfn>').format(TERMS[term], found[0])]
        end = found.end()
    return Markup("").join([*parts, named(text[end:])])
