"""Checkpoints of a TrainState, by Orbax: written aside and renamed, so never half there."""

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxddp.errors import InputError, TrainingError, differences, listed
from jaxddp.state import TrainState

_KEEP = 2
_LONG = 100  # characters of a reason that is not ours


class Checkpoints:
    """The newest checkpoints in a folder, one per saved step.

    Arrays are stored once and not per replica, so any number of devices can go on from them.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Made when it is first needed, since that makes the folder."""
        options = ocp.CheckpointManagerOptions(max_to_keep=_KEEP, enable_async_checkpointing=False)
        # Orbax needs the handler to describe a checkpoint that it has not written itself.
        handler = ocp.StandardCheckpointHandler()
        return ocp.CheckpointManager(self._folder.absolute(), options=options, item_handlers=handler)

    @property
    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return max(self.steps, default=None)

    @property
    def steps(self) -> list[int]:
        """The steps of all complete checkpoints.

        Raises:
            InputError: the folder cannot be read.
        """
        with self._one_line("the checkpoints cannot be read"):
            return list(self._manager.all_steps())

    def save(self, state: TrainState) -> None:
        """Store `state` under its step number; saving a step twice changes nothing.

        Raises:
            TrainingError: the state holds a NaN or an infinity, or the disk does not take it; earlier
                checkpoints stay.
        """
        tree = _as_tree(state)
        for name, leaf in _by_name(tree).items():
            if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                raise TrainingError(f"{name} holds a number that is not finite at step {int(tree['step'])}")
        if int(tree["step"]) == self.latest_step:
            return
        try:
            self._manager.save(int(tree["step"]), args=ocp.args.StandardSave(tree))
        except Exception as error:  # tensorstore's and the system's, of many types
            raise TrainingError(
                f"the checkpoint of step {int(tree['step'])} cannot be written: {_reason(error)}"
            ) from error

    def restore(self, like: TrainState) -> TrainState:
        """The newest checkpoint, as NumPy arrays.

        Args:
            like: a state of the same model and optimizer.

        Raises:
            InputError: there is no checkpoint, it is damaged, or of another model or optimizer.
        """
        step = self.latest_step
        if step is None:
            raise InputError(f"--resume {self._folder.parent}: holds no checkpoint yet")
        expected = _as_tree(like)
        older = [str(other) for other in self.steps if other < step]
        advice = f"; remove {self._folder / str(step)} to go on from step {older[-1]}" if older else ""
        with self._one_line(f"the checkpoint of step {step} cannot be read{advice}"):
            if problems := differences(_by_name(self._manager.item_metadata(step).tree), _by_name(expected)):
                where = f"--resume {self._folder.parent}"
                raise InputError(f"{where}: a checkpoint of another model or optimizer: {listed(problems)}")
            restored = self._manager.restore(step, args=ocp.args.StandardRestore(expected))
        restored = jax.tree.map(lambda new, old: np.asarray(new, old.dtype), restored, expected)
        return TrainState(**restored)

    def close(self) -> None:
        """Let go of the folder."""
        if "_manager" in self.__dict__:
            self._manager.close()

    @contextlib.contextmanager
    def _one_line(self, what: str) -> Iterator[None]:
        """What Orbax and tensorstore say in a hundred lines of many types."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"--resume {self._folder.parent}: {what} ({_reason(error)})") from error


def _as_tree(state: TrainState) -> dict[str, Any]:
    tree = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    for name in ("comm_state", "averaged", "scaler"):  # Orbax has no name for nothing
        if not jax.tree.leaves(tree[name]):
            del tree[name]
    return jax.tree.map(np.asarray, tree)


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if len(words) < _LONG else words[:_LONG] + "..."


def _by_name(tree: Any) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
