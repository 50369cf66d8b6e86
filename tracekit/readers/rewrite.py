"""Rewrites one broken JSON value as valid JSON, token by token; the text of numbers is never touched.

What can be wrong: quotes inside a string that are not escaped, backslashes that are no escape, control characters inside a string,
commas missing or too many, a key without quotes, NaN and Infinity. The only real choice is where a string ends. Every quote that could
end it is tried, the likeliest first, first with no string, then with one, two ... strings that hold raw quotes; a choice that leads
nowhere is taken back. Work is bounded by a multiple of the text's length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

#: Keys of a trace event (Trace Event Format); after a string of an event the next key is one of these.
EVENT_KEYS = frozenset(
    b"ph cat name pid tid ts dur args id bp s tts tdur cname sf esf stack estack id2 scope bind_id flow_in flow_out".split()
)

_NEEDED = frozenset((b"ph", b"pid"))

MAX_DEPTH = 100
_MAX_ODD_STRINGS = 3  # strings with raw quotes in one value
_WORK, _WORK_AT_LEAST, _TOKEN = 8, 1 << 14, 4  # looks at a byte that each byte of text is worth, all choices together

_SPACE = re.compile(rb"[ \t\r\n]*+")
_QUOTE_OR_ESCAPE = re.compile(rb'"|\\.?', re.DOTALL)
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?(?=[ \t\r\n,}\]]|\Z)")
_LITERAL = re.compile(rb"(?:true|false|null)(?=[ \t\r\n,}\]]|\Z)")
_NO_NUMBER = re.compile(rb"[A-Za-z0-9_+.\-]*+(?=[ \t\r\n,}\]]|\Z)")
_BARE_KEY = re.compile(rb'([A-Za-z_][A-Za-z0-9_ ]{0,63}+)"?[ \t\r\n]*+:')
_NEXT_KEY = re.compile(rb'[ \t\r\n]*+(,?)[ \t\r\n]*+"([^"\\]{1,64}+)"[ \t\r\n]*+:[ \t\r\n]*+(["\[{0-9tfnNI\-]?)')
_END_OF_EVENT = re.compile(rb"[ \t\r\n]*+,?[ \t\r\n]*+\}[ \t\r\n]*+(?:,[ \t\r\n]*+\{|\]|,?[ \t\r\n]*+\Z)")
_END_OF_OBJECT = re.compile(rb"[ \t\r\n]*+,?[ \t\r\n]*+\}[ \t\r\n]*+(?:[,}\]]|\Z)")
_END_OF_ELEMENT = re.compile(rb'[ \t\r\n]*+(?:,[ \t\r\n]*+["\[{0-9tfnNI\-]|,?[ \t\r\n]*+\])')
_MAYBE_END = re.compile(rb'[ \t\r\n]*+(?:[,}\]"]|\Z)')
_AFTER_EVENT = re.compile(rb"[ \t\r\n]*+(?:[,\]{]|\Z)")
_AFTER_VALUE = re.compile(rb"[ \t\r\n]*+(?:[,}\"]|\Z)")
_AFTER_KEY = re.compile(rb"[ \t\r\n]*+:")
_IN_STRING = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|[\\"\x00-\x1f]')
_LITERALLY = re.compile(rb'\\"|[\\"\x00-\x1f]')

_STRONG, _WEAK, _NO = 2, 1, 0


@dataclass(frozen=True)
class Rewritten:
    """``text``: valid JSON, but for bytes that are not UTF-8. ``next``: offset after the value. ``problems``: what was repaired."""

    text: bytes
    next: int
    problems: frozenset[str]


class _State(NamedTuple):
    """A position in the text. ``stack`` holds one letter a container: E event, O other object, A array."""

    at: int
    expect: str  # key, value or after
    stack: str
    first: bool
    seen: frozenset[bytes]  # keys of the outermost object so far
    written: int  # how many pieces of output belong to this state
    problems: frozenset[str]
    odd: int  # strings with raw quotes that may still come


class _Deadend(Exception):  # noqa: N818 - a turn of the search, never an error of the caller
    pass


def rewrite(data: bytes, at: int, end: int, outermost: str, balanced: bool = False, whole: bool = True) -> Rewritten | None:
    """The value that starts at ``at`` and lies before ``end`` as valid JSON; None where no reading of it makes sense.

    ``outermost`` says what the value is: ``E`` an event in the list of events, ``O`` the value of a key. ``balanced``: raw quotes
    come in pairs inside every string. A string of source text keeps that; one that swallowed the start of another event does not.
    ``whole`` is False where the value may go on after ``end``: if a plain reading comes to the end, no other is tried.
    """
    search = _Search(data[at:end], outermost, balanced)
    for odd in range(_MAX_ODD_STRINGS + 1):
        found = search.run(odd)
        if found is not None:
            return replace(found, next=at + found.next)
        if search.came_to_the_end and not whole:
            return None
    return None


class _Search:
    def __init__(self, data: bytes, outermost: str, balanced: bool) -> None:
        self.data = data
        self.outermost = outermost
        self.balanced = balanced
        self.out: list[bytes] = []
        self.choices: list[tuple[_State, Iterator[int]]] = []
        self.work = 0
        self.came_to_the_end = False

    def run(self, odd: int) -> Rewritten | None:
        if odd < 2:  # one budget for the plain reading, one for all others together
            self.work = _WORK * len(self.data) + _WORK_AT_LEAST
        self.choices.clear()
        state: _State | None = _State(0, "value", "", True, frozenset(), 0, frozenset(), odd)
        while state is not None and self.work > 0:
            try:
                if state.expect == "after" and not state.stack:
                    return self.finish(state)
                state = self.step(state)
            except _Deadend:
                state = self.another_choice()
        return None

    def finish(self, state: _State) -> Rewritten:
        follows = _AFTER_EVENT if self.outermost == "E" else _AFTER_VALUE
        if follows.match(self.data, state.at) is None:
            raise _Deadend
        quotes = "quote" in state.problems or not state.problems
        if self.outermost == "E" and quotes and not state.seen >= _NEEDED:
            raise _Deadend  # a piece of source text that looks like an event
        return Rewritten(b"".join(self.out[: state.written]), state.at, state.problems)

    # One token -------------------------------------------------------------------------------------------------------

    def step(self, state: _State) -> _State:
        at = _end(_SPACE.match(self.data, state.at))
        if at >= len(self.data):
            self.came_to_the_end = True
            raise _Deadend
        self.work -= at - state.at + (1 if state.odd == 0 else _TOKEN)
        byte = self.data[at : at + 1]
        if state.expect == "key":
            return self.key(state, at, byte)
        if state.expect == "value":
            return self.value(state, at, byte)
        return self.after(state, at, byte)

    def key(self, state: _State, at: int, byte: bytes) -> _State:
        if byte == b"}":
            return self.close(state, at, b"}", () if state.first else ("comma",))
        if byte == b",":
            return self.move(state, at + 1, "key", problems=("comma",))
        if byte == b'"':
            return self.string(state, at)
        bare = _BARE_KEY.match(self.data, at)
        if bare is None:
            raise _Deadend
        return self.named(state, bare.group(1).strip(), bare.end(1), bare.end(), ("key",))

    def named(self, state: _State, name: bytes, text_end: int, after_colon: int, problems: tuple[str, ...]) -> _State:
        self.work -= after_colon - text_end
        if state.stack == "E" and name in state.seen:
            raise _Deadend  # an event says nothing twice: the string before this "key" has not ended yet
        seen = state.seen | {name} if len(state.stack) == 1 else state.seen
        text = (b"" if state.first else b",") + b'"' + name + b'":'
        return self.move(state, after_colon, "value", text, problems, first=False, seen=seen)

    def value(self, state: _State, at: int, byte: bytes) -> _State:
        comma = b"" if not state.stack.endswith("A") or state.first else b","
        if byte == b'"':
            return self.string(state, at)
        if byte in b"{[":
            if len(state.stack) >= MAX_DEPTH:
                raise _Deadend
            kind = "A" if byte == b"[" else "O" if state.stack else self.outermost
            expect = "value" if byte == b"[" else "key"
            return self.move(state, at + 1, expect, comma + byte, stack=state.stack + kind, first=True)
        if state.stack.endswith("A") and byte in b"],":
            if byte == b"]":
                return self.close(state, at, b"]", () if state.first else ("comma",))
            return self.move(state, at + 1, "value", problems=("comma",))
        plain = _NUMBER.match(self.data, at) or _LITERAL.match(self.data, at)
        if plain is not None:
            return self.move(state, plain.end(), "after", comma + plain.group(), first=False)
        other = _NO_NUMBER.match(self.data, at)
        if other is None:
            raise _Deadend
        return self.move(state, other.end(), "after", comma + b"null", ("number",), first=False)

    def after(self, state: _State, at: int, byte: bytes) -> _State:
        inside = "value" if state.stack[-1] == "A" else "key"
        if byte == b",":
            return self.move(state, at + 1, inside)
        if byte == (b"]" if inside == "value" else b"}"):
            return self.close(state, at, byte, ())
        if byte == b'"' or (inside == "value" and byte in b"{[-0123456789tfn"):
            return self.move(state, at, inside, problems=("comma",))
        raise _Deadend

    def close(self, state: _State, at: int, byte: bytes, problems: tuple[str, ...]) -> _State:
        return self.move(state, at + 1, "after", byte, problems, stack=state.stack[:-1], first=False)

    def move(
        self,
        state: _State,
        at: int,
        expect: str,
        text: bytes = b"",
        problems: tuple[str, ...] = (),
        stack: str | None = None,
        first: bool | None = None,
        seen: frozenset[bytes] | None = None,
        odd: int | None = None,
    ) -> _State:
        del self.out[state.written :]
        if text:
            self.out.append(text)
        self.work -= len(text)
        return _State(
            at,
            expect,
            state.stack if stack is None else stack,
            state.first if first is None else first,
            state.seen if seen is None else seen,
            len(self.out),
            state.problems.union(problems) if problems else state.problems,
            state.odd if odd is None else odd,
        )

    # Strings ---------------------------------------------------------------------------------------------------------

    def string(self, state: _State, at: int) -> _State:
        here = state._replace(at=at)
        self.choices.append((here, self.ends(here)))
        raise _Deadend  # every end of it is a choice

    def another_choice(self) -> _State | None:
        while self.choices and self.work > 0:
            state, ends = self.choices[-1]
            for end in ends:
                try:
                    return self.ended(state, end)
                except _Deadend:
                    continue
            self.choices.pop()
        return None

    def ended(self, state: _State, end: int) -> _State:
        """The state after the string that starts at ``state.at`` when the quote at ``end`` closes it."""
        self.work -= end - state.at
        text, problems = encode(self.data[state.at + 1 : end])
        odd = state.odd - ("quote" in problems)
        if odd < 0 or (odd < state.odd and self.balanced and _raw_quotes(self.data[state.at + 1 : end]) % 2):
            raise _Deadend
        if state.expect == "value":
            comma = b"" if not state.stack.endswith("A") or state.first else b","
            return self.move(state, end + 1, "after", comma + b'"' + text + b'"', problems, first=False, odd=odd)
        colon = _AFTER_KEY.match(self.data, end + 1)
        if colon is None or odd < state.odd:
            raise _Deadend
        return self.named(state, text, end + 1, colon.end(), problems)

    def ends(self, state: _State) -> Iterator[int]:
        """Offsets of quotes that may end the string, the likeliest first: a clean first quote, then strong ones, then weak ones."""
        weak: list[int] = []
        first = True
        before = state.at
        for quote in _QUOTE_OR_ESCAPE.finditer(self.data, state.at + 1):
            self.work -= 1 + quote.end() - before
            before = quote.end()
            if self.work <= 0:
                return
            escaped = quote.group() == b'\\"'
            if quote.group() != b'"' and not escaped:
                continue
            strength = self.strength(state, quote.end(), escaped)
            if strength == _STRONG or (first and strength == _WEAK and not escaped):
                yield quote.end() - 1
            elif strength == _WEAK:
                weak.append(quote.end() - 1)
            first = first and escaped
            if state.odd == 0 and not first:
                break
        else:
            self.came_to_the_end = True
        yield from weak

    def strength(self, state: _State, after: int, escaped: bool) -> int:
        """How much the text at ``after`` looks like what follows the string of ``state``."""
        if state.expect == "key":
            return _STRONG if _AFTER_KEY.match(self.data, after) and not escaped else _NO
        inside = state.stack[-1:]
        following = None if inside == "A" else _NEXT_KEY.match(self.data, after)
        if following is not None:
            comma, key, value = following.groups()
            strong = key in EVENT_KEYS and key not in state.seen if inside == "E" else bool(value)
            return _STRONG if strong and comma else _WEAK
        end = {"A": _END_OF_ELEMENT, "E": _END_OF_EVENT}.get(inside, _END_OF_OBJECT)
        if end.match(self.data, after):
            return _WEAK if escaped else _STRONG
        return _WEAK if _MAYBE_END.match(self.data, after) else _NO


def _end(match: re.Match[bytes] | None) -> int:
    return match.end() if match is not None else 0


def encode(raw: bytes) -> tuple[bytes, tuple[str, ...]]:
    """The inside of a string as valid JSON, and what had to be repaired.

    One backslash that is no JSON escape makes every backslash of the string literal: ``torch\\nn\\modules`` is a path throughout.
    """
    problems: set[str] = set()
    literal = False
    for special in _IN_STRING.finditer(raw):
        text = special.group()
        if text == b"\\":
            literal = True
            problems.add("backslash")
        elif text == b'"':
            problems.add("quote")
        elif len(text) == 1:
            problems.add("control")
    if not problems:
        return raw, ()
    pattern = _LITERALLY if literal else _IN_STRING
    return pattern.sub(_escaped, raw), tuple(sorted(problems))


def _raw_quotes(raw: bytes) -> int:
    return sum(special.group() == b'"' for special in _IN_STRING.finditer(raw))


def _escaped(special: re.Match[bytes]) -> bytes:
    text: bytes = special.group()
    if len(text) > 1:
        return text
    return b"\\" + text if text in b'\\"' else b"\\u%04x" % text[0]
