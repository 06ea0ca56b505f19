"""What each layer of the port's torch module is given and returns. Knows no jax."""

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from jaxddp.parity.compare.layers import INPUTS, OUTPUTS
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import Records, RecordWriter
from jaxddp.parity.torch_side.rank import rank_folder
from jaxddp.parity.torch_side.side import TorchSource
from torch_ref.distributed import World


@dataclass(frozen=True)
class TorchLayers:
    """One forward pass of the loss, recorded layer by layer.

    Attributes:
        source: the torch half.
        start: the reference's first weights.
        reference: folder of its records.
        folder: of the record to be made.
        step, rank, replicas: whose first micro-batch.
    """

    source: TorchSource
    start: dict[str, np.ndarray]
    reference: Path
    folder: Path
    step: int
    rank: int
    replicas: int
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> None:
        """Make the pass."""
        tell("torch's layers")
        side = self.source.torch_side(self.step + 1, "float64")
        records = Records([rank_folder(self.reference, 0)])
        state = {**records[self.step - 1]["params"], **records[self.step - 1]["buffers"]} if self.step else self.start
        side.model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()}, strict=False)
        micro_batch = next(islice(side.batches(self.rank, self.replicas), self.step, None))[0]
        calls = Calls()
        with ExitStack() as hooks, torch.no_grad():
            for name, module in side.model.named_modules():
                hooks.enter_context(_listening(module, name, calls))
            side.loss_fn(side.model.train(), micro_batch)
        calls.write(self.folder)


class Calls:
    """Collects layers' inputs and outputs; the n-th call of a layer is called "layer (n)"."""

    def __init__(self) -> None:
        self._inputs: dict[str, np.ndarray] = {}
        self._outputs: dict[str, np.ndarray] = {}

    def add(self, name: str, given: np.ndarray | None, made: np.ndarray) -> None:
        """Note a call that has returned."""
        number = 1 + sum(called.partition(" ")[0] == name for called in self._outputs)
        key = name if number == 1 else f"{name} ({number})"
        self._outputs[key] = made
        if given is not None:
            self._inputs[key] = given

    def clear(self) -> None:
        """Forget what was noted."""
        self._inputs.clear()
        self._outputs.clear()

    def write(self, folder: Path, **notes: Any) -> None:
        """Put them into a record."""
        record = {INPUTS: self._inputs, OUTPUTS: self._outputs}
        RecordWriter(folder).write(record, order=list(self._outputs), **notes)


def _listening(module: nn.Module, name: str, calls: Calls) -> RemovableHandle:
    def hear(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        made = _array(output[0] if isinstance(output, tuple) else output)
        if made is not None:
            calls.add(name, _array(args[0]) if args else None, made)

    return module.register_forward_hook(hear)  # a context manager, which takes the hook away


def _array(value: Any) -> np.ndarray | None:
    return value.detach().numpy() if isinstance(value, Tensor) and value.is_floating_point() else None
