"""Checkpoints of a TrainState, written by Orbax: renamed when complete, so that none is ever partial."""

import contextlib
import copy
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxddp.checkpoint.handlers import Errors, StateHandler, StateSave, wait_or_raise
from jaxddp.checkpoint.record import FILE, DamagedError, Notes, Record, RecordHandler, RecordSave
from jaxddp.checkpoint.renaming import renamed_folder
from jaxddp.checkpoint.slices import over_processes
from jaxddp.checkpoint.trees import as_tree, by_name, not_finite, without_values
from jaxddp.checkpoint.workarounds import plain_path, silence
from jaxddp.distributed.agreement import check_same
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError, NotFiniteError, TrainingError, differences, listed, shortened, tell
from jaxddp.files import check_in_place, check_regular, reason_of, sync, writing
from jaxddp.state import TrainState

STATE, RECORD = "state", "record"  # items of a checkpoint
KEEP = 2
TEST_LOSS = "test_loss"  # note by which the best checkpoint is known
_NEVER = 2**31 - 1  # seconds; Orbax compares times of day, which may jump, and --stall-timeout watches over a save


class Checkpoints:
    """Newest checkpoints in a folder, one per saved step.

    Replicated arrays are stored once, so that a run can resume on any number of devices.

    Args:
        folder: folder of the checkpoints; created when it is first used.
        keep: number of newest checkpoints to keep.
        keep_best: note whose smallest value marks a checkpoint to keep too; True: `TEST_LOSS`.
        best_mode: "max" if its largest value does.
        replicas: replicas of several processes. Each has such an object, makes the same calls and writes a part; the
            first one renames and prints. None: there is only this process.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = KEEP,
        keep_best: bool | str = False,
        replicas: Replicas | None = None,
        best_mode: str = "min",
    ):
        self._folder = folder
        self._replicas = replicas
        self._is_first = replicas is None or 0 in replicas.local_ranks
        self._is_alone = replicas is None or replicas.in_one_process
        self._errors: Errors = []  # of writes
        self._state_handler = StateHandler(self._errors)
        self._like: Any = None  # tree of arrays like those in the checkpoints, once it is known
        self._keep = keep
        self._best_note = TEST_LOSS if keep_best is True else keep_best or None
        self._sign = -1 if best_mode == "max" else 1
        self._resources = contextlib.ExitStack()
        self._losses: dict[int, float] = {}  # step -> its note, negated if the largest is best

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Orbax manager, created on first use because it creates the folder."""
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Kept(self._kept),
            cleanup_tmp_directories=True,
            lightweight_initialize=True,
            temporary_path_class=renamed_folder(self._errors),
            # Threads that wait for a folder made in the background would never end where it cannot be made.
            async_options=ocp.options.AsyncOptions(
                timeout_secs=_NEVER, create_directories_asynchronously=not self._is_alone
            ),
        )
        silence()
        handlers = {STATE: self._state_handler, RECORD: RecordHandler(self._errors)}
        return ocp.CheckpointManager(
            self._plain_folder, options=options, item_names=tuple(handlers), item_handlers=handlers
        )

    @cached_property
    def _plain_folder(self) -> Path:
        """Path to the folder as Orbax can write to it."""
        return self._resources.enter_context(plain_path(self._folder.absolute()))

    def create(self) -> None:
        """Create the folder, so that a missing one means that checkpoints were lost."""
        with writing(TrainingError, self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            sync(self._folder.parent)
            self._descriptor  # noqa: B018

    @cached_property
    def _descriptor(self) -> int:
        """Descriptor of the folder, which is open to notice when the folder is moved or removed."""
        descriptor = os.open(self._folder, os.O_RDONLY)
        self._resources.callback(os.close, descriptor)
        return descriptor

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint; None if there is none."""
        return max(self.steps, default=None)

    @property
    def steps(self) -> list[int]:
        """Steps of all checkpoints, that of a save in progress included.

        Raises:
            InputError: the folder cannot be read.
        """
        with self._one_line("the checkpoints cannot be read"):
            return sorted(self._manager.all_steps())

    def save(self, state: TrainState, notes: Notes | None = None) -> None:
        """Save a copy of `state` under its step number, in the background; saving a step again has no effect.

        Args:
            state: may be donated once this returns.
            notes: JSON to save with it, see `notes`.

        Raises:
            NotFiniteError: the state holds a NaN, or an infinity in a parameter, see `trees.not_finite`.
            MovedError: the folder was moved or removed.
            TrainingError: the save before this one has failed. Earlier checkpoints stay.
        """
        # Views would not do: the caller may change its NumPy arrays. (XLA 0.10 copies a donated array that has a view.)
        tree = jax.tree.map(np.array, as_tree(state))
        step, arrays = int(tree["step"]), by_name(tree)
        for name in not_finite(arrays):
            raise NotFiniteError(f"{name} is not finite at step {step}")
        self.wait()
        if step == self.latest_step:
            return
        self._losses[step] = self._loss(notes or {})
        self._like = without_values(tree)
        with self._failing(step):
            check_in_place(self._folder, self._descriptor)
            items = {
                STATE: StateSave(over_processes(tree)),
                RECORD: RecordSave(arrays, copy.deepcopy(dict(notes or {}))),
            }
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def wait(self) -> None:
        """Wait until the last save is complete.

        Raises:
            MovedError: the folder was moved or removed.
            TrainingError: it cannot be written. Earlier checkpoints stay.
        """
        if "_manager" in self.__dict__:
            with self._failing(self.latest_step):
                if self._is_alone:
                    self._manager.wait_until_finished()
                else:
                    wait_or_raise(self._manager.wait_until_finished, self._errors)
                check_in_place(self._folder, self._descriptor)

    def restore(self, like: TrainState) -> TrainState:
        """Load the newest checkpoint that is intact, as NumPy arrays; rename damaged ones to STEP.damaged.

        Args:
            like: state of the same model and optimizer.

        Raises:
            InputError: no checkpoint is intact, or it is of another model or optimizer or of a newer jaxddp.
        """
        self.wait()
        steps = self.steps
        if not steps:
            raise InputError(f"--resume {self._folder.parent}: has no checkpoint yet")
        problems: list[str] = []
        for step in reversed(steps):
            try:
                state = self._restored(step, like)
            except DamagedError as error:
                problems.append(f"the checkpoint of step {step} is damaged ({error})")
            else:
                self._agree(step)
                if damaged := steps[steps.index(step) + 1 :]:
                    self._set_aside(damaged)
                    self._agree(step)
                    self._manager.reload()
                for problem in problems if self._is_first else ():
                    tell(f"{problem}; continuing from step {step}")
                return state
        raise InputError(f"--resume {self._folder.parent}: {listed(problems)}; none is intact")

    def is_best(self, notes: Notes) -> bool:
        """Return whether a checkpoint with these notes would be the best one so far."""
        return self._loss(notes) < min(map(self._losses.__getitem__, self._best(self.steps)), default=math.inf)

    def notes(self, step: int) -> dict[str, Any]:
        """Return the notes saved with an intact checkpoint."""
        return Record.read(self._folder / str(step) / RECORD / FILE).notes

    def newest_intact(self) -> int | None:
        """Return the step of the newest checkpoint that holds what was saved; None if there is none.

        After an error, one of several processes may call this without the others.

        Raises:
            MovedError: the folder was moved or removed.
        """
        check_in_place(self._folder, self._descriptor)
        if not self._is_alone and self._like is None:
            return None  # nothing was saved or restored yet, and Orbax's manager is made by all together
        with contextlib.suppress(TrainingError):
            self.wait()
        for step in reversed(self.steps):
            with contextlib.suppress(DamagedError, InputError):
                self._arrays(step, self._record(step), self._like)
                return step
        return None

    def close(self) -> None:
        """Wait for the last save, whether it fails or not, and release Orbax's resources."""
        if "_manager" in self.__dict__:
            with contextlib.suppress(TrainingError):
                self.wait()
            if self._is_alone or not self._errors:
                with contextlib.suppress(Exception):  # a failed save, which Orbax raises again
                    self._manager.close()
        self._resources.close()

    def _restored(self, step: int, like: TrainState) -> TrainState:
        expected = self._like = without_values(as_tree(like))
        record = self._record(step)
        saved = {name: jax.ShapeDtypeStruct(x["shape"], x["dtype"]) for name, x in record.arrays.items()}
        if problems := differences(saved, by_name(expected)):
            where = f"--resume {self._folder.parent}"
            raise InputError(f"{where}: a checkpoint of another model or optimizer: {listed(problems)}")
        tree = jax.tree.map(np.asarray, self._arrays(step, record, expected))
        return TrainState(**tree)

    def _record(self, step: int) -> Record:
        for path in (self._folder / str(step)).rglob("*"):  # reading a pipe would block forever
            try:
                check_regular(path.name, path)
            except InputError as error:
                raise DamagedError(f"{error}") from None
        try:
            return Record.read(self._folder / str(step) / RECORD / FILE)
        except InputError as error:
            raise InputError(f"--resume {self._folder.parent}: the checkpoint of step {step} {error}") from None

    def _arrays(self, step: int, record: Record, like: Any) -> Any:
        """Read the arrays of a checkpoint, in a tree like that of `like`, unless it is None.

        Raises:
            DamagedError: they cannot be read, or are not those that were saved.
        """
        try:
            restored = self._state_handler.read(self._plain_folder / str(step) / STATE, like)
        except Exception as error:  # many types, from tensorstore and the system
            raise DamagedError(_reason(error)) from None
        if damaged := record.damaged(by_name(restored)):
            raise DamagedError(listed(damaged, joint=", "))
        return restored

    def _kept(self, steps: Sequence[int]) -> set[int]:
        """Return the steps whose checkpoints are to be kept."""
        return {*sorted(steps)[-self._keep :], *self._best(steps)}

    def _best(self, steps: Sequence[int]) -> list[int]:
        """Return the step whose note is best; none if there is no such note."""
        for step in set(steps) - self._losses.keys() if self._best_note is not None else ():
            with contextlib.suppress(DamagedError, InputError):
                self._losses[step] = self._loss(self.notes(step))
        measured = [step for step in sorted(steps) if self._losses.get(step, math.inf) < math.inf]
        return [min(measured, key=self._losses.__getitem__)] if measured else []

    def _loss(self, notes: Notes) -> float:
        """Return the number to be small, from the notes of a checkpoint; infinity if there is none."""
        value = math.nan if self._best_note is None else notes.get(self._best_note)
        return math.inf if value is None or math.isnan(value) else self._sign * float(value)

    def _agree(self, step: int) -> None:
        """Wait for all processes, and check that they continue from the same step."""
        if self._replicas is not None:
            advice = f"--resume {self._folder.parent} must be readable by all"
            check_same({"newest intact checkpoints": f"{step}"}, self._replicas, advice)

    def _set_aside(self, steps: Sequence[int]) -> None:
        """Rename damaged checkpoints, so that their steps can be saved again."""
        for step in steps if self._is_first else ():
            target = self._folder / f"{step}.damaged"
            with self._one_line(f"the damaged checkpoint of step {step} cannot be renamed"):
                shutil.rmtree(target, ignore_errors=True)
                (self._folder / str(step)).rename(target)

    @contextlib.contextmanager
    def _failing(self, step: int | None) -> Iterator[None]:
        """Turn the exceptions of a failed save into a `TrainingError` of one line."""
        try:
            yield
        except Exception as error:  # many types, from tensorstore and the system
            with contextlib.suppress(OSError):
                check_in_place(self._folder, self._descriptor)  # a missing folder explains every other error
            self._manager.reload()  # Orbax has forgotten the checkpoints that it would have removed
            raise TrainingError(
                f"{self._folder}: the checkpoint of step {step} cannot be written: {_reason(error)}"
            ) from error

    @contextlib.contextmanager
    def _one_line(self, what: str) -> Iterator[None]:
        """Turn the long exceptions of Orbax and tensorstore into an `InputError` of one line."""
        try:
            yield
        except Exception as error:
            raise InputError(f"--resume {self._folder.parent}: {what} ({_reason(error)})") from error


@dataclass
class _Kept:
    """Orbax's preservation policy."""

    choose: Callable[[Sequence[int]], set[int]]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        kept = self.choose([checkpoint.step for checkpoint in checkpoints])
        return [checkpoint.step in kept for checkpoint in checkpoints]


def _reason(error: Exception) -> str:
    """Return what an error says, in the system's words where it comes from there; tensorstore's take pages."""
    if match := re.search(r"os_error_code='(\d+)'", str(error)):
        error = OSError(int(match[1]), os.strerror(int(match[1])))
    return reason_of(error) if isinstance(error, OSError) else shortened(" ".join(str(error).split()))
