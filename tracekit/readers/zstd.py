"""The blocks of a zstd stream, unpacked one by one: what is whole before a cut or a damage is kept, and a cut is told from an end.

The library unpacks; where frames and blocks begin is read here (RFC 8878, section 3.1), because the library's own streams give nothing of a
call that fails, and end in silence where the file is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

MAGIC = b"\x28\xb5\x2f\xfd"
CUT = "the compressed stream is cut off"
_DAMAGED = "the compressed stream is damaged: "
_RLE, _RESERVED = 1, 3
_CONTENT_SIZE_BYTES, _DICTIONARY_BYTES = (0, 2, 4, 8), (0, 1, 2, 4)
_PIECE = 1 << 16


class _CutError(Exception):
    pass


def blocks(packed: Any, damaged: Callable[[str], None], is_too_much: Callable[[int], bool]) -> Generator[bytes, None, None]:
    """Unpacked blocks (128 KiB at most) of all frames; ``damaged`` is told why they ended early, ``is_too_much`` ends them."""
    import zstandard

    frames = unpacked = 0
    try:
        while magic := _read(packed, 4, may_end=True):
            frames += 1
            if _is_skippable(magic):
                _skip(packed, int.from_bytes(_read(packed, 4), "little"))
                continue
            if magic != MAGIC:
                damaged(_DAMAGED + "what follows is no frame of zstd")
                return
            for block in _frame(packed, zstandard.ZstdDecompressor().decompressobj()):
                unpacked += len(block)
                if is_too_much(unpacked + 1000 * frames):
                    return
                if block:
                    yield block
    except _CutError:
        damaged(CUT)
    except zstandard.ZstdError as error:
        damaged(_DAMAGED + " ".join(str(error).split())[:120])


def _frame(packed: Any, inner: Any) -> Generator[bytes, None, None]:
    """The blocks of one frame behind its magic number."""
    descriptor = _read(packed, 1)
    single_segment, checksum = descriptor[0] >> 5 & 1, descriptor[0] >> 2 & 1
    size = _CONTENT_SIZE_BYTES[descriptor[0] >> 6] or single_segment
    yield inner.decompress(MAGIC + descriptor + _read(packed, 1 - single_segment + _DICTIONARY_BYTES[descriptor[0] & 3] + size))
    last = False
    while not last:
        header = _read(packed, 3)
        number = int.from_bytes(header, "little")
        last, kind = bool(number & 1), number >> 1 & 3
        yield inner.decompress(header + _read(packed, 1 if kind == _RLE else 0 if kind == _RESERVED else number >> 3))
    if checksum:
        yield inner.decompress(_read(packed, 4))


def _is_skippable(magic: bytes) -> bool:
    return magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5


def _skip(packed: Any, size: int) -> None:
    while size:
        size -= len(_read(packed, min(size, _PIECE)))


def _read(packed: Any, size: int, may_end: bool = False) -> bytes:
    """Just so many bytes; fewer are a cut, but none at all where the stream may end."""
    data = bytearray()
    while len(data) < size and (more := packed.read(size - len(data))):
        data += more
    if len(data) < size and (data or not may_end):
        raise _CutError
    return bytes(data)
