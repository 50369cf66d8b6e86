"""``record``: one ``with`` around a training loop leaves a trace, a manifest and, on CUDA, a memory snapshot of every rank.

    with record("traces/run1", mesh=mesh, model=model, optimizer=optimizer) as recorder:
        for batch in data:
            train_step(batch)
            recorder.step()

The window is ``wait`` steps not looked at, ``warmup`` steps with the profiler on whose events are thrown away, ``active`` steps that are
recorded. Nothing in here raises into the training loop: what goes wrong is warned of once, and recording stops.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from tracekit.files import write_atomically
from tracekit.manifest import SUFFIX, Calls, Group, encode
from tracekit.recorder import collectives, describe, private
from tracekit.recorder.hooks import Hooks
from tracekit.recorder.mesh import groups_of_rank
from tracekit.recorder.owners import OwnerLog
from tracekit.recorder.write import write_trace

Labels = Literal["flight_recorder", "dispatch", "none"]


class Recorder:
    """What the training loop holds while it is recorded. Made by ``record``."""

    def __init__(self, directory: Path, said: describe.Description, window: tuple[int, int, int], *, labels: Labels, memory: bool,
                 shapes: bool, stacks: bool, saved_tensors: bool) -> None:  # fmt: skip
        self.directory = directory
        self.said = said
        self.wait, self.warmup, self.active = window
        self.failed = ""
        self.files: list[Path] = []
        self._labels, self._memory, self._saved = labels, memory, saved_tensors
        self._owners = OwnerLog()
        self._hooks = Hooks(self._owners, self._guarded)
        self._notes: list[str] = []
        self._step = 0
        self._start_ns = self._end_ns = 0
        self._stack = contextlib.ExitStack()  # the profiler
        self._window = contextlib.ExitStack()  # what is in place only for the window
        self._hooked = self._closed = False
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=self._ready,
            record_shapes=shapes,
            profile_memory=memory,
            with_stack=stacks,
        )

    # What a training loop calls --------------------------------------------------------------------------------------

    def step(self) -> None:
        """One training step is over."""
        self._safely(self._advance)
        if self.failed and not self._closed:
            self._end()  # a profiler that nobody steps any more would collect events until the loop ends

    def phase(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A named range: ``forward``, ``backward``, ``optimizer``, or a word of your own."""
        if torch.cuda.is_available() and self._memory:
            self._safely(lambda: private.mark_allocations(name))
        return torch.profiler.record_function(name)

    def micro_batch(self, index: int) -> contextlib.AbstractContextManager[Any]:
        """The range of one micro-batch, numbered from 0 in every step."""
        return torch.profiler.record_function(f"micro_batch {index}")

    def own(self, tensor: torch.Tensor | None, category: str, name: str = "", unit: str = "") -> None:
        """Say what a tensor is for (one of ``tracekit.vocabulary.CATEGORIES``) where the recorder cannot know: own buffers, caches."""
        self._safely(lambda: self._owners.own(tensor, category, name, unit))

    def describe(self, **said: Any) -> None:
        """Add to the manifest: ``batch``, ``precision``, ``pipeline``, ``options``, ``strategy``, ``model_shape``, ``units``.

        And ``experts``: what the layers with experts did (``tracekit.manifest.ExpertLoad``); that of recorded steps is kept.
        """

        def update() -> None:
            for key, value in said.items():
                if not hasattr(self.said, key):
                    raise TypeError(f"a manifest has no {key!r}")
                setattr(self.said, key, value)

        self._safely(update)

    def note(self, sentence: str) -> None:
        """A sentence for whoever reads the recording."""
        self._notes.append(sentence)

    @property
    def recording(self) -> bool:
        """Whether events are being kept at this moment."""
        return bool(self._owners.active)

    # The window ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; called by ``record``."""
        self._safely(lambda: self._stack.enter_context(self._profiler))
        self._safely(self._follow)

    def stop(self) -> None:
        """End, also in the middle of the window: what was recorded by then is written."""
        if not self._closed:
            self._end()
        if not self.files and not self.failed:
            told = f"{self._step} steps were run, the window begins after {self.wait + self.warmup}"
            warnings.warn(f"tracekit recorded nothing: {told}", stacklevel=3)

    def _end(self) -> None:
        self._closed = True
        self._unhook()
        self._safely(self._stack.close, always=True)

    def _advance(self) -> None:
        if self._closed:
            return
        self._step += 1
        self._profiler.step()
        self._follow()

    def _follow(self) -> None:
        """Hooks are in place from the last warm-up step on, registrations count while events are kept."""
        action = self._profiler.current_action
        keeps = action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        if (keeps or action == ProfilerAction.WARMUP) and not self._hooked:
            self._hook()
        if keeps and not self._owners.active:
            self._start_ns = time.time_ns()
            self._owners.active = True
            if self._memory:
                self._hooks.standing(self.said.models, self.said.optimizers)
        if not keeps and action == ProfilerAction.NONE and self._hooked:
            self._unhook()

    def _hook(self) -> None:
        self._hooked = True
        self.directory.mkdir(parents=True, exist_ok=True)
        counters = collectives.Counters()
        self._hooks.phases(self.said.models)
        self._hooks.pipeline()
        if self._memory:
            self._hooks.memory(self.said.models, self.said.optimizers)
            if torch.cuda.is_available():
                path = str(self._path(".memory_snapshot.pickle"))
                self._window.enter_context(private.cuda_history(path))
        if self._saved:
            self._window.enter_context(self._hooks.saved_tensors())
        if self._labels == "dispatch":
            self._window.enter_context(collectives.LabelCollectives(counters, self._fail))
        elif self._labels == "flight_recorder":
            self._window.callback(collectives.label_point_to_point(counters, self._fail))

    def _unhook(self) -> None:
        self._owners.active = self._hooked = False
        self._safely(self._window.close, always=True)
        self._safely(self._hooks.remove, always=True)

    def _ready(self, profiler: profile) -> None:
        """The profiler has what it wanted: write everything."""
        self._end_ns = time.time_ns()
        self._owners.active = False
        if not self._start_ns:
            return
        self._safely(lambda: self._write(profiler), always=True)

    def _write(self, profiler: profile) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        trace = self._path(".pt.trace.json.gz")
        write_trace(profiler, trace)
        self.files.append(trace)
        first = self.wait + self.warmup
        steps = list(range(first, min(self._step, first + self.active)))
        notes = [*self._notes, *([f"recording stopped early: {self.failed}"] if self.failed else [])]
        if self._owners.left_out:
            notes.append(f"{self._owners.left_out} registrations of memory were left out")
        groups = groups_of_rank(self.said.mesh)
        said = describe.manifest(self.said, steps, groups, self._owners.columns(), self._calls(groups), notes)
        path = self._path(SUFFIX)
        write_atomically(path, [encode(said)])
        self.files.append(path)

    def _calls(self, groups: Sequence[Group]) -> Calls:
        if self._labels != "flight_recorder":
            return Calls(source=self._labels)
        return collectives.flight_recorder_calls(groups, self._start_ns, self._end_ns)

    def _path(self, suffix: str) -> Path:
        return self.directory / f"rank_{describe.own_rank():05d}{suffix}"

    # Never into the training loop ------------------------------------------------------------------------------------

    def _safely(self, call: Callable[[], Any], *, always: bool = False) -> None:
        if self.failed and not always:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the promise of this file
            self._fail(error)

    def _guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """``hook`` that swallows its exceptions and returns nothing."""

        @functools.wraps(hook)
        def call(*args: Any) -> None:
            if self.failed:
                return
            try:
                hook(*args)
            except Exception as error:  # noqa: BLE001 - the promise of this file
                self._fail(error)

        return call

    def _fail(self, error: BaseException) -> None:
        if not self.failed:
            self.failed = f"{type(error).__name__}: {error}".splitlines()[0][:500]
            warnings.warn(f"tracekit stopped recording: {self.failed}", stacklevel=4)


