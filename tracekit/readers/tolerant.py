"""What the scanner cannot read: one broken event is repaired or skipped, and counted; everything around it stays.

The scanner calls :func:`repair_event` where it stopped and goes on at ``Repair.next``. What it was given back as ``event`` is valid JSON
of one event. The same bytes give the same answer however the file was cut into buffers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from tracekit.readers.metadata import parse_metadata
from tracekit.readers.rewrite import rewrite

_NEAR, _FAR = 1 << 12, 1 << 18  # bytes of one broken event that are looked at: mostly few are enough
_STARTS = 3  # how many starts of events are tried as the end of this one: source text in its name may look like a start
_START = 1 << 10  # bytes that recognising the start of the next event may take
#: With this many bytes after the event's start every event can be decided: a buffer must be able to hold them.
LOOK_AHEAD = _FAR + _START

#: Problem key -> sentence with {count}, for more than one; :func:`sentence` also knows the singular. The first keys matter most: an event
#: with several problems is counted under the first of them.
PROBLEMS: dict[str, str] = {
    "quote": "{count} events with unescaped quotes in a string were repaired",
    "backslash": "{count} events with backslashes that are not JSON escapes were repaired: their backslashes are taken literally",
    "control": "{count} events with raw control characters in a string were repaired",
    "key": "{count} events with a key that lacks its opening quote were repaired",
    "comma": "{count} events with a comma missing or too many were repaired",
    "number": "{count} events with a value that is no JSON (NaN, Infinity) were repaired: the value is taken as missing",
    "truncated": "{count} events were cut off by the end of the file and were left out",
    "skipped": "{count} events were skipped because they are not readable (a quote, a comma or a bracket out of place)",
    "garbage": "{count} places that should hold an event hold something else and were skipped",
    "literal": "{count} names hold backslashes that are not JSON escapes (Windows paths?): every backslash of the file is taken literally",
    "utf8": "{count} names hold bytes that are not UTF-8; those bytes were replaced",
}

_S = rb"[ \t\r\n]*+"
#: A start of an event that no source text in a name imitates by chance: its phase comes first, or its name and then its phase.
_SURE_START = rb'\{ "?(?:ph" : "[A-Za-z]"|name" : "[^"\n]{0,512}+" , "(?:ph|cat)")'.replace(b" ", _S)
_AFTER_EVENT = rb"[},] (?:, )?".replace(b" ", _S)
_FIRST_KEY = re.compile(rb'\{ "?([a-z]{1,8})" :'.replace(b" ", _S))
#: What may come after garbage: an event, or the end of the list.
_AFTER_GARBAGE = re.compile(_SURE_START + rb'|\{ "(?:cat|pid|tid|ts|dur|args|bp)" :|\] (?:\Z|\}|, ["\}])'.replace(b" ", _S))
_TOP_KEY = rb'"(?:traceName|displayTimeUnit|baseTimeNanoseconds|schemaVersion|deviceProperties|distributedInfo|[a-z]+_[a-z_]+)" :'
_LAST_EVENT = re.compile((rb"\} \}? (?=\] (?:, " + _TOP_KEY + rb"|,? \} \Z|\Z))").replace(b" ", _S))

_SINGULAR = (
    ("1 events", "1 event"),
    ("1 places that should hold an event hold", "1 place that should hold an event holds"),
    ("1 names hold", "1 name holds"),
    (" were repaired", " was repaired"),
    (" were cut off by the end of the file and were ", " was cut off by the end of the file and was "),
    (" were skipped", " was skipped"),
    ("they are", "it is"),
)

_JSON_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|(?P<none>.?))', re.DOTALL)
#: Escapes that mean the same in a file whose backslashes are literal otherwise: a writer of paths has no reason to produce them.
_SURE_ESCAPE = re.compile(
    rb'\\(?:["\\/]|u[0-9][0-9a-fA-F]{3}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<none>.?))', re.DOTALL
)
_STRANGE_ESCAPE = re.compile(rb"(?<!\\)(?:\\\\)*+\\[bf]")


@dataclass(frozen=True)
class Repair:
    """``event``: valid JSON of the repaired event, None when it was skipped. ``next``: offset to go on at. ``problem``: key of PROBLEMS."""

    event: bytes | None
    next: int
    problem: str


def repair_event(data: bytes, at: int, final: bool) -> Repair | None:
    """Repair or skip what stands at ``data[at]``, where the scanner failed: an event's ``{``, or garbage between events.

    ``final``: the file ends with ``data``. None: more bytes are needed (never when ``final``, nor with LOOK_AHEAD bytes after ``at``).
    ``Repair.next`` is the offset of what follows the event (a comma, the closing bracket, or the next event) and is always beyond ``at``.
    """
    if data[at : at + 1] != b"{":
        return _skip_garbage(data, at, final)
    for size in (_NEAR, _FAR):
        window = min(at + size, len(data))
        ends = _next_events(data, at, window)
        incomplete = len(data) < at + size + _START and not final
        if incomplete and not ends:
            return None
        end = ends[0] if ends else window
        whole = bool(ends) or size == _FAR or window == len(data)
        found = rewrite(data, at, end, "E", True, whole) or rewrite(data, at, end, "E", False, whole)
        if found is None and incomplete and len(ends) < _STARTS:
            return None
        if found is None:
            found = next(filter(None, (rewrite(data, at, end, "E", balanced=True) for end in ends[1:])), None)
        if found is not None:
            return Repair(found.text, found.next, next((key for key in PROBLEMS if key in found.problems), "comma"))
        if ends:
            return Repair(None, ends[0], "skipped")
        if len(data) <= window:
            return _leave_out_the_rest(data, at)
    return Repair(None, window, "skipped")


def sentence(problem: str, count: int) -> str:
    """PROBLEMS[problem] for this count, in the singular where it is one."""
    text = PROBLEMS[problem].format(count=count)
    for plural, singular in _SINGULAR if count == 1 else ():
        text = text.replace(plural, singular, 1)
    return text


def sentences(counts: Mapping[str, int]) -> list[str]:
    """One sentence for each problem that was met, the gravest first."""
    return [sentence(key, counts[key]) for key in PROBLEMS if counts.get(key)]


def has_literal_backslash(raw: bytes) -> bool:
    """Whether the inside of a string (as the file spells it) shows that its writer did not escape backslashes.

    A backslash that starts no JSON escape shows it, and so do backspace and form feed, which no name holds (``torch\\functional``).
    One such string makes every backslash of its file literal: ``torch\\nn`` is a folder then, not a line break.
    """
    if b"\\" not in raw:
        return False
    return any(match["none"] is not None for match in _JSON_ESCAPE.finditer(raw)) or _STRANGE_ESCAPE.search(raw) is not None


def decode_string(raw: bytes, literal: bool) -> str:
    """The text of a string from its bytes between the quotes. ``literal``: the file's writer did not escape backslashes.

    Bytes that are not UTF-8, and halves of surrogate pairs, become U+FFFD; the result can always be written as UTF-8.
    """
    text = raw.decode(errors="replace")
    if "\\" not in text:
        return text
    escapes = _SURE_ESCAPE if literal else _JSON_ESCAPE
    if any(match["none"] is not None for match in escapes.finditer(raw)):
        return text.replace('\\"', '"')
    try:
        decoded: str = json.loads(f'"{text}"', strict=False)
    except ValueError:  # a raw quote
        return text
    return decoded if decoded.isascii() else decoded.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _next_events(data: bytes, at: int, end: int) -> list[int]:
    """Offsets before ``end`` of the first few ``{`` that look like the start of another event than the one at ``at``."""
    first = _FIRST_KEY.match(data, at, end)
    start = _SURE_START
    if first is not None and first.group(1) not in (b"ph", b"name"):
        start += rb'|\{ "?'.replace(b" ", _S) + first.group(1) + rb'" :'.replace(b" ", _S)  # a file that sorts its keys, or an older layout
    pattern = re.compile(_AFTER_EVENT + rb"(?=" + start + rb")")
    found = islice(pattern.finditer(data, at + 1, min(end + _START, len(data))), _STARTS)
    return [match.end() for match in found if match.end() < end]


def _leave_out_the_rest(data: bytes, at: int) -> Repair:
    """The last event of the file cannot be read: cut off, or broken with the end of the list after it."""
    closing = _LAST_EVENT.search(data, at)
    return Repair(None, len(data), "truncated") if closing is None else Repair(None, closing.end(), "skipped")


def _skip_garbage(data: bytes, at: int, final: bool) -> Repair | None:
    window = min(at + _FAR, len(data))
    found = _AFTER_GARBAGE.search(data, at + 1, min(window + _START, len(data)))
    undecided = len(data) < window + _START and not final
    if found is None or found.start() >= window:
        return None if undecided and window < at + _FAR else Repair(None, window, "garbage")
    return None if undecided and found.end() == len(data) else Repair(None, found.start(), "garbage")


__all__ = [
    "LOOK_AHEAD",
    "PROBLEMS",
    "Repair",
    "decode_string",
    "has_literal_backslash",
    "parse_metadata",
    "repair_event",
    "sentence",
    "sentences",
]
