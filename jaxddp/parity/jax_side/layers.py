"""Inputs and outputs of each layer of a port's jax module, recorded in one forward pass."""

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import linen, nnx

from jaxddp.nn.any_model import AnyFunctional, functional_of
from jaxddp.nn.functional import Functional, set_modes
from jaxddp.nn.linen import Bound
from jaxddp.nn.losses import Batch
from jaxddp.nn.plain import PlainFunctional
from jaxddp.parity.case_interface import AnyPortCase, Trajectory, micro_batches_of
from jaxddp.parity.convert import Converter
from jaxddp.parity.jax_side.widened import noted_casts
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.port import Names, Port, Rule
from jaxddp.parity.processes import Tell
from jaxddp.parity.torch_side.layers import LayerCalls
from jaxddp.parity.torch_side.pool import torch_records
from jaxddp.program import bound
from jaxddp.state import Buffers, Params


@dataclass(frozen=True)
class JaxLayers:
    """A job that records one forward pass of the loss layer by layer; the notes are for `first_difference`.

    Attributes:
        case: a port.
        start: initial weights of the reference.
        reference: folder of the reference's records.
        folder: folder of the record to write.
        step, rank: step (from 0) and rank whose first micro-batch is the input.
    """

    case: AnyPortCase
    start: Arrays
    reference: Path
    folder: Path
    step: int
    rank: int

    def run(self, tell: Tell) -> None:
        """Run the forward pass."""
        tell("jax's layers")
        reference = Trajectory(self.start, torch_records(self.reference, self.case.world_size))
        port, calls = self.case.port, LayerCalls()
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            side = self.case.jax_side()
            params, buffers = side.from_torch(reference.before(self.step))
            batch = next(islice(self.case.batches(), self.step, None))
            micro_batch = micro_batches_of(batch, self.rank)[0]
            model = port.jax_model()
            functional = functional_of(model, port.jax_loss, partial(port.first_batch, "jax"), port.no_twin)
            with noted_casts() as casts, side.lifting():
                record_calls(port, model, functional, (params, buffers), micro_batch, calls)
        converter = Converter(port.torch_model(), functional.shapes, port.names, port.transpose_kernel, port.no_twin)
        calls.write(self.folder, twins=twins(converter), images=images_of(port.names), casts=casts)


def twins(converter: Converter) -> dict[str, str]:
    """Map torch's layers, and the modules that contain them, to jax's.

    Two modules are twins only if they hold the same arrays. Shared arrays do not count: torch lists them under several
    modules, and jax may list them under another.

    >>> from torch import nn as torch_nn
    >>> block = torch_nn.Sequential(torch_nn.Sequential(torch_nn.Linear(2, 2, bias=False)))
    >>> twins(Converter(block, {"block.fc.kernel": (2, 2)}, {"block.fc": "0.0"}))
    {'0.0': 'block.fc', '0': 'block', '': ''}
    """
    shared = {*converter.tied.values()}
    of_torch: dict[str, set[str]] = defaultdict(set)
    of_jax: dict[str, set[str]] = defaultdict(set)
    for piece in converter.pieces:
        for held, name in ((of_torch, piece.torch), (of_jax, piece.jax)):
            for module in _containing(name):
                held[module] |= {piece.torch} - shared
    modules: dict[str, str] = {"": ""}
    for piece in converter.pieces:
        if not piece.is_entire:  # one side's array is part of the other's: the layers' outputs cannot be compared
            continue
        for torch_module, jax_module in zip(_containing(piece.torch), _containing(piece.jax), strict=False):
            if of_torch[torch_module] == of_jax[jax_module]:
                modules.setdefault(torch_module, jax_module)
    return dict(sorted(modules.items(), key=lambda pair: -len(pair[0])))


def _containing(name: str) -> list[str]:
    """Return the modules that hold an array, the innermost first, without the model.

    >>> _containing("block.fc.kernel")
    ['block.fc', 'block']
    """
    path = name.split(".")[:-1]
    return [".".join(path[:length]) for length in range(len(path), 0, -1)]


def images_of(names: Names) -> list[tuple[int, ...]]:
    """Return the shapes (C, ...) of the images that jax flattens (..., C)."""
    return [rule.image for rule in names.values() if isinstance(rule, Rule) and rule.image]


def record_calls(
    port: Port, model: Any, functional: AnyFunctional, values: tuple[Params, Buffers], batch: Batch, calls: LayerCalls
) -> None:
    """Compute a port's loss once and record every call of a layer; a plain tree of arrays has no layers.

    Args:
        port: the port.
        model: the return value of its jax_model.
        functional: the model's pure side.
        values: parameters and buffers.
        batch: a micro-batch.
        calls: receives the calls.
    """
    batch = jax.tree.map(jax.numpy.asarray, batch)
    if isinstance(functional, PlainFunctional):
        functional.local_loss(port.jax_loss)(*values, batch)
        return
    with ExitStack() as stack:
        if isinstance(functional, Functional):
            port.jax_loss(listening_nnx(functional, values, calls, stack), batch)
        else:
            stack.enter_context(linen.intercept_methods(_heard_linen(calls)))
            bound(port.jax_loss, key=jax.random.key(0))(Bound(model, functional.variables(*values)), batch)


def listening_nnx(
    functional: Functional, values: tuple[Params, Buffers], calls: LayerCalls, stack: ExitStack
) -> nnx.Module:
    """Return the module with these values; every call of a layer is recorded until the stack is closed."""
    bound = functional.module(*values)
    set_modes(bound, None)
    names = {id(module): ".".join(map(str, path)) for path, module in nnx.iter_modules(bound)}
    active: set[int] = set()
    for kind in {type(module) for _, module in nnx.iter_modules(bound)}:
        if any("__call__" in vars(base) for base in kind.__mro__):
            stack.enter_context(mock.patch.object(kind, "__call__", _heard(kind.__call__, names, active, calls)))
    return bound


def _heard(call: Any, names: dict[int, str], active: set[int], calls: LayerCalls) -> Any:
    @wraps(call)
    def heard(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) in active or id(self) not in names:  # super().__call__ is part of the layer's call
            return call(self, *args, **kwargs)
        active.add(id(self))
        try:
            output = call(self, *args, **kwargs)
        finally:
            active.discard(id(self))
        _note(calls, names[id(self)], args, output)
        return output

    return heard


def _heard_linen(calls: LayerCalls) -> Any:
    def hear(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
        output = call(*args, **kwargs)
        if context.method_name == "__call__":
            _note(calls, ".".join(context.module.path), args, output)
        return output

    return hear


def _note(calls: LayerCalls, name: str, args: tuple[Any, ...], output: Any) -> None:
    array = _array(output[0] if isinstance(output, tuple) else output)
    calls.add(name, _array(args[0]) if args else None, array)


def _array(value: Any) -> np.ndarray | None:
    """Convert a concrete floating-point array to NumPy; None for anything else."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return None
    return np.asarray(value) if jax.numpy.issubdtype(value.dtype, jax.numpy.floating) else None
