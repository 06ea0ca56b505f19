"""Load a half of a port, and a batch for it."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..ports import ExamPort
from .jaxprs import array_digest, hashed

Arrays = Mapping[str, np.ndarray]
BATCHES = 50  # steps of which both ranks' batches are compared
EXAMPLES = 8  # of a program's data in a batch


class Unprovable(Exception):
    """A half that cannot be traced, or that has a form which these proofs do not know."""


@contextmanager
def loaded(port: ExamPort, half: str, text: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the names of a half's file with this text, and of the port's file that draws its batches."""
    port.write(folder, half, text)
    modules: dict[str, Any] = {}
    try:
        for file in dict.fromkeys((port.port, port.halves["torch"], port.halves[half])):
            if file != port.port or file in port.halves.values() or "def batch" in port.texts[file]:
                modules[file] = _module(folder, file)
        names: dict[str, Any] = {}
        for module in modules.values():
            names |= vars(module)
        yield {**names, **vars(modules[port.halves[half]])}
    finally:
        for module in (*modules.values(), *(m for m in [*sys.modules.values()] if _is_in(m, folder))):
            sys.modules.pop(module.__name__, None)


def _is_in(module: Any, folder: Path) -> bool:
    return str(getattr(module, "__file__", None) or "").startswith(f"{folder}/")


def _module(folder: Path, file: str) -> Any:
    """Import a file of the folder, which may import its neighbours."""
    name = file.removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, folder / file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def called(function: Callable[..., Any], names: Mapping[str, Any], *arguments: Any) -> Any:
    """Call a function of a program or a port, with the file's options and configuration if it names them."""
    options = names["Options"]() if "Options" in names else None
    further = {"options": options, "config": SimpleNamespace(seed=0)}
    signature = inspect.signature(function.__init__ if inspect.isclass(function) else function)
    wanted = {name: further[name] for name in signature.parameters if name in further}
    return function(*arguments, **wanted)


def batch_of(names: Mapping[str, Any], side: str) -> dict[str, np.ndarray]:
    """Return a batch of a port, or the first examples of a program's data."""
    draw = names.get(f"{side}_batch", names.get("batch"))
    if draw is not None:
        batch = draw(0, 0)
    else:
        data = called(names["train_data"], names)
        rng = np.random.default_rng(0)
        examples = [{name: array[number] for name, array in data.items()} for number in range(EXAMPLES)]
        augment = names.get("augment")
        examples = [called(augment, names, example, rng) if augment else example for example in examples]
        batch = {name: np.stack([example[name] for example in examples]) for name in examples[0]}
    return {name: np.asarray(array) for name, array in batch.items()}


def batches_digest(names: Mapping[str, Any], side: str) -> str:
    """Return the hash of a half's own batches, "" if both halves share them."""
    draw = names.get(f"{side}_batch")
    if draw is None:
        return ""
    batches = [draw(step, rank) for step in range(BATCHES) for rank in range(2)]
    return hashed(*((name, array_digest(array)) for batch in batches for name, array in batch.items()))
