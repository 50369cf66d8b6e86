"""What a large job keeps of each window until it is asked for, as compressed bytes: thousands of windows of small arrays weigh several
times what is in them.

The unpickler knows the classes of a window and refuses any other name: packed results also come out of the cache.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: From so many files on results are packed; of a window those that take at least this many bytes.
PACKED_FROM, LEAST_BYTES = 256, 1 << 14
#: What arrays, tables and text columns are rebuilt by; nothing of it opens, imports or runs anything.
_ALLOWED = {
    ("builtins", "slice"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("pandas", "Categorical"),
    ("pandas", "CategoricalDtype"),
    ("pandas", "DataFrame"),
    ("pandas", "Index"),
    ("pandas", "RangeIndex"),
    ("pandas", "StringDtype"),
    ("pandas._libs.arrays", "__pyx_unpickle_NDArrayBacked"),
    ("pandas._libs.internals", "_unpickle_block"),
    ("pandas.arrays", "ArrowStringArray"),
    ("pandas.core.indexes.base", "_new_Index"),
    ("pandas.core.internals.managers", "BlockManager"),
    ("pyarrow.lib", "_restore_array"),
    ("pyarrow.lib", "py_buffer"),
    ("pyarrow.lib", "type_for_alias"),
}


class WindowUnpickler(pickle.Unpickler):
    """Of windows, and of nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The classes of a Window; UnpicklingError for any other name."""
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        found = super().find_class(module, name) if module.startswith("tracekit.") else None
        if not isinstance(found, type) or found.__module__ != module or issubclass(found, BaseException):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a window")
        return found


@dataclass(frozen=True)
class Packed:
    """A result as bytes."""

    body: bytes

    def unpacked(self) -> Any:
        """The result, anew each time."""
        return WindowUnpickler(io.BytesIO(zlib.decompress(self.body))).load()


def packed(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results with the large ones packed."""
    bodies = {name: pickle.dumps(result, protocol=5) for name, result in results.items()}
    return {
        name: Packed(zlib.compress(bodies[name], 1)) if len(bodies[name]) >= LEAST_BYTES else result for name, result in results.items()
    }


def unpacked(result: Any) -> Any:
    """A result, packed or not."""
    return result.unpacked() if isinstance(result, Packed) else result
