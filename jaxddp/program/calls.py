"""Call a function of the user's with what it asks for by name.

>>> def jax_model(options, width=8):
...     return options, width
>>> bound(jax_model, options="large", train=True)()
('large', 8)
"""

import dis
import inspect
from collections.abc import Callable, Collection
from functools import partial, wraps
from pathlib import Path
from typing import Any

from jaxddp.scripts import errors_located

# Parameters of a program's functions that are passed by name, to those that have them.
BY_NAME = ("options", "config", "train", "key", "total_steps", "steps_per_epoch", "world_size")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def asks_for(function: Any, name: str) -> bool:
    """Return whether a function has a parameter of this name; an object without a signature has none.

    >>> asks_for(lambda model, train: 0, "train"), asks_for(lambda model, batch: 0, "train"), asks_for(3, "train")
    (True, False, False)
    >>> class Opaque(type):
    ...     def __call__(cls, *arguments): ...
    >>> asks_for(Opaque("Net", (), {"__init__": lambda self, options: None}), "options")
    True
    """
    return callable(function) and name in _parameters(function)


def bound(function: Any, **given: Any) -> Any:
    """Return the function with the parameters among `given` that it has; any other object unchanged."""
    taken = {name: value for name, value in given.items() if asks_for(function, name)}
    return partial(function, **taken) if taken else function


def reads(function: Any, names: Collection[str]) -> set[str]:
    """Return which of these attributes the code of a function that asks for `config` reads.

    >>> reads(lambda config: config.lr * momentum, ["lr", "momentum"]), reads(lambda lr: lr.lr, ["lr"])
    ({'lr'}, set())
    """
    code = getattr(inspect.unwrap(function), "__code__", None) if asks_for(function, "config") else None
    codes = [code] if code is not None else []
    for code in codes:  # which grows by the functions within
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return {i.argval for code in codes for i in dis.get_instructions(code) if i.opname == "LOAD_ATTR"} & {*names}


def takes(function: Callable[..., Any]) -> int:
    """Count the arguments that a caller must pass by position, without those that are passed by name.

    >>> takes(lambda params, state, batch, key, more=0: 0), takes(partial(lambda model, batch, train: 0, train=True))
    (3, 2)
    """
    parameters = _parameters(function).values()
    return sum(p.kind in POSITIONAL and p.default is p.empty and p.name not in BY_NAME for p in parameters)


def located(function: Any, path: Path) -> Any:
    """Return the function of a user's file with `errors_located`; any object that is not a function unchanged."""
    if not callable(function):
        return function

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with errors_located(path):
            return function(*arguments, **named)

    return call


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    if inspect.isclass(function):  # whose metaclass, as that of nnx.Module, may hide what it takes
        return dict([*_parameters(function.__init__).items()][1:])
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin, or no function
        return {}
