"""Checkpoints of a TrainState, written by Orbax: renamed when complete, so that none is ever partial."""

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
_LONG = 100  # characters shown of another library's error message


class Checkpoints:
    """Newest checkpoints in a folder, one per saved step.

    Replicated arrays are stored once, so that a run can resume on any number of devices.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Orbax manager, created on first use because it creates the folder."""
        options = ocp.CheckpointManagerOptions(max_to_keep=_KEEP, enable_async_checkpointing=False)
        # Without the handler, Orbax cannot read the metadata of a checkpoint that this manager did not write.
        handler = ocp.StandardCheckpointHandler()
        return ocp.CheckpointManager(self._folder.absolute(), options=options, item_handlers=handler)

    @property
    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint; None if there is none."""
        return max(self.steps, default=None)

    @property
    def steps(self) -> list[int]:
        """Steps of all complete checkpoints.

        Raises:
            InputError: the folder cannot be read.
        """
        with self._one_line("the checkpoints cannot be read"):
            return list(self._manager.all_steps())

    def save(self, state: TrainState) -> None:
        """Save `state` under its step number; saving a step again has no effect.

        Raises:
            TrainingError: the state holds a NaN or an infinity, or cannot be written. Earlier checkpoints stay.
        """
        tree = _as_tree(state)
        for name, leaf in _by_name(tree).items():
            if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                raise TrainingError(f"{name} is not finite at step {int(tree['step'])}")
        if int(tree["step"]) == self.latest_step:
            return
        try:
            self._manager.save(int(tree["step"]), args=ocp.args.StandardSave(tree))
        except Exception as error:  # many types, from tensorstore and the system
            raise TrainingError(
                f"the checkpoint of step {int(tree['step'])} cannot be written: {_reason(error)}"
            ) from error

    def restore(self, like: TrainState) -> TrainState:
        """Load the newest checkpoint as NumPy arrays.

        Args:
            like: state of the same model and optimizer.

        Raises:
            InputError: no checkpoint, a damaged one, or one of another model or optimizer.
        """
        step = self.latest_step
        if step is None:
            raise InputError(f"--resume {self._folder.parent}: has no checkpoint yet")
        expected = _as_tree(like)
        older = [str(other) for other in self.steps if other < step]
        advice = f"; remove {self._folder / str(step)} to continue from step {older[-1]}" if older else ""
        with self._one_line(f"the checkpoint of step {step} cannot be read{advice}"):
            if problems := differences(_by_name(self._manager.item_metadata(step).tree), _by_name(expected)):
                where = f"--resume {self._folder.parent}"
                raise InputError(f"{where}: a checkpoint of another model or optimizer: {listed(problems)}")
            restored = self._manager.restore(step, args=ocp.args.StandardRestore(expected))
        restored = jax.tree.map(lambda new, old: np.asarray(new, old.dtype), restored, expected)
        return TrainState(**restored)

    def close(self) -> None:
        """Release Orbax's resources."""
        if "_manager" in self.__dict__:
            self._manager.close()

    @contextlib.contextmanager
    def _one_line(self, what: str) -> Iterator[None]:
        """Turn the long exceptions of Orbax and tensorstore into an `InputError` of one line."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"--resume {self._folder.parent}: {what} ({_reason(error)})") from error


def _as_tree(state: TrainState) -> dict[str, Any]:
    tree = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    for name in ("comm_state", "averaged", "scaler"):  # Orbax cannot store an empty tree
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
