"""The top-level keys of a trace: the text around its list of events, whatever its state."""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from tracekit.readers.rewrite import Rewritten, encode, rewrite

_KEY = re.compile(rb'[ \t\r\n,]*+"((?:[^"\\]|\\.)*+)"[ \t\r\n]*+:[ \t\r\n]*+', re.DOTALL)
_EVENTS_KEY = re.compile(rb'"traceEvents"[ \t\r\n]*+:[ \t\r\n]*+\[?[ \t\r\n]*+\Z')
_NEXT_KEY = re.compile(rb',[ \t\r\n]*+(?="[A-Za-z_][A-Za-z0-9_ .\-]{0,63}+"[ \t\r\n]*+:)')
_WINDOWS = (1 << 12, 1 << 16, 1 << 20)  # bytes of one value that are looked at first
_MOST_BROKEN = 50  # values with problems, before the rest is given up
_MOST_DIGITS = 40  # before the point: int() of a decimal with a huge exponent would build all of them
_LONGEST_NUMBER = 400  # digits; longer ones are kept as text
_DIGITS, _LONG_RUN = str.maketrans("123456789", "000000000"), "0" * (_LONGEST_NUMBER + 1)


def parse_metadata(head: bytes, tail: bytes) -> tuple[dict[str, Any], list[str]]:
    """Top-level keys other than ``traceEvents``, and sentences about what had to be repaired.

    ``head`` is the text before the ``[`` of traceEvents (the whole file where it has none), ``tail`` what follows its ``]``; either may
    be empty or cut off: what is whole is kept. Integers are exact. Of a key that stands twice the last value is kept, but of
    ``distributedInfo`` the first, with all of them in ``_distributedInfo_all``. ``baseTimeNanoseconds`` is an int or absent.
    """
    problems: list[str] = []
    events = _EVENTS_KEY.search(head)
    before = head[: events.start()] if events is not None else head
    pairs = _strict(before, tail)
    if pairs is None:
        pairs = _pairs(before, problems) + _pairs(tail, problems)
    return _unique([(key, value) for key, value in pairs if key != "traceEvents"], problems), problems


