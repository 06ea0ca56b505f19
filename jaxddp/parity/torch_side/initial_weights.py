"""Draw the initial weights of a port's torch model under other seeds. Imports no jax."""

from dataclasses import dataclass

import numpy as np
import torch

from jaxddp.parity.initial_draws import DrawnTensor, Seeds, drawn
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.port import Port, PortSource
from jaxddp.parity.processes import Tell
from jaxddp.parity.sums import Summand, folded
from torch_ref.distributed import World
from torch_ref.program import default_dtype


@dataclass(frozen=True)
class TorchInitialWeights:
    """A job that draws the initial weights of a port's torch model several times.

    Attributes:
        source: makes the port.
        count: number of draws.
        seed: seed of torch's generator in the first draw.
        summands: elements of vectors that jax's arrays add to others.
        world_size: always 1.
    """

    source: PortSource
    count: int
    seed: int = 0
    summands: tuple[Summand, ...] = ()
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> tuple[dict[str, DrawnTensor], tuple[str, ...]]:
        """Return the draws of the model's tensors, and the names of its parameters."""
        parameters: list[str] = []

        def tensors_of(port: Port) -> Arrays:
            tell("torch_model")
            model = port.torch_model()
            parameters[:] = [name for name, _ in model.named_parameters(remove_duplicate=False)]
            tensors = {name: x.detach() for name, x in model.state_dict().items()}
            return folded("params", {name: _array(x) for name, x in tensors.items()}, self.summands)

        seeds = Seeds(self.seed)
        with seeds.replacing(), default_dtype("float32"):
            return drawn(self.source, tensors_of, seeds, self.count), tuple(parameters)


def _array(x: torch.Tensor) -> np.ndarray:
    return (x.float() if x.is_floating_point() else x).cpu().numpy()
