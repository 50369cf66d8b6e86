"""The recorder around a program that does not know of it (``tracekit run``): steps, models and optimizers are found, not told.

A step is over when the last of the job's optimizers has stepped; which is the last shows when the first of them comes again (at once where
there is one only, which is looked up for those who want early steps). DeepSpeed's engine steps its optimizer once a part of the parameters:
there the engine's own step counts. A step that a gradient scaler skips is one. Models are the outermost modules with parameters of these
optimizers. Everything here is called from the program's own calls, and never raises into them.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tracekit.recorder import marks
from tracekit.recorder.request import Requests, Steps, parse_steps


class Turns:
    """Counts the steps of a job from the steps of its optimizers."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._last: int | None = None
        self._engine = False

    @property
    def begun(self) -> bool:
        """Whether any optimizer has stepped."""
        return bool(self._counts)

    def ends(self, optimizer: int, *, engine: bool) -> None:
        """A step ends with this optimizer, or engine: known before it shows."""
        self._last, self._engine = optimizer, engine

    def over(self, optimizer: int, *, engine: bool = False) -> int | None:
        """``optimizer`` has stepped: how many steps of the job are over, if one is over by this; else None."""
        if engine and not self._engine:
            self._counts, self._last, self._engine = {}, None, True
        if engine is not self._engine:
            return None
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if self._last is None and self._counts[optimizer] == 2:
            self._last = list(self._counts)[-1]
        return self._counts[optimizer] if optimizer == self._last else None


class Attached:
    """One process of the job."""

    def __init__(self, requests: Requests, options: set[str]) -> None:
        self._requests, self._options = requests, options
        self._turns = Turns()
        self._optimizers: dict[int, Any] = {}
        self._recorder: Any = None
        self._calls = 0
        self._process = os.getpid()
        self._steps = 0
        self._over = False
        self._recorded = False
        # Also where a process of multiprocessing ends, which atexit does not see.
        multiprocessing.util.Finalize(None, self.finish, exitpriority=100)

    def after(self, optimizer: Any, *, engine: bool = False) -> None:
        """An optimizer, or an engine, has stepped."""
        self._calls += 1
        if self._over or os.getpid() != self._process:
            return
        try:
            if not self._optimizers:
                marks.leave("stepped")
            self._optimizers.setdefault(id(optimizer), optimizer)
            if self._soon and not self._turns.begun:
                self._find_the_last()
            step = self._turns.over(id(optimizer), engine=engine)
            if step is not None:
                self._steps = step
                self._advance(step)
        except Exception as error:  # noqa: BLE001 - the program goes on whatever happens here
            self._over = True
            _tell_why(f"stopped: {type(error).__name__}: {error}")

    def skipped(self, optimizer: Any, step: Callable[[], Any]) -> Any:
        """A gradient scaler calls ``step``, and may leave the optimizer's step out: that is a step of the job as well."""
        before = self._calls
        result = step()
        if self._calls == before:
            self.after(optimizer)
        return result

    def finish(self) -> None:
        """The process ends: what is being recorded is written."""
        if os.getpid() != self._process or self._over:
            return
        self._over = True
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()
            self._told(recorder)
        elif not self._recorded and self._optimizers and self._requests.next is not None:
            first = self._requests.next.first
            _tell_why(f"recorded nothing: the program ended after {max(self._steps, 1)} steps, step {first} was to be the first")
        elif not self._optimizers and self._requests.next is not None and _is_the_program():
            _tell_why("recorded nothing: no optimizer of torch has stepped here; tracekit.record takes loops that have none")

    @property
    def _soon(self) -> bool:
        """Whether steps are wanted before it has shown by itself what a step is."""
        return self._requests.next is not None and self._requests.next.first < 3

    def _find_the_last(self) -> None:
        from tracekit.recorder.found import last_to_step

        one, engine = last_to_step()
        if one is not None:
            self._turns.ends(id(one), engine=engine)

    def _advance(self, step: int) -> None:
        if self._recorder is not None:
            self._recorder.step()
            if self._recorder.over:
                recorder, self._recorder = self._recorder, None
                self._told(recorder)
            return
        steps = self._requests.due(step)
        if self._requests.news:
            _tell_why(self._requests.news)
            self._requests.news = ""
        if steps is not None:
            self._recorder = self._begin(steps, step)
            self._recorder.start()

    def _begin(self, steps: Steps, step: int) -> Any:
        """The recorder, begun when ``step`` steps are over. Its imports take a second: they wait until they are needed."""
        from tracekit.recorder import describe
        from tracekit.recorder.found import trained
        from tracekit.recorder.record import Recorder
        from tracekit.recorder.window import Settings

        models, optimizers, notes = trained(list(self._optimizers.values()))
        settings = Settings(
            wait=step,
            warmup=steps.first - step,
            active=steps.stop - steps.first,
            memory="no-memory" not in self._options,
            stacks="stacks" in self._options,
            saved_tensors="saved-tensors" in self._options,
        )
        recorder = Recorder(steps.folder, describe.Description(None, models, optimizers), settings, step=step)
        for note in notes:
            recorder.note(note)
            _tell(note)
        return recorder

    def _told(self, recorder: Any) -> None:
        self._recorded = self._recorded or bool(recorder.files)
        if not recorder.files:
            marks.leave("told")  # it has said why it stopped
        if recorder.files and recorder.rank == 0:
            first, last = recorder.steps[0], recorder.steps[-1]
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            _tell(f"recorded {steps}: tracekit analyze {recorder.directory}")


