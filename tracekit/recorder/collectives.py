"""Group and sequence of collectives, for backends that leave neither in a trace (gloo, fake).

Three ways, each with its cost:

- the flight recorder, on by default: torch keeps the last calls of every process group anyway; they are read once, at the window's end;
- labels around ``ProcessGroup.send`` and ``recv``, which the flight recorder misses: about 3 us a call;
- a dispatch mode over every c10d operator (``labels="dispatch"``): it also sees backends without a flight recorder, and costs about a
  tenth of a 150 ms step, several times a 2 ms one.

A label is a range ``tracekit::collective`` around the operator with the arguments that NCCL's ``record_param_comms`` has.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tracekit.manifest import Calls, Group
from tracekit.recorder import private

LABEL = "tracekit::collective"
_P2P = {"send": "send", "recv": "recv", "recv_anysource": "recv"}


class Counters:
    """Sequence numbers: of collectives by group, of point-to-point operations by group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[tuple[str, str], itertools.count[int]] = defaultdict(lambda: itertools.count(1))

    def next(self, group: str, p2p: bool) -> int:
        """The number of this call."""
        with self._lock:
            return next(self._next[group, "p2p" if p2p else "collective"])


def label_point_to_point(counters: Counters, guard: Callable[[BaseException], None]) -> private.Undo:
    """Put a label around every send and receive that Python calls on a process group, until the result is called."""
    owner = private.process_group_type()

    def make(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(group: Any, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
                try:
                    peer = args[0] if args and name != "recv_anysource" else kwargs.get("dstRank", kwargs.get("srcRank"))
                    label = private.range_with_arguments(LABEL, p2p_arguments(group, _P2P[name], tensors, peer, counters))
                except Exception as error:  # noqa: BLE001 - recording never fails the training loop
                    guard(error)
                    return original(group, tensors, *args, **kwargs)
                with label:
                    return original(group, tensors, *args, **kwargs)

            return call

        return around

    undo = [private.replaced(owner, name, make(name)) for name in _P2P]

    def undo_all() -> None:
        for step in undo:
            step()

    return undo_all


def p2p_arguments(group: Any, kind: str, tensors: Sequence[torch.Tensor], peer: Any, counters: Counters) -> dict[str, Any]:
    """The label's arguments for one send or receive; ``peer`` is the other's rank within the group, None for any."""
    arguments = group_arguments(group)
    elements = sum(t.numel() for t in tensors)
    arguments |= {
        "Collective name": kind,
        "Seq": counters.next(arguments["Process Group Name"], p2p=True),
        "dtype": _dtype(tensors),
        "In msg nelems": elements if kind == "send" else 0,
        "Out msg nelems": elements if kind == "recv" else 0,
    }
    if peer is not None:
        own, other = dist.get_rank(), dist.get_global_rank(group, int(peer))
        arguments |= {"Src Rank": own, "Dst Rank": other} if kind == "send" else {"Src Rank": other, "Dst Rank": own}
    return arguments


def group_arguments(group: Any) -> dict[str, Any]:
    """Name, description, size and members of a process group."""
    ranks = dist.get_process_group_ranks(group)
    return {
        "Process Group Name": str(group.group_name),
        "Process Group Description": str(getattr(group, "group_desc", "") or ""),
        "Process Group Ranks": str(list(ranks)),
        "Group size": len(ranks),
    }


def _dtype(tensors: Sequence[torch.Tensor]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""


class LabelCollectives(TorchDispatchMode):
    """Puts a label around every c10d operator that the dispatcher sees, those of DDP's reducer included."""

    def __init__(self, counters: Counters, guard: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._counters = counters
        self._guard = guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, within a label if it is a collective. Tensor subclasses (DTensor) come back here as plain tensors."""
        kwargs = kwargs or {}
        if any(issubclass(t, torch.Tensor) and t.__name__ == "DTensor" for t in types):
            return NotImplemented
        if func.namespace not in ("c10d", "_c10d_functional"):
            return func(*args, **kwargs)
        try:
            arguments = self._arguments(func, args, kwargs)
        except Exception as error:  # noqa: BLE001 - recording never fails the training loop
            self._guard(error)
            arguments = None
        if arguments is None:
            return func(*args, **kwargs)
        with private.range_with_arguments(LABEL, arguments):
            return func(*args, **kwargs)

    def _arguments(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        name = func._schema.name.partition("::")[2]
        if name.startswith("wait") or name == "monitored_barrier_":
            return None
        group = _group_of(func, args, kwargs)
        if group is None:
            return None
        words = name.strip("_")
        if words in ("send", "recv_", "recv", "recv_any_source", "recv_any_source_"):
            kind = "send" if words.startswith("send") else "recv"
            tensors, peer = args[0], (None if "any" in words else args[2])
            return p2p_arguments(group, kind, tensors, peer, self._counters)
        arguments = group_arguments(group)
        ingoing, outgoing, dtype, splits = _sizes(words, func, args, kwargs)
        return arguments | {
            "Collective name": words,
            "Seq": self._counters.next(arguments["Process Group Name"], p2p=False),
            "dtype": dtype,
            "In msg nelems": ingoing,
            "Out msg nelems": outgoing,
            **splits,
        }


def _group_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The process group among the arguments of a c10d operator: an object, or the name of one."""
    for argument, value in _named(func, args, kwargs):
        if argument.name in ("process_group", "group_name"):
            if isinstance(value, str):
                return private.group_by_name(value)
            return private.unboxed_group(value)
    return None


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(schema argument, value) of everything that was passed."""
    given = list(zip(func._schema.arguments, args, strict=False))
    return given + [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]


def _sizes(words: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, int, str, dict[str, str]]:
    """(elements in, elements out, element type, split sizes) of a collective from its arguments; -1 where not passed."""
    ingoing = outgoing = -1
    dtype = ""
    splits: dict[str, str] = {}
    for argument, value in _named(func, args, kwargs):
        tensors = _flat(value)
        if tensors:
            dtype = dtype or _dtype(tensors)
            elements = sum(t.numel() for t in tensors)
            if "out" in argument.name:
                outgoing = elements
            else:
                ingoing = elements if ingoing < 0 else ingoing
        elif argument.name in ("input_split_sizes", "output_split_sizes") and value:
            splits["In split size" if argument.name.startswith("in") else "Out split size"] = str([int(v) for v in value])
    if words.startswith(("allreduce", "all_reduce", "broadcast", "reduce_")) and not words.startswith("reduce_scatter"):
        outgoing = ingoing
    return ingoing, outgoing, dtype, splits


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for item in value for t in _flat(item)]
    return []


def flight_recorder_calls(groups: Sequence[Group], start_ns: int, end_ns: int) -> Calls:
    """What the flight recorder knows of the collectives between two times, in columns."""
    entries = private.flight_recorder()
    if entries is None:
        return Calls(source="")
    place = {group.name: i for i, group in enumerate(groups)}
    inside = [e for e in entries if start_ns <= int(e.get("time_created_ns", 0)) <= end_ns and not e.get("is_p2p")]
    oldest = min((int(e.get("time_created_ns", 0)) for e in entries), default=start_ns)
    first = min((int(e.get("record_id", 0)) for e in entries), default=0)
    names, types = [str(e.get("profiling_name", "")) for e in inside], [_type(e) for e in inside]
    strings = sorted({*names, *types})
    code = {text: i for i, text in enumerate(strings)}
    return Calls(
        time_ns=[int(e["time_created_ns"]) for e in inside],
        group=[place.get(str((e.get("process_group") or [""])[0]), -1) for e in inside],
        seq=[int(e.get("collective_seq_id", -1)) for e in inside],
        name=[code[name] for name in names],
        peer=[-1] * len(inside),
        elements_in=[_elements(e.get("input_sizes")) for e in inside],
        elements_out=[_elements(e.get("output_sizes")) for e in inside],
        dtype=[code[kind] for kind in types],
        strings=strings,
        source="flight_recorder",
        # The buffer is a ring: what it lost of this window can be told only where its oldest entry lies within the window.
        lost=first if oldest > start_ns else 0,
    )


def _type(entry: dict[str, Any]) -> str:
    """The element type of all tensors of a call; '' where there is none, or more than one."""
    found = {str(kind) for key in ("input_dtypes", "output_dtypes") for kind in entry.get(key) or ()}
    return found.pop() if len(found) == 1 else ""


def _elements(sizes: Any) -> int:
    if not isinstance(sizes, list):
        return -1
    total = 0
    for shape in sizes:
        elements = 1
        for length in shape if isinstance(shape, list) else [shape]:
            elements *= int(length)
        total += elements
    return total
