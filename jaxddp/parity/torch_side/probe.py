"""Run a port's torch loss, or its `torch_step`, once to see how its layers are used. Imports no jax."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from jaxddp.parity.convert.layouts import NORMS
from jaxddp.parity.port import Port
from jaxddp.parity.torch_side.draws import ConstantDraws, ServedDraws
from jaxddp.parity.torch_side.layers import LayerCalls, listen
from jaxddp.parity.torch_side.side import TorchSide, default_dtype, in_floats, side_of_port, to_batch
from torch_ref.losses import Batch

RESHAPES = ("flatten", "reshape", "view")
Image = tuple[tuple[int, ...], list[str]]
NOISE = 0.1  # added to all parameters, so that none is zero or symmetric


@dataclass(frozen=True)
class Probe:
    """A forward pass in float64.

    Attributes:
        tensors: weights of the pass.
        calls: the layers that were called.
        images: shapes (C, ...) of images that are flattened, each with the layers after it, up to the first Linear,
            and with the copies of these layers.
        constants: buffers that the pass does not change, other than statistics of norms.
        losses: the losses of a `torch_step` by name, or the mean loss as "loss".
    """

    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    calls: LayerCalls = field(default_factory=LayerCalls)
    images: list[Image] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)


def probe(port: Port) -> Probe:
    """Run the pass on the first micro-batch, at weights near the initial ones."""
    calls = LayerCalls()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), default_dtype("float64"):
        torch.manual_seed(0)
        side = side_of_port(port, 1, "float64")
        copies = _copies(side.model)
        for parameter in side.model.parameters():
            parameter.add_(NOISE * torch.randn_like(parameter))
        tensors = {name: tensor.numpy().copy() for name, tensor in side.model.state_dict().items()}
        batch = to_batch(port.micro_batches(0, 0, "torch")[0], "float64")
        with ExitStack() as hooks, _Flattens() as flattens, ServedDraws(ConstantDraws()):
            for name, module in side.model.named_modules():
                listen(module, name, calls, hooks)
                if isinstance(module, (nn.Linear, *NORMS)):
                    hooks.enter_context(module.register_forward_pre_hook(flattens.hears(name)))
            losses = _compute(side, batch)
        images = _with_copies(flattens.images, copies)
        return Probe(tensors, calls, images, _constants(side.model, tensors), losses)


def _constants(model: nn.Module, before: dict[str, np.ndarray]) -> list[str]:
    """Return the buffers in the state_dict that have kept these values, other than statistics of norms."""
    norms = {name for name, module in model.named_modules() if isinstance(module, NORMS)}
    return [
        name
        for name, buffer in model.named_buffers()
        if name in before and name.rpartition(".")[0] not in norms and np.array_equal(buffer.numpy(), before[name])
    ]


def _compute(side: TorchSide, batch: Batch) -> dict[str, float]:
    """Compute the loss, or take its `torch_step` and return its losses."""
    model = side.model
    if side.torch_step is None:
        sums = side.loss_fn(model, batch)
        return {"loss": float(sums["loss"] / sums["count"])}
    with torch.enable_grad():
        return in_floats(side.torch_step.losses(model, side.torch_step.configure(model), batch))


def _copies(model: nn.Module) -> list[list[str]]:
    """Group Linear layers that have the same weights, as a target network initially has."""
    groups: list[list[str]] = []
    of_name = {name: layer.weight for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    for name, weight in of_name.items():
        same = next((group for group in groups if torch.equal(of_name[group[0]], weight)), None)
        groups.append([name]) if same is None else same.append(name)
    return groups


def _with_copies(images: Sequence[Image], copies: Sequence[Sequence[str]]) -> list[Image]:
    """Add copies of layers to each image, and merge images that then share a layer.

    >>> _with_copies([((2, 3), ["norm", "fc"]), ((2, 3), ["slow.fc"]), ((4, 3), ["a"])], [["fc", "slow.fc"], ["a"]])
    [((2, 3), ['norm', 'fc', 'slow.fc']), ((4, 3), ['a'])]
    """
    merged: list[Image] = []
    for image, layers in images:
        of_all = [*dict.fromkeys([*layers, *(copy for group in copies if {*group} & {*layers} for copy in group)])]
        same = next((names for shape, names in merged if shape == image and {*names} & {*of_all}), None)
        if same is None:
            merged.append((image, of_all))
        else:
            same += [name for name in of_all if name not in same]
    return merged


def may_flatten(module: nn.Module) -> bool:
    """Return whether a model has a convolution and a Linear whose inputs may be its flattened output."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    channels = {layer.out_channels for layer in module.modules() if isinstance(layer, convolutions)}
    inputs = {layer.in_features for layer in module.modules() if isinstance(layer, nn.Linear)}
    return any(size > count and size % count == 0 for size in inputs for count in channels)


class _Flattens(TorchFunctionMode):
    """Record the images that are flattened, and the layers that receive them."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[Image] = []
        self._open: dict[int, list[str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in RESHAPES and isinstance(result, Tensor):
            image = tuple(args[0].shape[1:])
            rows = len(image) > 1 and tuple(result.shape) == (args[0].shape[0], math.prod(image))
            if rows and image[0] > 1 < math.prod(image[1:]):
                self._open[math.prod(image)] = []
                self.images.append((image, self._open[math.prod(image)]))
        return result

    def hears(self, name: str) -> Any:
        """Return a forward hook for the layer of this name."""

        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            size = args[0].shape[-1] if args and isinstance(args[0], Tensor) and args[0].ndim == 2 else 0
            if size in self._open:
                self._open[size].append(name)
                if isinstance(module, nn.Linear):
                    del self._open[size]

        return hook
