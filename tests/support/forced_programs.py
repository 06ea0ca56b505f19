"""Two programs of a loss, in torch and in jax, whose faults are located."""

from collections.abc import Callable, Mapping

import jax
import numpy as np
import torch
from jax import numpy as jnp
from torch import nn

from jaxddp.parity.diagnosis.forced.causes import LocatedFault, located_faults
from jaxddp.parity.diagnosis.forced.torch_graph import TorchGraph
from jaxddp.parity.jax_side.value_graph import graph_of
from torch_ref.losses import LossFunction

Arrays = Mapping[str, jax.Array]


def faults_of(
    model: nn.Module,
    torch_loss: LossFunction,
    jax_loss: Callable[[Arrays, Arrays], jax.Array],
    batch: Mapping[str, np.ndarray],
) -> list[LocatedFault]:
    """Return the faults that make a loss in jax, of torch's state and a batch, differ from torch's."""
    loss = TorchGraph(model, torch_loss, {name: torch.from_numpy(x) for name, x in batch.items()})
    with jax.enable_x64(True):
        state = {name: jnp.asarray(x.numpy()) for name, x in model.state_dict().items()}
        graph = graph_of(jax_loss, [state, {name: jnp.asarray(x) for name, x in batch.items()}])
    return located_faults(loss, graph, [], {}, {}, lambda call: ())[0]
