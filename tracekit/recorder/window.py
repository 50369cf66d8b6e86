"""The window of one recording: what is put in place for it, what is written at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch

from tracekit.files import write_atomically
from tracekit.manifest import SUFFIX, Calls, DeviceUse, Group, encode
from tracekit.recorder import collectives, describe, found, private, said, signals
from tracekit.recorder.devices import devices_in_use
from tracekit.recorder.guard import Guard
from tracekit.recorder.history import History
from tracekit.recorder.hooks import Hooks
from tracekit.recorder.owners import OwnerLog
from tracekit.recorder.place import Place
from tracekit.recorder.profiling import Profiling, other_profiler

Labels = Literal["flight_recorder", "dispatch", "none"]


@dataclass(frozen=True)
class Settings:
    """Steps of the window, and what is kept; see ``record``."""

    wait: int = 1
    warmup: int = 1
    active: int = 3
    labels: Labels = "flight_recorder"
    memory: bool = True
    shapes: bool = True
    stacks: bool = False
    saved_tensors: bool = False


class Window:
    """Waits, warms up, records, writes; ``advance`` is called after every step."""

    def __init__(self, directory: Path, told: describe.Description, settings: Settings, guard: Guard, step: int = 0) -> None:
        self.files: list[Path] = []
        self.notes: list[str] = []
        self.owners = OwnerLog()
        self.step = step
        self._directory, self._said, self._settings, self._guard = directory, told, settings, guard
        self._hooks = Hooks(self.owners, guard.guarded)
        self._place = Place()
        kept = {"record_shapes": settings.shapes, "profile_memory": settings.memory, "with_stack": settings.stacks}
        self._profiling = Profiling(self._give_way, kept)
        self._in_place = contextlib.ExitStack()
        self._prepared = self.closed = False
        self._devices: list[DeviceUse] = []
        self._history: History | None = None

    @property
    def marks_allocations(self) -> bool:
        """Whether the phases are to be written on CUDA allocations now."""
        return self._prepared and not self.closed and self._settings.memory and torch.cuda.is_available()

    @property
    def rank(self) -> int:
        """This process' global rank."""
        return self._place.rank

    @property
    def steps(self) -> list[int]:
        """Steps that were recorded whole."""
        first = self._settings.wait + self._settings.warmup
        return list(range(first, min(self.step, first + self._settings.active)))

    def advance(self) -> None:
        """A step is over."""
        self.step += 1
        if not self.closed:
            self._profiling.close_step()
            self.follow()

    def follow(self) -> None:
        """Everything is in place from the last warm-up steps on; registrations count while events are kept."""
        if self.closed:
            return
        at = self.step - self._settings.wait
        self._place.identify()
        if self._prepared:
            self._look()
        elif at >= 0:
            self._prepare()
        if at >= self._settings.warmup and self._prepared and not self._profiling.running:
            self._begin()
        if at >= self._settings.warmup + self._settings.active:
            self.end()
        else:
            self._profiling.open_step(self.step)

    def end(self) -> None:
        """Take everything away, and write what was recorded. Once; then nothing."""
        if self.closed or self._guard.foreign:
            return
        self.closed = True
        self.owners.end()
        safely = self._guard.safely
        if self._prepared:
            self._look()
            self._guard.noted(lambda: self._devices.extend(devices_in_use()), "the memory of whole devices", self.notes)
        kept: list[bool] = []
        safely(lambda: kept.append(self._profiling.end()), always=True)
        history = self._history
        if True in kept:
            if history is not None:
                self._guard.noted(lambda: self.notes.extend(filter(None, [history.take()])), "the CUDA allocator's history", self.notes)
            safely(self._write, always=True)
            if history is not None:
                safely(history.write, always=True)
        safely(self._in_place.close, always=True)
        safely(self._hooks.remove, always=True)

    def finish(self) -> None:
        """Wait for what is written beside the loop."""
        if self._history is not None and not self._guard.foreign:
            self._history.finish()

    # Its parts -------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        other = other_profiler()
        if other:
            self._guard.give_up(other)
            self.end()
            return
        self._prepared = True
        self._guard.noted(self._wrap, "the wrapper around the model", self.notes)
        self._look()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._put_in_place()
        self._profiling.prepare()

    def _wrap(self) -> None:
        told = self._said
        told.models = found.wrapped(told.models)
        told.plan = told.plan or said.plan(told.models, told.optimizers)
        pipeline, batch = ({}, None) if told.pipeline else said.pipeline(told.models)
        told.pipeline, told.batch = told.pipeline or pipeline, told.batch or batch

    def _look(self) -> None:
        told, place = self._said, self._place
        self._guard.noted(lambda: place.look(told.mesh, told.models, told.optimizers), "the mesh of the job", self.notes)

    def _put_in_place(self) -> None:
        settings, told = self._settings, self._said
        self._in_place.enter_context(signals.ending(self.ended_by))
        counters = collectives.Counters()
        self._hooks.phases(told.models)
        self._hooks.pipeline()
        if settings.memory:
            self._hooks.memory(told.models, told.optimizers)
            if torch.cuda.is_available():
                self._in_place.callback(private.mark_allocations, private.mark_allocations(""))
                self._history = History(self._path(".memory_snapshot.pickle"))
                self._in_place.callback(self._history.end)
                self._history.begin()
        if settings.saved_tensors:
            self._in_place.enter_context(self._hooks.saved_tensors())
        if settings.labels == "dispatch":
            self._in_place.enter_context(collectives.LabelCollectives(counters, self._guard.fail))
        elif settings.labels == "flight_recorder":
            self._in_place.callback(collectives.label_point_to_point(counters, self._guard.fail))

    def _begin(self) -> None:
        self._profiling.begin()
        self.owners.begin()
        if self._settings.memory:
            self._hooks.standing(self._said.models, self._said.optimizers)
        self.owners.settled()

    def _give_way(self, why: str) -> None:
        self._guard.give_up(why)
        self.end()

    def ended_by(self, signal: str) -> None:
        """A signal ends the job: what was recorded is written."""
        if self.closed:
            return
        self.notes.append(f"the job was ended by {signal}: what was recorded by then is here")
        self.end()
        self.finish()  # the process ends right behind this

    # What is written -------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        trace = self._path(".pt.trace.json.gz")
        self._profiling.write(trace)
        self.files.append(trace)
        notes = [*self.notes, *([f"recording stopped early: {self._guard.failed}"] if self._guard.failed else [])]
        if self.owners.left_out:
            notes.append(f"{self.owners.left_out} registrations of memory were left out")
        calls = self._calls(self._place.layout.groups)
        path = self._path(SUFFIX)
        told = describe.manifest(self._said, self._place, self.steps, self.owners.columns(), calls, notes)
        write_atomically(path, [encode(msgspec.structs.replace(told, devices=self._devices))])
        self.files.append(path)

    def _calls(self, groups: Sequence[Group]) -> Calls:
        if self._settings.labels != "flight_recorder":
            return Calls(source=self._settings.labels)
        return collectives.flight_recorder_calls(groups, self._profiling.start_ns, self._profiling.end_ns)

    def _path(self, suffix: str) -> Path:
        return self._directory / f"rank_{self._place.rank:05d}{suffix}"
