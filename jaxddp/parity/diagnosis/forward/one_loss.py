"""One loss of a `torch_step` as a function of the model and a batch, for replays. Imports no jax."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from jaxddp.parity.records import Tensors
from jaxddp.parity.torch_side.side import TorchStep
from torch_ref.losses import Batch, Sums
from torch_ref.program_step import Optimizers


class UnknownWeights(Exception):
    """Raised if the loss depends on weights after an update that JAX's records hold only as an excerpt."""


class LossOfStep:
    """One loss of a step whose optimizers set the parameters to JAX's.

    Losses that are computed after an update therefore have the same inputs as in JAX.

    Args:
        step: the port's step.
        name: name of the loss; "": the weights after the step count, and the loss is 0.
        batches: `[step][rank][micro-batch]`.
        after: step -> JAX's parameters after it, under torch's names; may lack some.

    Attributes:
        received: the gradients that the optimizers got in the last run, by parameter; zeros where there was none.
    """

    def __init__(
        self, step: TorchStep, name: str, batches: Sequence[Sequence[Sequence[Batch]]], after: Callable[[int], Tensors]
    ):
        self._step, self._name, self._after = step, name, after
        self.received: Tensors = {}
        self._batches = batches  # keeps the objects alive, because their ids are used
        self._number = {id(batch): k for k, ranks in enumerate(batches) for pieces in ranks for batch in pieces}

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        """Compute the loss without its gradients.

        Raises:
            UnknownWeights: it depends on parameters that `after` lacks.
        """
        made = self._step.configure(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        values = self._after(self._number[id(batch)])
        self.received = {}
        for optimizer in Optimizers(made, model).each:
            optimizer.step = partial(self._leave, optimizer, names, values)  # type: ignore[assignment, method-assign]
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a scheduler warns if it does not see the optimizer's step
            loss = torch.as_tensor({"": 0.0, **self._step.losses(model, made, batch)}[self._name]).detach()
        if loss.isnan() and not values.keys() >= {*names.values()}:
            raise UnknownWeights
        return {"loss": loss, "count": torch.tensor(1.0)}

    def _leave(self, optimizer: Optimizer, names: Mapping[int, str], values: Tensors, *_: Any) -> None:
        """Note the optimizer's gradients; set its parameters to these values, or to NaN if unknown, which shows."""
        with torch.no_grad():
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                name, gradient = names[id(parameter)], parameter.grad
                given = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
                self.received[name] = given.numpy().copy()
                if gradient is not None:
                    parameter.copy_(torch.from_numpy(values[name]) if name in values else torch.tensor(math.nan))
