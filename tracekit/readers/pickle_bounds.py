"""What loading a pickle of plain values would cost, told from its bytes in one pass before anything is built.

The unpickler itself is not bounded by the size of its file: six bytes make it clear a memo of gigabytes, a key that is a tuple of a tuple
of ... is hashed in exponential time, numbers can be chosen to collide as keys. So a dump is loaded only where

- every length lies within the file, every number of the memo is below the number of bytes before it,
- all keys of dictionaries are strings, whose hash is kept and secret,
- there are at most ``MOST_VALUES`` values.

Then time and memory grow with the size of the file: some 70 bytes a byte at most.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from tracekit.compiled import late
from tracekit.readers.plain_pickle import PlainUnpickler
from tracekit.trace.events import Int8Array, UInt8Array

MOST_VALUES = 20_000_000

# Classes of opcodes, by what they do to the stack. Up to ``_MARK`` they put something onto it; before it are values.
_VALUE, _TEXT, _GET, _TUPLE_N, _MARK, _DUP, _POP, _APPEND, _SETITEM, _SETITEMS, _DICT, _TUPLE, _POP_MARK, _PUT, _SKIP = range(1, 16)
_UNKNOWN, _STOP, _CALLS = 0, 16, 17
_MEMOIZE, _TUPLE0, _FLOAT = 0x94, 0x84, 8
#: ``_CALLS``: those at which the unpickler refuses, or fails, without a look at what follows; of the others that call something (REDUCE,
#: BUILD and kin) nothing can come without these, and BUILD of nothing would let it go on.
#: Opcode -> (class, bytes of its argument; negative: so many bytes hold the length of what follows).
_OPCODES = {
    0x80: (_SKIP, 1), 0x95: (_SKIP, 8), ord("."): (_STOP, 0), ord("("): (_MARK, 0), ord("0"): (_POP, 0), ord("1"): (_POP_MARK, 0),
    ord("2"): (_DUP, 0), ord("N"): (_VALUE, 0), 0x88: (_VALUE, 0), 0x89: (_VALUE, 0), ord("J"): (_VALUE, 4), ord("K"): (_VALUE, 1),
    ord("M"): (_VALUE, 2), 0x8A: (_VALUE, -1), 0x8B: (_VALUE, -4), ord("G"): (_VALUE, 8), ord("B"): (_VALUE, -4), ord("C"): (_VALUE, -1),
    0x8E: (_VALUE, -8), 0x96: (_VALUE, -8), ord("T"): (_TEXT, -4), ord("U"): (_TEXT, -1), ord("X"): (_TEXT, -4), 0x8C: (_TEXT, -1),
    0x8D: (_TEXT, -8), ord("}"): (_VALUE, 0), ord("]"): (_VALUE, 0), ord(")"): (_VALUE, 0), ord("t"): (_TUPLE, 0), ord("l"): (_TUPLE, 0),
    ord("d"): (_DICT, 0), 0x85: (_TUPLE_N, 0), 0x86: (_TUPLE_N, 0), 0x87: (_TUPLE_N, 0), ord("a"): (_APPEND, 0), ord("e"): (_POP_MARK, 0),
    ord("s"): (_SETITEM, 0), ord("u"): (_SETITEMS, 0), ord("h"): (_GET, 1), ord("j"): (_GET, 4), ord("q"): (_PUT, 1), ord("r"): (_PUT, 4),
    0x94: (_PUT, 0), **dict.fromkeys((*b"ciQP", 0x82, 0x83, 0x84, 0x93), (_CALLS, 0)),
}  # fmt: skip
_CLASS = np.zeros(256, np.uint8)
_ARGUMENT = np.zeros(256, np.int8)
for _code, (_class, _size) in _OPCODES.items():
    _CLASS[_code], _ARGUMENT[_code] = _class, _size

#: Results of ``_walk``.
_FINE, _CALLED, _CUT, _BROKEN, _KEYS, _MEMO, _LARGE = range(7)
REASONS = {
    _CUT: "is cut: it ends in the middle",
    _BROKEN: "is no pickle of plain values, or a damaged one",
    _KEYS: "has keys that are no texts",
    _MEMO: "asks for more memory than its size explains",
    _LARGE: f"holds more than {MOST_VALUES:,} values",
}
# What lies on the stack: a mark, a text, anything else.
_IS_MARK, _IS_TEXT, _IS_OTHER = 0, 1, 2


class UnboundedError(Exception):
    """Loading it could take any time or memory, or nothing can come of it; the text says why."""


def load_plain(data: bytes) -> Any:
    """The values of a pickle. Raises UnboundedError before anything is built, RefusedError, or one of ``plain_pickle.DAMAGED``."""
    view = np.frombuffer(data, np.uint8)
    result, at = _walk(view, _CLASS, _ARGUMENT)
    if result in REASONS:
        raise UnboundedError(REASONS[result])
    # Up to a call everything is plain; the unpickler names what is called. Names of the old opcodes are two lines.
    end = len(data) if result == _FINE else min(len(data), at + 1000)
    return PlainUnpickler(io.BytesIO(data[:end])).load()


@late
def _walk(data: UInt8Array, classes: UInt8Array, arguments: Int8Array) -> tuple[int, int]:
    """(result, position) of the first opcode that decides. In one piece: compiled code calls no function that may be interpreted."""
    size = len(data)
    stack = np.empty(size + 1, np.uint8)
    memo = np.full(size + 1, _IS_OTHER, np.uint8)
    top = at = values = remembered = 0
    while at < size:
        begin, opcode = at, int(data[at])
        kind, argument = int(classes[opcode]), int(arguments[opcode])
        at += 1 + abs(argument)
        if at > size:
            return _CUT, begin
        number = 0
        if argument != _FLOAT:
            for place in range(abs(argument)):
                number += int(data[begin + 1 + place]) << (8 * place)
        if argument < 0:
            if number < 0 or number > size - at:
                return _CUT, begin
            at += number
        if kind in (_VALUE, _TEXT, _MARK, _GET):
            if kind == _GET and number > size:
                return _BROKEN, begin
            stack[top] = memo[number] if kind == _GET else _IS_MARK if kind == _MARK else _IS_TEXT if kind == _TEXT else _IS_OTHER
            top += 1
        elif kind == _PUT:
            number = remembered if opcode == _MEMOIZE else number
            if number > begin or not top:
                return _MEMO if top else _BROKEN, begin
            memo[number] = stack[top - 1]
            remembered += 1
        elif kind in (_DUP, _TUPLE_N):
            taken = opcode - _TUPLE0 if kind == _TUPLE_N else 0
            if top < max(taken, 1):
                return _BROKEN, begin
            stack[top - taken] = stack[top - 1] if kind == _DUP else _IS_OTHER
            top += 1 - taken
        elif kind in (_POP, _APPEND):
            if not top:
                return _BROKEN, begin
            top -= 1
        elif kind == _SETITEM:
            if top < 3 or stack[top - 2] != _IS_TEXT:
                return _BROKEN if top < 3 else _KEYS, begin
            top -= 2
        elif kind in (_STOP, _CALLS, _UNKNOWN):
            return _FINE if kind == _STOP else _CALLED if kind == _CALLS else _BROKEN, begin
        elif kind != _SKIP:  # down to the mark
            last = top
            while top > 0 and stack[top - 1] != _IS_MARK:
                top -= 1
            if not top:
                return _BROKEN, begin
            if kind in (_SETITEMS, _DICT):
                for place in range(top, last, 2):
                    if stack[place] != _IS_TEXT:
                        return _KEYS, begin
            stack[top - 1] = _IS_OTHER
            top -= kind not in (_TUPLE, _DICT)
        values += kind < _MARK
        if values > MOST_VALUES:
            return _LARGE, begin
    return _CUT, at
