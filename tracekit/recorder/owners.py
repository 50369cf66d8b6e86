"""Who owns which storage: registrations in time order, written into the manifest as columns."""

from __future__ import annotations

import threading
import time

import torch

from tracekit.manifest import Owners
from tracekit.recorder import private
from tracekit.vocabulary import CATEGORIES

#: Registrations beyond this many are counted, not kept: a manifest stays a file one can open.
MOST = 2_000_000


class OwnerLog:
    """Collects registrations from any thread, while ``active``; what stood before the window is registered at its start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: dict[str, int] = {}
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self.active = False
        self.left_out = 0

    def own(self, tensor: torch.Tensor | None, category: str, name: str = "", unit: str = "", *, time_ns: int | None = None) -> None:
        """The storage of ``tensor`` belongs to ``category`` from now on. Nothing for None, or a tensor without storage of its own.

        Raises ValueError for a category that there is not.
        """
        if category not in CATEGORIES:
            raise ValueError(f"{category!r} is no category of memory; there are {', '.join(CATEGORIES)}")
        if tensor is None or not self.active:
            return
        place = storage(tensor)
        if place is not None:
            self.row(place[0], place[1], category, name, unit, time_ns=time_ns)

    def row(self, address: int, size: int, category: str, name: str = "", unit: str = "", *, time_ns: int | None = None) -> None:
        """The same for an address and a size in bytes. Address 0: a storage older than the recording whose address is not known."""
        with self._lock:
            if len(self._rows) >= MOST:
                self.left_out += 1
                return
            code = self._codes
            kind, called, part = (code.setdefault(text, len(code)) for text in (category, name, unit))
            self._rows.append((time.time_ns() if time_ns is None else time_ns, address, size, kind, called, part))

    def columns(self) -> Owners:
        """Everything registered so far."""
        with self._lock:
            time_ns, address, size, category, name, unit = ([row[i] for row in self._rows] for i in range(6))
            return Owners(time_ns, address, size, category, name, unit, list(self._codes))


def storage(tensor: torch.Tensor) -> tuple[int, int] | None:
    """(address, bytes) of the storage behind the local part of ``tensor``; None for meta and fake tensors, and where it is freed."""
    try:
        data = private.local(tensor).untyped_storage()
        address, size = data.data_ptr(), data.nbytes()
    except (RuntimeError, NotImplementedError):
        return None
    return (address, size) if address and size else None
