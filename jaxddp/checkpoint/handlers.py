"""Orbax handler of a state's arrays that records a write error before Orbax raises it.

A process that cannot write waits inside Orbax for the others, and they wait for its slices.
"""

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.future import Future

Errors = list[Exception]


class StateHandler(ocp.StandardCheckpointHandler):
    """Orbax's handler of arrays.

    Args:
        errors: list to which the errors of writes are added.
    """

    def __init__(self, errors: Errors):
        super().__init__()
        self._errors = errors

    async def async_save(self, *arguments: Any, **options: Any) -> list[Any]:
        """Start to write; see Orbax."""
        futures = await super().async_save(*arguments, **options)
        return [_Noted(future, self._errors) for future in futures or ()]

    def finalize(self, directory: Any) -> None:
        """Merge what the processes have written; see Orbax."""
        with noted(self._errors):
            super().finalize(directory)

    def read(self, directory: Path, like: Any) -> Any:
        """Read arrays, in a tree like that of `like`, unless it is None.

        Orbax's manager would wait for the other processes, which take no part if only one looks for a checkpoint.
        """
        return self.restore(directory, args=StateRestore(like))


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclass
class StateSave(ocp.args.StandardSave):
    """Arrays to save, see Orbax."""


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclass
class StateRestore(ocp.args.StandardRestore):
    """Arrays like those to restore, see Orbax."""


@contextlib.contextmanager
def noted(errors: Errors) -> Iterator[None]:
    """Add an exception of the body to `errors`, and raise it."""
    try:
        yield
    except Exception as error:
        errors.append(error)
        raise


def wait_or_raise(wait: Callable[[], None], errors: Errors) -> None:
    """Call `wait`, but only until an error is noted; raise that error, or the one of `wait`."""
    end: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            wait()
        except Exception as error:
            end.set_exception(error)
        else:
            end.set_result(None)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    while not end.done():
        if errors:
            raise errors[0]
        time.sleep(0.02)
    end.result()


@dataclass
class _Noted:
    """Future whose error is noted."""

    future: Future
    errors: Errors

    def result(self, timeout: float | None = None) -> Any:
        with noted(self.errors):
            return self.future.result(timeout)

    def cancel(self) -> bool | None:
        return self.future.cancel()
