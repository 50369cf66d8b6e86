"""Pickles of strangers: an unpickler that builds plain values only. Standard library only: the child that reads snapshots uses it as well.

It keeps a pickle from doing anything, not from being large: who loads one in this process asks ``pickle_bounds`` first, who cannot starts
a child with limits (``memory_snapshot_process``).
"""

from __future__ import annotations

import pickle
from typing import Any

#: What the unpickler raises for a text that is no pickle, or a damaged one; ImportError and AttributeError for codes without an object.
DAMAGED = (pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, ImportError)


class RefusedError(Exception):
    """The pickle wants more than plain values; the text says what."""


class PlainUnpickler(pickle.Unpickler):
    """Refuses whatever would import, call or fetch anything."""

    def find_class(self, module: str, name: str) -> Any:
        """Nothing is imported."""
        raise RefusedError(f"wants {module}.{name}")

    def persistent_load(self, _: Any) -> Any:
        """Nothing is fetched."""
        raise RefusedError("asks for an object from outside")
