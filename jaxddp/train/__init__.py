"""Training of a program: `jaxddp train`, or `jaxddp.train.run` from Python.

`trainer` runs a training from its flags to its result; `build` makes its parts, `loop` has the epochs, `tester` the
tests and what follows from them, `saver` the checkpoints. Names are imported on first use, so that the command can
check the memory of the process before it imports jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxddp.train.parts import Result
    from jaxddp.train.trainer import main, run

__all__ = ["Result", "main", "run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("jaxddp.train.trainer"), name)
    raise AttributeError(f"module 'jaxddp.train' has no attribute '{name}'")
