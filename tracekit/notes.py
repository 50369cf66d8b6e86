"""What readers and joins have to tell of their input: data where it is met, a sentence where it is shown.

A loader returns ``note("size_disagrees", group="tp", given=4, listed=8)``; ``sentence`` makes English of it. Whoever asks for notes of one
sort compares ``code``, never words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tracekit.sentences import SENTENCES
from tracekit.units import listed, shortened

#: A figure, a name of the trace, or several of them; what can be kept in a cache and compared.
Value = str | int | float | bool | None | tuple["Value", ...]


@dataclass(frozen=True)
class Note:
    """One observation: ``code`` is a key of SENTENCES, ``count`` how many cases it stands for, ``detail`` its figures by name."""

    code: str
    count: int = 1
    detail: tuple[tuple[str, Value], ...] = ()

    def __getitem__(self, name: str) -> Value:
        """One value of the detail. KeyError where it has none of that name."""
        return dict(self.detail)[name]


def note(code: str, count: int = 1, **detail: Value) -> Note:
    """A note by the names of its figures."""
    return Note(code, int(count), tuple(detail.items()))


def text_note(text: str) -> Note:
    """A note of what was put into words already, as an error's message is."""
    return note("text", text=text)


def restored(plain: Iterable[Any]) -> Note:
    """A note as it came back from JSON, where tuples are lists: (code, count, detail)."""
    code, count, detail = plain
    return Note(str(code), int(count), tuple((str(name), _frozen(value)) for name, value in detail))


def sentence(found: Note) -> str:
    """The note for a reader. KeyError for a code without a sentence."""
    values: dict[str, Any] = {"count": found.count, **dict(found.detail)}
    template = SENTENCES[found.code]
    return template.format_map({name: _Shown(value) for name, value in values.items()}) if isinstance(template, str) else template(values)


def sentences(found: Iterable[Note]) -> list[str]:
    """The notes for a reader, one sentence each."""
    return [sentence(one) for one in found]


def _frozen(value: Any) -> Value:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class _Shown:
    """A value that knows the formats of SENTENCES."""

    value: Value

    def __format__(self, form: str) -> str:
        value = self.value
        if isinstance(value, tuple):
            return listed([shortened(item) if isinstance(item, str) else item for item in value], int(form or 6))
        if isinstance(value, int) and "|" in form:
            one, _, many = form.removeprefix("?").partition("|")
            word = one if value == 1 else many
            return word if form.startswith("?") else f"{value:,} {word}"
        return format(value, form)
