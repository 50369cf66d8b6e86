"""What the host was doing while a device had nothing to do."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tracekit.trace.correlate import nesting_order
from tracekit.trace.events import Category, Int32Array, Int64Array, RankTables
from tracekit.units import NULL

#: Ranges that only say which step or phase it is, or that something is launched.
_FRAMES = re.compile(
    r"^(?:ProfilerStep|PP:\d|## |Iteration|(?:forward|backward)$|Optimizer\.|nccl:|record_param_comms|PyTorch Profiler \(0\)$)|Launch", re.I
)
_WORDS: tuple[tuple[str, str], ...] = (
    (r"data_?loader|dataset|collate|__next__|next_batch|get_batch|\bloader\b", "loading data"),
    (r"garbage.?collect|\bgc\b|gc\.collect|gc\.py|built-in method collect of", "collecting garbage"),
    (r"checkpoint|torch\.save|save_state|serializ", "saving a checkpoint"),
    (r"(?:cuda|hip|cu|mem)\w*Malloc|(?:cuda|hip|cu)\w*Free|Mem(?:Alloc|Map|Create|Unmap|Address)", "allocating or freeing device memory"),
    (r"Profiler(?!Step)|(?:Activity|Command|Tracing)\w* Buffer|Buffer (?:Flush|Request)|Instrumentation|^Resource$", "the profiler"),
    (r"Synchronize|hipMemcpyWithStream|^(?:cuda|hip)Memcpy$|_local_scalar_dense|aten::item", "waiting for the device"),
    (r"ModuleLoad|Lazy Function|ModuleGetFunction|LibraryLoad|FuncGetAttributes", "loading kernels"),
    (r"compile|dynamo|inductor|triton", "compiling"),
    (r"print|logging|wandb|tensorboard", "logging"),
)  # fmt: skip
_PATTERNS = [(re.compile(pattern, re.I), words) for pattern, words in _WORDS]
_HOST = (Category.OPERATOR, Category.USER_ANNOTATION, Category.RUNTIME, Category.PYTHON, Category.OVERHEAD)


def doing_words(name: str) -> str:
    """What a range or call of this name is about (``loading data``); '' where its name does not say."""
    return next((words for pattern, words in _PATTERNS if pattern.search(name)), "")


def doing_at(tables: RankTables, lane: Int32Array, times: Int64Array, wanted: Callable[[str], bool] | None = None) -> Int64Array:
    """The events row of the innermost host range around each time on its lane (-1: none); ranges that only frame others do not count."""
    from tracekit.trace.sweep import innermost

    rows = tables.rows(*_HOST)
    rows = rows[(tables.dur[rows] > 0) & (tables.ts[rows] != NULL)]
    rows = rows[tables.each_text(tables.name[rows], wanted or (lambda text: _FRAMES.search(text) is None))]
    result = np.full(len(times), -1, np.int64)
    if not len(rows) or not len(times):
        return result
    start, end, on = tables.ts[rows], tables.ts[rows] + tables.dur[rows], tables.lane[rows].astype(np.int64)
    order = nesting_order(on, start, end)
    queries = np.lexsort((times, lane))
    own = np.full(len(times), len(rows), np.int64)
    found = innermost(on[order], start[order], end[order], lane[queries].astype(np.int64), times[queries], own)
    result[queries] = np.where(found >= 0, rows[order[np.maximum(found, 0)]], -1)
    return result
