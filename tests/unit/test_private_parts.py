"""The private parts of other packages that jaxddp stands on: each is there, does what it is used for, and is listed."""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import optax
import pytest
import torch
import tyro
from flax import linen, nnx
from jax import numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jax.extend.core.primitives import random_seed_p
from jax.interpreters.partial_eval import dce_jaxpr
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from tyro._errors import InvalidChoice, on_parse_error

from jaxddp.parity.private_parts import FRAMES, MAPPING, PARTS

ROOT = Path(__file__).parents[2]
PRIVATE = re.compile(r"jax\._src|/jax/_src|torch\._(?!_)\w+|_python_dispatch|_orig_mod|module\._buffers|tyro\._\w+")


def found(path: str) -> Any:
    """Return the module or attribute with a dotted path."""
    words, rest = path.split("."), list[str]()
    while True:
        try:
            value: Any = importlib.import_module(".".join(words))
            break
        except ModuleNotFoundError:
            rest.insert(0, words.pop())
    of_instances = {"_buffers": nn.Module, "_orig_mod": lambda: torch.compile(nn.Identity())}
    for name in rest:
        value = getattr(of_instances[name]() if name in of_instances else value, name)
    return value


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of an import by torch.compile
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.path)
def test_a_private_part_is_there(part: Any) -> None:
    assert found(part.path) is not None, part.reason
    last = part.path.removesuffix(".bind").removesuffix(".__init__").rpartition(".")[2]
    for file in part.used_in if "_src" not in part.path else ():
        assert last in (ROOT / file).read_text(), file


def test_every_private_part_is_listed() -> None:
    users = {file for part in PARTS for file in part.used_in} | {"jaxddp/parity/private_parts.py"}
    files = [path for package in ("jaxddp", "torch_ref") for path in (ROOT / package).rglob("*.py")]
    using = {path.relative_to(ROOT).as_posix() for path in files if PRIVATE.search(path.read_text())}
    assert using <= users
    assert len(using) > 5, "the pattern finds nothing"


def frames_of(call: Callable[..., Any]) -> set[str]:
    """Return the file names of the frames between this file and a function that jax calls."""
    seen: set[str] = set()

    def note(*given: Any) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != __file__:
            seen.add(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
            frame = frame.f_back
        return given[0] if len(given) == 1 else given

    call(note)
    return seen


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("pjit", lambda f: jax.jit(f)(1.0)),
        ("lax/control_flow", lambda f: jax.lax.scan(f, 0.0, jnp.ones(2))),
        ("ad_checkpoint", lambda f: jax.checkpoint(f)(1.0)),
        (f":{MAPPING}", lambda f: jax.vmap(f)(jnp.ones(2))),
    ],
)
def test_transformations_leave_their_modules_frame_around_what_they_trace(module: str, call: Any) -> None:
    assert any(module in frame for frame in frames_of(call))


def test_frames_of_jax_lie_in_the_files_of_the_list() -> None:
    """Between a user's line and the primitive: `watched_program` skips these."""
    equation = jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(1.0).jaxpr.eqns[0]
    assert equation.source_info.traceback is not None
    files = [frame.file_name for frame in equation.source_info.traceback.frames]
    assert any(place in file for file in files for place in FRAMES) and __file__ in files


def test_a_trace_has_another_opaque_state() -> None:
    states = [get_opaque_trace_state(convention="jaxddp")]
    jax.make_jaxpr(lambda x: states.append(get_opaque_trace_state(convention="jaxddp")) or x)(1.0)
    assert states[0] != states[1] and states[0] == get_opaque_trace_state(convention="jaxddp")


def test_dead_code_goes_from_a_program() -> None:
    def function(x: Any) -> Any:
        jnp.sin(x)
        return x + 1

    program = jax.make_jaxpr(function)(1.0).jaxpr
    kept, used = dce_jaxpr(program, [True])
    assert (len(program.eqns), len(kept.eqns), used) == (2, 1, [True])


@pytest.mark.parametrize("make", [lambda: jax.random.key(1), lambda: nnx.Rngs(1).params()])
def test_a_key_is_made_by_the_primitive_whose_bind_is_replaced(make: Callable[[], Any]) -> None:
    with mock.patch.object(random_seed_p, "bind", wraps=random_seed_p.bind) as bind:
        make()
    assert bind.called


def test_arrays_and_optimizers_are_made_by_the_methods_that_are_replaced() -> None:
    with mock.patch.object(nnx.Variable, "__init__", autospec=True, side_effect=nnx.Variable.__init__) as made:
        linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert made.call_count >= 2
    with mock.patch.object(nnx.Optimizer, "__init__", autospec=True, side_effect=nnx.Optimizer.__init__) as made:
        nnx.Optimizer(linear, optax.sgd(0.1), wrt=nnx.Param)
    assert made.call_count == 1
    with mock.patch.object(linen.Module, "param", autospec=True, side_effect=linen.Module.param) as made:
        linen.Dense(3).init(jax.random.key(0), jnp.ones((1, 2)))
    assert [call.args[1] for call in made.call_args_list] == ["kernel", "bias"]


def test_torch_shows_the_operations_of_a_loss() -> None:
    names: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Noting():
        torch.rand(2).double()
    assert names == ["aten::rand", "aten::_to_copy"]


def test_tyro_tells_why_it_refuses_a_command_line() -> None:
    def main(way: Any = "a") -> None: ...

    main.__annotations__["way"] = Literal["a", "b"]
    events: list[Any] = []
    with pytest.raises(SystemExit), on_parse_error(events.append):
        tyro.cli(main, args=["--way", "c"])
    assert isinstance(events[0], InvalidChoice) and (events[0].value, events[0].choices) == ("c", ("a", "b"))
