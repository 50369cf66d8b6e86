"""Who owns which storage: registrations in time order, written into the manifest as columns."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import torch

from tracekit.manifest import FREED, Owners
from tracekit.recorder import private
from tracekit.vocabulary import CATEGORIES

#: Registrations beyond this many are counted, not kept: a manifest stays a file one can open.
MOST = 2_000_000


class OwnerLog:
    """Collects registrations from any thread, from ``begin`` to ``end``; what stood before is registered at the beginning."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: dict[str, int] = {}
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self._earlier: list[tuple[weakref.ref[torch.Tensor], str, str, str]] = []
        self._standing: list[tuple[weakref.ref[torch.Tensor], str, str, str]] = []
        self._watched: list[weakref.ref[torch.Tensor]] = []
        self._gone: list[tuple[int, int, Callable[[], bool], str, str]] = []
        self._watching = False
        self._begun = 0
        self._room = 1024
        self.active = self.ended = False
        self.left_out = 0

    def begin(self) -> None:
        """The window begins: what was said of tensors that are alive is registered, and from now on everything is.

        The batch of the step before lives until the loop fetches the next one, and torch's profiler tells no free of host memory that is
        older than itself. So inputs on the host are registered by the step that uses them, or at the end, if they are still there.
        """
        earlier, self._earlier = self._earlier, []
        self.active, self._begun, self._watching = True, time.time_ns(), True
        for reference, category, name, unit in earlier:
            tensor = reference()
            if tensor is not None and category == "inputs" and tensor.device.type == "cpu":
                self._standing.append((reference, category, name, unit))
            else:
                self.own(tensor, category, name, unit)

    def settled(self) -> None:
        """All that stands at the beginning is registered: what is registered from now on was born in the window, or stood."""
        self._watching = False

    def own(self, tensor: torch.Tensor | None, category: str, name: str = "", unit: str = "", *, time_ns: int | None = None) -> None:
        """The storage of ``tensor`` belongs to ``category`` from now on. Nothing for None, or a tensor without storage of its own.

        Raises ValueError for a category that there is not.
        """
        if category not in CATEGORIES:
            raise ValueError(f"{category!r} is no category of memory; there are {', '.join(CATEGORIES)}")
        if tensor is None:
            return
        if not self.active:
            self._remember(tensor, category, name, unit)
            return
        place = storage(tensor)
        if place is not None:
            self.row(place[0], place[1], category, name, unit, time_ns=time_ns)
            if self._watching and tensor.device.type == "cpu":
                self._watch(private.local(tensor), place[0], category, name)

    def _watch(self, tensor: torch.Tensor, address: int, category: str, name: str) -> None:
        """Remember when the tensor goes; whether its storage went with it is asked at the end."""
        freed, gone = private.freed(tensor), self._gone

        def went(_: object) -> None:
            gone.append((time.time_ns(), address, freed, category, name))

        self._watched.append(weakref.ref(tensor, went))

    def _remember(self, tensor: torch.Tensor, category: str, name: str, unit: str) -> None:
        """Said before the window: kept for its beginning, without keeping the tensor alive."""
        with self._lock:
            if self.ended:
                return
            if len(self._earlier) >= self._room:
                self._earlier = [said for said in self._earlier if said[0]() is not None]
                self._room = max(1024, 2 * len(self._earlier))
            self._earlier.append((weakref.ref(tensor), category, name, unit))

    def end(self) -> None:
        """The window is over: what is said from now on is nobody's."""
        standing, self._standing = self._standing, []
        for reference, category, name, unit in standing:
            self.own(reference(), category, name, unit, time_ns=self._begun)
        self._watched = []
        for moment, address, freed, category, name in self._gone:
            if freed():
                self.row(address, FREED, category, name, time_ns=moment)
        self._gone = []
        self.active, self.ended, self._earlier = False, True, []

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
