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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch

from tracekit.recorder import accepted, describe, private
from tracekit.recorder.guard import Guard, say
from tracekit.recorder.hang_watch import HangWatch, seconds_of
from tracekit.recorder.window import Labels, Settings, Window


class Recorder:
    """What the training loop holds while it is recorded. Made by ``record``."""

    def __init__(self, directory: Path, said: describe.Description, settings: Settings, step: int = 0) -> None:
        """``step``: how many steps were run before."""
        self.directory = directory
        self.said = said
        self.wait, self.warmup, self.active = settings.wait, settings.warmup, settings.active
        self._guard = Guard()
        self._window = Window(directory, said, settings, self._guard, step)
        self._notes = self._window.notes

    # What a training loop calls --------------------------------------------------------------------------------------

    def step(self) -> None:
        """One training step is over."""
        self._guard.safely(self._window.advance)
        if self.failed:
            self._window.end()  # a profiler that nobody steps any more would collect events until the loop ends

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A named range: ``forward``, ``backward``, ``optimizer``, or a word of your own. CUDA allocations inside carry it."""
        before: list[str] = []
        if self._window.marks_allocations:
            self._guard.safely(lambda: before.append(private.mark_allocations(name)))
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            if before and self._window.marks_allocations:  # else the window has ended inside, and put back what was there before it
                self._guard.safely(lambda: private.mark_allocations(before[0]))

    def micro_batch(self, index: int) -> contextlib.AbstractContextManager[Any]:
        """The range of one micro-batch, numbered from 0 in every step."""
        return torch.profiler.record_function(f"micro_batch {index}")

    def own(self, tensor: torch.Tensor | None, category: str, name: str = "", unit: str = "") -> None:
        """Say what a tensor is for (one of ``tracekit.vocabulary.CATEGORIES``) where the recorder cannot know: own buffers, caches.

        Of a tensor that is older than the window it may be said before: what is alive when the window begins is registered then.
        """
        self._guard.safely(lambda: self._window.owners.own(tensor, category, name, unit))

    def describe(self, **said: Any) -> None:
        """Add to the manifest: ``batch``, ``precision``, ``pipeline``, ``options``, ``strategy``, ``plan``, ``model_shape``, ``units``.

        And ``experts``: what the layers with experts did (``tracekit.manifest.ExpertLoad``); that of recorded steps is kept.
        """

        def update() -> None:
            for key, value in said.items():
                if not hasattr(self.said, key):
                    raise TypeError(f"a manifest has no {key!r}")
                setattr(self.said, key, value)

        self._guard.safely(update)

    def note(self, sentence: str) -> None:
        """A sentence for whoever reads the recording."""
        self._notes.append(sentence)

    @property
    def recording(self) -> bool:
        """Whether events are being kept at this moment."""
        return bool(self._window.owners.active)

    @property
    def failed(self) -> str:
        """Why recording stopped before its end; '' where it did not."""
        return self._guard.failed

    def fail(self, error: Exception) -> None:
        """Recording ends because of ``error``; the loop goes on."""
        self._guard.fail(error)

    @property
    def over(self) -> bool:
        """Whether the window has ended: nothing more will be recorded."""
        return self._window.closed

    @property
    def rank(self) -> int:
        """This process' global rank."""
        return self._window.rank

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps that were recorded whole, from 0."""
        return self._window.steps

    @property
    def files(self) -> list[Path]:
        """What was written."""
        return self._window.files

    # The window ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; called by ``record``."""
        self._guard.safely(self._window.follow)

    def watched(self, flight_recorder: bool | float) -> HangWatch | None:
        """What watches the loop for a hang, begun; None where nobody wants it, or it cannot be."""
        found: list[HangWatch] = []

        def begin() -> None:
            seconds = seconds_of(flight_recorder)
            if seconds:
                found.append(HangWatch(self.directory, seconds, lambda: self.rank, self._window.ended_by))
                found[0].start()

        self._guard.safely(begin)
        return found[0] if found else None

    def stop(self) -> None:
        """End, also in the middle of the window: what was recorded by then is written."""
        self._window.end()
        self._guard.safely(self._window.finish, always=True)
        if not self.files and not self.failed and not self._guard.foreign:
            say(f"tracekit recorded nothing: {self._window.step} steps were run, the window begins after {self.wait + self.warmup}")


