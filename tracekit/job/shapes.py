"""Sizes of the tensors of an operator or range, from its recorded ``Input Dims`` and ``Input type``."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from tracekit.collectives.kinds import element_type
from tracekit.schema import categorical
from tracekit.trace.codes import distinct_rows
from tracekit.trace.events import Int32Array, Int64Array, RankTables
from tracekit.units import NULL


@dataclass(frozen=True)
class TensorShapes:
    """One entry a row.

    ``elements`` of all tensors, NULL where none is recorded; ``dtype`` of those tensors, '' where not recorded or mixed; ``tensors`` how
    many (at least 1).
    """

    elements: Int64Array
    dtype: pd.Categorical
    tensors: Int32Array


def tensor_shapes(tables: RankTables, rows: Int64Array) -> TensorShapes:
    """Shapes recorded for these ranges of a backend, whose arguments are its input tensors (-1: none)."""
    side = tables.side["shapes"]
    at = side.at(rows)
    dims = np.where(at >= 0, side.columns["Input Dims"][np.maximum(at, 0)], 0) if len(side) else np.zeros(len(rows), np.int32)
    types = np.where(at >= 0, side.columns["Input type"][np.maximum(at, 0)], 0) if len(side) else np.zeros(len(rows), np.int32)
    pairs, inverse = distinct_rows(dims, types)
    read = [_read(tables.text(d), tables.text(t)) for d, t in np.stack(pairs, axis=1).tolist()]
    elements = np.array([r[0] for r in read] or [NULL], np.int64)
    tensors = np.array([r[2] for r in read] or [1], np.int32)
    dtypes = [r[1] for r in read] or [""]
    categories = list(dict.fromkeys(dtypes))
    codes = np.array([categories.index(d) for d in dtypes], np.int64)
    return TensorShapes(elements[inverse], categorical(codes[inverse], categories), tensors[inverse])


def _read(dims: str, types: str) -> tuple[int, str, int]:
    """(elements, dtype, tensors) of all arguments together; (NULL, '', 1) where nothing is recorded."""
    try:
        arguments = msgspec.json.decode(dims) if dims else []
        names = msgspec.json.decode(types) if types else []
    except msgspec.DecodeError:
        return NULL, "", 1
    if not isinstance(arguments, list):
        return NULL, "", 1
    total, dtypes, tensors = 0, set(), 0
    for index, argument in enumerate(arguments):
        sizes = _sizes(argument) or _scalars(argument, names[index] if isinstance(names, list) and index < len(names) else "")
        if sizes:
            total, tensors = total + sum(sizes), tensors + len(sizes)
            dtypes.add(_dtype(names, index))
    if not tensors or total >= 2**62:
        return NULL, "", 1
    return total, dtypes.pop() if len(dtypes) == 1 else "", tensors


def argument_elements(dims: str, types: str) -> list[int]:
    """Elements of the first and the second argument of an operator, from what it recorded; NULL for one that shows no tensor."""
    try:
        arguments = msgspec.json.decode(dims) if dims else []
        names = msgspec.json.decode(types) if types else []
    except msgspec.DecodeError:
        return []
    if not isinstance(arguments, list) or not isinstance(names, list):
        return []
    found = [_sizes(a) or _scalars(a, names[i] if i < len(names) else "") for i, a in enumerate(arguments[:2])]
    sizes = [sum(some) if some else NULL for some in found]
    while sizes and sizes[-1] == NULL:
        sizes.pop()
    return sizes


def argument_type(types: str) -> str:
    """Element type of the first argument of an operator that shows one; '' where none does."""
    try:
        names = msgspec.json.decode(types) if types else []
    except msgspec.DecodeError:
        return ""
    found = [_dtype(names, index) for index in range(2)]
    return next((dtype for dtype in found if dtype and element_type(dtype)[1] is not None), "")


def _scalars(argument: Any, name: Any) -> list[int]:
    """One element for each tensor without dimensions: ``[]`` of an element type, or each ``[]`` in a list of tensors."""
    if not isinstance(argument, list):
        return []
    if argument:
        lists = name == "TensorList" or isinstance(name, list)
        return [1] * len(argument) if lists and all(item == [] for item in argument) else []
    text = str(name)
    return [1] if text not in ("", "Scalar", "ScalarList", "TensorList", "None") and element_type(text)[1] is not None else []


def _sizes(argument: Any) -> list[int]:
    """Elements of a tensor ``[2, 3]`` or of each tensor of a list ``[[2, 3], [4]]``; [] for a scalar, for nothing, or for nonsense."""
    if not isinstance(argument, list) or not argument:
        return []
    if all(isinstance(n, int) and 0 <= n < 2**40 for n in argument):
        size = prod(argument)
        return [size] if size < 2**62 else []
    inner = [_sizes(item) for item in argument if isinstance(item, list)]
    flat = [size for sizes in inner for size in sizes]
    return flat if sum(flat) < 2**62 else []


def _dtype(names: Any, index: int) -> str:
    """Element type of argument ``index``; a tensor list is spelled ['float', 'float'] or 'TensorList'."""
    if not isinstance(names, list) or index >= len(names):
        return ""
    name = names[index]
    found = {str(n) for n in name} if isinstance(name, list) else {str(name)}
    if len(found) != 1:
        return ""
    text = found.pop()
    return "" if text in ("", "Scalar", "ScalarList", "TensorList") else element_type(text)[0]
