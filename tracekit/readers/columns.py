"""Columns that grow at their end, without being held twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_FIRST, _GROWTH = 1 << 12, 1.25


class Column:
    """One growing array. Large ones grow by ``realloc``, which moves pages instead of copying them where the system can (Linux)."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._array: npt.NDArray[Any] = np.empty(0, dtype)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def append(self, values: npt.NDArray[Any]) -> None:
        """Put values, cast to the column's dtype, at the end."""
        begin, end = self._used, self._used + len(values)
        if end > len(self._array):
            # No view of the array is kept anywhere, so numpy need not look for one.
            self._array.resize(max(end, _FIRST, int(len(self._array) * _GROWTH)), refcheck=False)
        self._array[begin:end] = values
        self._used = end

    def filled(self) -> npt.NDArray[Any]:
        """A view of what is in it, valid until the next append."""
        return self._array[: self._used]

    def keep(self, chosen: npt.NDArray[np.bool_]) -> None:
        """Only the chosen entries, moved together; the room that the others had stays."""
        kept = self.filled()[chosen]
        self._array[: len(kept)] = kept
        self._used = len(kept)

    def finish(self) -> npt.NDArray[Any]:
        """The array, at its true length."""
        self._array.resize(self._used, refcheck=False)
        return self._array