def _is_the_program() -> bool:
    """Whether this process runs what the user wrote: no launcher, no helper of a library, no worker of a data loader."""
    if os.environ.get("RANK", "0") != "0" or multiprocessing.parent_process() is not None:
        return False
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    parts = Path(file).parts if file else ()
    return sys.argv[0] == "-c" or (bool(parts) and parts[-1].endswith(".py") and not {"site-packages", "dist-packages"}.intersection(parts))


_attached: Attached | None = None


def attached() -> Attached:
    """Of this process; made when it is first asked for."""
    global _attached
    if _attached is None:
        steps = parse_steps(os.environ.get("TRACEKIT_STEPS", "10:13"))
        options = set(filter(None, os.environ.get("TRACEKIT_OPTIONS", "").split(",")))
        _attached = Attached(Requests(Path(os.environ["TRACEKIT_RECORD"]), steps), options)
    return _attached


def optimizers_are_there(module: ModuleType) -> None:
    """torch's optimizers have been imported: follow their steps."""
    one = attached()
    module.register_optimizer_step_post_hook(lambda optimizer, args, kwargs: one.after(optimizer))  # noqa: ARG005


def scaler_is_there(module: ModuleType) -> None:
    """Gradient scalers have been imported: count the steps that they leave out."""
    kind, one = module.GradScaler, attached()
    original: Callable[..., Any] = kind.step

    @functools.wraps(original)
    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return one.skipped(optimizer, lambda: original(scaler, optimizer, *args, **kwargs))

    kind.step = step


def deepspeed_is_there(module: ModuleType) -> None:
    """DeepSpeed's engine has been imported: follow its steps."""
    kind, one = module.DeepSpeedEngine, attached()
    original: Callable[..., Any] = kind.step

    @functools.wraps(original)
    def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        boundary = engine.is_gradient_accumulation_boundary()
        result = original(engine, *args, **kwargs)
        if boundary:
            one.after(engine, engine=True)
        return result

    kind.step = step


def _tell_why(sentence: str) -> None:
    """Say why something is not recorded: nobody has to guess at it when the command is over."""
    marks.leave("told")
    _tell(sentence)


def _tell(sentence: str) -> None:
    rank = os.environ.get("RANK", "")
    print(f"tracekit{f' (rank {rank})' if rank else ''}: {sentence}", file=sys.stderr, flush=True)
