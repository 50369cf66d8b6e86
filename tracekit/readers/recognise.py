"""What is a trace file, by its name and, where the name does not say, by its first bytes."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable
from typing import BinaryIO

from tracekit.readers.hang_files import content_of

ENDINGS = (".json", ".gz", ".zst")
_OTHER_CONTENT = re.compile(r"\.(?:tar|txt|log|csv|tsv|html?|md|pickle|pkl|pt|py|ya?ml|parquet)\.(?:gz|zst)$", re.IGNORECASE)
_MANIFEST = re.compile(r"(?:^|\.)manifest\.json(?:\.gz|\.zst)?$", re.IGNORECASE)
_SNAPSHOT = re.compile(r"\.(?:pickle|pkl)(?:\.gz)?$", re.IGNORECASE)
_OTHER_ENDING = re.compile(
    r"\.(?:html?|txt|log|md|csv|tsv|pickle|pkl|pt|pth|py|ya?ml|toml|arrow|parquet|png|svg|pdf|ipynb|sh|npy|npz|db|xml)$", re.IGNORECASE
)
_LEFT_OVER = re.compile(r"\.(?:json|gz|zst)\.tmp$", re.IGNORECASE)
_HEAD = 1 << 16


def read_errors() -> tuple[type[BaseException], ...]:
    """What opening or reading a source may raise: OSError, EOFError and kin, and the own errors of the remote file systems in use."""
    errors: list[type[BaseException]] = [OSError, EOFError, ValueError, ImportError]
    for module, name in (
        ("botocore.exceptions", "BotoCoreError"),
        ("botocore.exceptions", "ClientError"),
        ("aiohttp", "ClientError"),
        ("google.auth.exceptions", "GoogleAuthError"),
        ("gcsfs.retry", "HttpError"),
    ):
        error = getattr(sys.modules.get(module), name, None)
        if isinstance(error, type) and issubclass(error, BaseException):
            errors.append(error)
    return tuple(errors)


def is_trace_name(name: str) -> bool:
    """Whether a file in a folder is taken for a trace by its name."""
    return name.lower().endswith(ENDINGS) and not _OTHER_CONTENT.search(name) and not _MANIFEST.search(name)


def is_snapshot_name(name: str) -> bool:
    """Whether a file is taken for a memory snapshot by its name."""
    return _SNAPSHOT.search(name) is not None


def refusal(name: str, named: bool, globbed: bool, opener: Callable[[], BinaryIO]) -> str | None:
    """Why a file is not a source: None it is one, '' nobody expects it to be one, else a sentence for the user.

    ``named``: the user gave this very file; ``globbed``: a pattern matched it. Otherwise it stands in a folder that was searched, and its
    ending alone decides.
    """
    if is_trace_name(name):
        return None
    if not named and _LEFT_OVER.search(name):
        return "is a file that the profiler had not finished writing (.tmp) and was not used"
    if _MANIFEST.search(name):
        return "is a manifest of the recorder, not a trace" if named else ""
    if _tells_of_a_hang(name, named, opener):
        return None
    if is_snapshot_name(name):
        return None if named or _is_snapshot(name, opener) else ""
    if named or (globbed and not _OTHER_ENDING.search(name) and not _OTHER_CONTENT.search(name)):
        try:
            with opener() as file:
                if looks_like_trace(file.read(_HEAD)):
                    return None
        except read_errors() as error:
            return f"could not be read: {reason(error)}"
    return "is not a trace: it does not begin as JSON, plain or compressed by gzip or zstd" if named else ""


#: Files without a name of their own that may be a flight recorder dump, and texts that are called stacks or NCCL's log.
_MAY_BE_DUMP = re.compile(r"(?:^[^.]+|\.(?:pickle|pkl|dump|bin|[0-9]+))$", re.IGNORECASE)
_MAY_BE_TEXT = re.compile(r"stack|traceback|py-?spy|faulthandler|nccl|rccl|(?<![a-z])ras(?![a-z])", re.IGNORECASE)


def _tells_of_a_hang(name: str, named: bool, opener: Callable[[], BinaryIO]) -> bool:
    """Whether a file is a dump of the flight recorder, a text of Python stacks or NCCL's log: by its content."""
    text = _MAY_BE_TEXT.search(name) is not None and not re.search(r"\.(?:html?|py|json|gz|zst)$", name, re.IGNORECASE)
    if not (named or text or _MAY_BE_DUMP.search(name)):
        return False
    try:
        content = content_of(opener)
    except read_errors():
        return False
    return content == "flight_recorder" or (content is not None and (named or text))


def _is_snapshot(name: str, opener: Callable[[], BinaryIO]) -> bool:
    """Whether a pickle that nobody named is a memory snapshot: it is called so, or begins with the words of one."""
    called_so = re.search("snapshot", name, re.IGNORECASE) is not None
    try:
        with opener() as file:
            head = _unpacked(file.read(_HEAD))
    except read_errors():
        return called_so
    if head == b"":
        return True  # what was to become one
    if head is None or head.startswith(b"PK"):  # what torch.save writes is a zip archive
        return called_so and head is None
    return called_so or b"device_traces" in head or (b"segments" in head and b"total_size" in head)


def looks_like_trace(head: bytes) -> bool:
    """Whether the first bytes of a file, decompressed where needed, begin a JSON object or list."""
    text = _unpacked(head)
    return text is not None and text.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[")


def _unpacked(head: bytes) -> bytes | None:
    """The first bytes of a file, decompressed where needed; None where that fails."""
    for _ in range(3):
        if head.startswith(b"\x1f\x8b"):
            try:
                head = zlib.decompressobj(31).decompress(head, _HEAD)
            except zlib.error:
                return None
        elif head.startswith(b"\x28\xb5\x2f\xfd"):
            import zstandard

            try:
                head = zstandard.ZstdDecompressor().stream_reader(head).read(_HEAD)
            except zstandard.ZstdError:
                return None
    return head


def reason(error: BaseException) -> str:
    """What went wrong, on one line, without a path."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:200]
