"""Inputs and outputs of each layer of a port's torch module, recorded in one forward pass. Imports no jax."""

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.processes import Tell, free_at_once
from jaxddp.parity.records import INPUTS, OUTPUTS, Records, RecordWriter, is_large_model
from jaxddp.parity.torch_side.rank import rank_folder
from jaxddp.parity.torch_side.side import Source, load_state, make_side
from torch_ref.distributed import World


@dataclass(frozen=True)
class TorchLayers:
    """A job that records one forward pass of the loss layer by layer.

    Attributes:
        source: model or port.
        start: initial weights of the reference.
        reference: folder of the reference's records.
        folder: folder of the record to write.
        step, rank: step (from 0) and rank whose first micro-batch is the input.
        replicas: world size of the reference.
        world_size: always 1; rank 0 runs the pass.
    """

    source: Source
    start: Arrays
    reference: Path
    folder: Path
    step: int
    rank: int
    replicas: int
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> None:
        """Run the forward pass."""
        tell("torch's layers")
        if is_large_model(self.start):
            free_at_once()
        side = make_side(self.source, self.step + 1, "float64")
        reference = Trajectory(self.start, Records([rank_folder(self.reference, 0)]))
        load_state(side.model, reference.before(self.step), strict=False)
        micro_batch = next(islice(side.batches(self.rank, self.replicas), self.step, None))[0]
        calls = LayerCalls()
        with ExitStack() as hooks, torch.no_grad():
            for name, module in side.model.named_modules():
                listen(module, name, calls, hooks)
            side.loss_fn(side.model, micro_batch)
        calls.write(self.folder)


class LayerCalls:
    """Inputs and outputs of the layers that were called; the n-th call of a layer is recorded as "layer (n)".

    Attributes:
        used: layers in the order in which their first calls returned, including those without recorded outputs.
    """

    def __init__(self) -> None:
        self.used: dict[str, None] = {}
        self._inputs: dict[str, np.ndarray] = {}
        self._outputs: dict[str, np.ndarray] = {}

    def add(self, name: str, inputs: np.ndarray | None, outputs: np.ndarray | None) -> None:
        """Add a call.

        Args:
            name: dotted name of the layer.
            inputs: first argument; None: not an array of real numbers.
            outputs: return value, or the first of several; None: not an array of real numbers, and the call is not
                recorded.
        """
        self.used.setdefault(name)
        if outputs is None:
            return
        number = 1 + sum(call.partition(" ")[0] == name for call in self._outputs)
        key = name if number == 1 else f"{name} ({number})"
        self._outputs[key] = outputs
        if inputs is not None:
            self._inputs[key] = inputs

    @property
    def order(self) -> list[str]:
        """Layers in the order in which their calls returned."""
        return list(self._outputs)

    @property
    def outputs(self) -> dict[str, np.ndarray]:
        """Recorded outputs by call."""
        return dict(self._outputs)

    def write(self, folder: Path, **notes: Any) -> None:
        """Write the calls as one record, with their order and `notes` as its notes."""
        record = {INPUTS: self._inputs, OUTPUTS: self._outputs}
        RecordWriter(folder).write(record, order=self.order, **notes)


def listen(module: nn.Module, name: str, calls: LayerCalls, hooks: ExitStack) -> None:
    """Record every call of the module until the stack is closed; arrays are copied, since layers work in place."""
    given: list[np.ndarray | None] = []

    def begin(_: nn.Module, args: tuple[Any, ...]) -> None:
        given.append(_array(args[0]) if args else None)

    def end(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        inputs, array = given.pop(), _array(output[0] if isinstance(output, tuple) else output)
        calls.add(name, inputs, array)

    hooks.enter_context(module.register_forward_pre_hook(begin))
    hooks.enter_context(module.register_forward_hook(end))


def _array(value: Any) -> np.ndarray | None:
    return (
        value.detach().to_dense().cpu().numpy().copy()
        if isinstance(value, Tensor) and value.is_floating_point()
        else None
    )
