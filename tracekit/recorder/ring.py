"""The last sends and receives, which gloo's flight recorder leaves out, as entries of one; and the whole dump of this process."""

from __future__ import annotations

import collections
import contextlib
import itertools
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tracekit.recorder import private
from tracekit.recorder.guard import Guard

MOST, MOST_FRAMES = 2000, 24
_HERE = str(Path(__file__).parent)
_P2P = {"send": "send", "recv": "recv", "recv_anysource": "recv"}


class Ring:
    """The last sends and receives of host tensors: what they are, from where they were called, whether they are over."""

    def __init__(self, guard: Guard) -> None:
        self._entries: collections.deque[tuple[dict[str, Any], Any]] = collections.deque(maxlen=MOST)
        self._counts: dict[str, itertools.count[int]] = collections.defaultdict(lambda: itertools.count(1))
        self._note = guard.guarded(self._add)

    def follow(self) -> list[private.Undo]:
        """Notice every send and receive that Python calls on a process group, until the results are called."""
        owner = private.process_group_type()
        return [private.replaced(owner, name, self._around(name)) for name in _P2P]

    def _around(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(group: Any, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
                told: list[Any] = []
                self._note(told, name, group, tensors, args, kwargs)
                work = original(group, tensors, *args, **kwargs)
                for one in told:
                    with contextlib.suppress(TypeError):  # what cannot be referred to weakly counts as over once it has returned
                        one[0] = weakref.ref(work)
                return work

            return call

        return around

    def _add(self, told: list[Any], name: str, group: Any, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> None:
        if not tensors or tensors[0].device.type != "cpu":
            return  # NCCL's recorder has them
        own = dist.get_group_rank(group, dist.get_rank())
        peer = kwargs.get("dstRank", kwargs.get("srcRank", args[0] if args and name != "recv_anysource" else None))
        title = f"send {own}->{peer}" if name == "send" else f"recv {own}<-{peer}" if peer is not None else "recv"
        number = next(self._counts[str(group.group_name)])
        sizes, types = [list(t.shape) for t in tensors], [str(t.dtype).removeprefix("torch.") for t in tensors]
        reference: list[Any] = [None]
        told.append(reference)
        entry = {
            "frames": _frames(),
            "process_group": (str(group.group_name), str(getattr(group, "group_desc", "") or "")),
            "collective_seq_id": 0,
            "p2p_seq_id": number,
            "profiling_name": f"gloo:{title}",
            "time_created_ns": time.time_ns(),
            "input_sizes": sizes if name == "send" else [],
            "output_sizes": sizes if name != "send" else [],
            "input_dtypes": types if name == "send" else [],
            "output_dtypes": types if name != "send" else [],
            "is_p2p": True,
        }
        self._entries.append((entry, reference))

    def entries(self) -> list[dict[str, Any]]:
        """All of them with their state now; what nobody holds any more is over."""
        found = []
        for entry, (reference,) in list(self._entries):
            work = reference() if reference is not None else None
            over = work is None or bool(work.is_completed())
            found.append({**entry, "state": "completed" if over else "scheduled", "retired": over})
        return found


def _frames() -> list[dict[str, Any]]:
    """The stack of the caller, innermost first, without the recorder's own."""
    frame: Any = sys._getframe(1)
    found: list[dict[str, Any]] = []
    while frame is not None and len(found) < MOST_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(_HERE):
            found.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back
    return found


def whole_dump(rank: int, messages: Sequence[dict[str, Any]]) -> tuple[bytes, int]:
    """What torch's flight recorders hold, the messages of the ring, and the members of all groups: a pickle of plain values.

    And when the newest call was made [Unix ns], 0 without any.
    """
    root: dict[str, Any] = {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": []}
    for data in private.flight_recorder_pickles():
        told = pickle.loads(data)  # noqa: S301 - torch has made it a moment ago, in this process
        root |= {key: value for key, value in told.items() if key not in ("pg_config", "pg_status", "entries")}
        for key in ("pg_config", "pg_status"):
            root[key].update(told.get(key) or {})
        root["entries"] += told.get("entries") or []
    for name, ranks in private.all_groups().values():
        described = root["pg_config"].get(name, {}).get("desc", "")
        root["pg_config"][name] = {"name": name, "desc": described, "ranks": str(ranks)}
    root["entries"] = sorted([*root["entries"], *messages], key=lambda entry: int(entry.get("time_created_ns") or 0))
    root["rank"] = rank
    newest = int(root["entries"][-1].get("time_created_ns") or 0) if root["entries"] else 0
    return pickle.dumps(root, protocol=2), newest