@contextlib.contextmanager
def record(
    directory: str | Path,
    *,
    mesh: Any = None,
    model: Any = None,
    optimizer: Any = None,
    wait: int = 1,
    warmup: int = 1,
    active: int = 3,
    labels: Labels = "flight_recorder",
    memory: bool = True,
    shapes: bool = True,
    stacks: bool = False,
    saved_tensors: bool = False,
    flight_recorder: bool | float = False,
    **said: Any,
) -> Iterator[Recorder]:
    """Record the steps of the training loop inside; call ``recorder.step()`` after each.

    Args:
        directory: where the files of this rank go: ``rank_00003.pt.trace.json.gz`` and ``rank_00003.manifest.json``.
        mesh: the job's DeviceMesh, or a mapping axis -> size, outermost first.
        model: the module, or the modules that this rank holds (pipeline stages).
        optimizer: one or several, torch's or anything that has their ``param_groups``.
        wait, warmup, active: steps not looked at, steps to warm up the profiler, steps recorded.
        labels: where group and sequence of a collective come from on backends that leave none in the trace: ``flight_recorder`` (free),
            ``dispatch`` (sees everything, costs about 3 us an operator), ``none``.
        memory: keep allocations, and register who owns which storage.
        shapes: keep the shapes of operators; without them the bytes of gloo's collectives and the labels are lost.
        stacks: keep Python stacks.
        saved_tensors: register every tensor that autograd saves; otherwise activations are told by when they live.
        flight_recorder: watch the whole loop, and leave what every rank was doing (calls, all Python stacks) where it fails, is told to
            end, or a call is not over after so many seconds (True: 300). Where torch's own recorder is off by default (NCCL before
            torch 2.5) set TORCH_NCCL_TRACE_BUFFER_SIZE before the process groups are made.
        said: more for the manifest: ``strategy``, ``plan``, ``options``, ``model_shape``, ``batch``, ``precision``, ``pipeline``.

    Yields:
        Recorder. Never raises for a reason of its own: it warns, and the loop goes on unrecorded.
    """
    settings = Settings(wait, warmup, active, labels, memory, shapes, stacks, saved_tensors)
    recorder = _made(directory, mesh, model, optimizer, settings)
    if said:
        recorder.describe(**said)
    watch = recorder.watched(flight_recorder)  # before anything else is put in place, so that it goes last
    recorder.start()
    well = False
    try:
        yield recorder
        well = True
    except BaseException as error:
        if not isinstance(error, GeneratorExit):
            recorder.note(f"the loop was left by {type(error).__name__}: what was recorded by then is here")
        if watch is not None:
            watch.raised(error)
        raise
    finally:
        recorder.stop()
        if watch is not None:
            watch.stop(well=well)


def _made(directory: str | Path, mesh: Any, model: Any, optimizer: Any, settings: Settings) -> Recorder:
    """The recorder; one that has failed already where it cannot be made of these."""
    try:
        if settings.labels not in get_args(Labels):
            raise ValueError(f"labels={settings.labels!r} is none of {', '.join(get_args(Labels))}")
        mesh, models, optimizers, notes = accepted.accepted(mesh, model, optimizer)
        recorder = Recorder(Path(directory).absolute(), describe.Description(mesh, models, optimizers), settings)
        for note in notes:
            recorder.note(note)
            say(f"tracekit: {note}")
    except Exception as error:  # noqa: BLE001 - the promise of this file
        recorder = Recorder(Path(), describe.Description(), Settings())
        recorder.fail(error)
    return recorder