@contextlib.contextmanager
def record(
    directory: str | Path,
    *,
    mesh: Any = None,
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    wait: int = 1,
    warmup: int = 1,
    active: int = 3,
    labels: Labels = "flight_recorder",
    memory: bool = True,
    shapes: bool = True,
    stacks: bool = False,
    saved_tensors: bool = False,
    **said: Any,
) -> Iterator[Recorder]:
    """Record the steps of the training loop inside; call ``recorder.step()`` after each.

    Args:
        directory: where the files of this rank go: ``rank_00003.pt.trace.json.gz`` and ``rank_00003.manifest.json``.
        mesh: the job's DeviceMesh, or a mapping axis -> size, outermost first.
        model: the module, or the modules that this rank holds (pipeline stages).
        optimizer: one or several.
        wait, warmup, active: steps not looked at, steps to warm up the profiler, steps recorded.
        labels: where group and sequence of a collective come from on backends that leave none in the trace: ``flight_recorder`` (free),
            ``dispatch`` (sees everything, costs about 3 us an operator), ``none``.
        memory: keep allocations, and register who owns which storage.
        shapes: keep the shapes of operators; without them the bytes of gloo's collectives and the labels are lost.
        stacks: keep Python stacks.
        saved_tensors: register every tensor that autograd saves; otherwise activations are told by when they live.
        said: more for the manifest: ``strategy``, ``options``, ``model_shape``, ``batch``, ``precision``, ``pipeline``.

    Yields:
        Recorder. Never raises for a reason of its own: it warns, and the loop goes on unrecorded.
    """
    models = [model] if isinstance(model, nn.Module) else list(model or [])
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or [])
    description = describe.Description(mesh, models, optimizers)
    recorder = Recorder(Path(directory), description, (wait, warmup, active), labels=labels, memory=memory, shapes=shapes, stacks=stacks,
                        saved_tensors=saved_tensors)  # fmt: skip
    if said:
        recorder.describe(**said)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()