def _strict(before: bytes, tail: bytes) -> list[tuple[str, Any]] | None:
    """All pairs of a healthy text by json; None where it is not healthy."""
    opened, closed = before.rstrip(b" \t\r\n"), tail.strip(b" \t\r\n")
    if not closed.endswith(b"}"):
        return None
    opened = opened if opened.endswith((b"{", b",")) else opened + b","
    found: list[list[tuple[str, Any]]] = [[]]

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found[0] = pairs  # the outermost object is the last to be closed
        return dict(pairs)

    try:
        text = (opened + b'"traceEvents":0' + closed).decode()
        parse_int = _integer if _LONG_RUN in text.translate(_DIGITS) else int  # json knows int itself: lists of ranks are long
        json.loads(text, object_pairs_hook=keep, parse_int=parse_int, parse_float=_number, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return [tuple(pair) for pair in _without_halves(found[0])] if "\\u" in text else found[0]


def _pairs(text: bytes, problems: list[str]) -> list[tuple[str, Any]]:
    """Pairs of a damaged text, one by one."""
    pairs: list[tuple[str, Any]] = []
    at = text.find(b"{") + 1 if text.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") else 0
    broken = 0
    while (key := _KEY.match(text, at)) is not None and broken < _MOST_BROKEN:
        value = _value(text, key.end())
        name = _text(encode(key.group(1))[0], problems)
        broken += value is None or bool(value.problems)
        if value is not None:
            pairs.append((str(name), _text(value.text, problems, quoted=False)))
            _note(problems, value.problems, str(name))
            at = value.next
            continue
        following = _NEXT_KEY.search(text, key.end())
        _add(problems, f"the value of the top-level key {_shown(str(name))} is cut off or broken and was left out")
        if following is None:
            break
        at = following.end()
    if broken >= _MOST_BROKEN:
        _add(problems, f"{broken} top-level keys are damaged; what follows them was not read")
    if re.search(rb",[ \t\r\n]*+\}[ \t\r\n]*+\Z", text[-1024:]):
        _add(problems, "a comma too many after the last top-level key was ignored")
    return pairs


def _value(text: bytes, at: int) -> Rewritten | None:
    """The value at ``at``. Most are short: no more of the text is looked at than it takes."""
    for size in _WINDOWS:
        value = rewrite(text, at, at + size, "O", whole=False) if at + size < len(text) else None
        if value is not None and value.next < at + size:
            return value
    return rewrite(text, at, len(text), "O")


def _text(raw: bytes, problems: list[str], quoted: bool = True) -> Any:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        _add(problems, "bytes that are not UTF-8 in the top-level keys were replaced")
    value = json.loads(f'"{text}"' if quoted else text, parse_int=_integer, parse_float=_number)
    return _without_halves(value) if "\\u" in text else value


def _without_halves(value: Any) -> Any:
    """The value with U+FFFD for halves of surrogate pairs, which no file can hold as UTF-8."""
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"), parse_int=_integer)


def _note(problems: list[str], kinds: frozenset[str], name: str) -> None:
    what = {
        "quote": "unescaped quotes",
        "backslash": "backslashes that are not JSON escapes",
        "control": "raw control characters",
        "comma": "a comma missing or too many",
        "key": "a key without its opening quote",
        "number": "a value that is no JSON",
    }
    for kind in sorted(kinds):
        _add(problems, f"{what[kind]} in the top-level key {_shown(name)}: repaired")


def _add(problems: list[str], problem: str) -> None:
    if problem not in problems:
        problems.append(problem)


def _shown(name: str) -> str:
    return repr(name if len(name) <= 60 else name[:57] + "...")


def _unique(pairs: list[tuple[str, Any]], problems: list[str]) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    infos = [value for key, value in pairs if key == "distributedInfo"]
    for key, value in pairs:
        if key in metadata and key != "distributedInfo" and metadata[key] != value:
            _add(problems, f"the top-level key {_shown(key)} stands twice in the file; the last value is used")
        if key != "distributedInfo" or key not in metadata:
            metadata[key] = value
    if len(infos) > 1:
        metadata["_distributedInfo_all"] = infos
        ranks = " and ".join(str(info.get("rank", "none"))[:20] if isinstance(info, dict) else "none" for info in infos[:4])
        times = "twice" if len(infos) == 2 else f"{len(infos)} times (more than twice)"
        problems.append(f"distributedInfo stands {times} in the file, with rank {ranks}")
    _settle_base_time(metadata, problems)
    return metadata


def _settle_base_time(metadata: dict[str, Any], problems: list[str]) -> None:
    if "baseTimeNanoseconds" not in metadata:
        return
    value = metadata.pop("baseTimeNanoseconds")
    base = _whole_number(str(value).strip()) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    if base is None or not -(2**63) < base < 2**63:
        problems.append("baseTimeNanoseconds is not a number of nanoseconds and was ignored: the start of this file's times is unknown")
        return
    metadata["baseTimeNanoseconds"] = base


def _whole_number(text: str) -> int | None:
    """What stands before the point; None for what is no number, or has more digits than anything that is measured."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    return int(value) if value.is_finite() and value.adjusted() < _MOST_DIGITS else None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _integer(text: str) -> int | str:
    return int(text) if len(text) <= _LONGEST_NUMBER else text


def _number(text: str) -> int | float | str:
    """A decimal: exact where it is a whole number that a float would round, text where it is beyond floats."""
    value = float(text)
    if value in (float("inf"), float("-inf")) or len(text) > _LONGEST_NUMBER:
        return text
    return int(Decimal(text)) if 2**53 <= abs(value) < 2**70 and Decimal(text) % 1 == 0 else value
