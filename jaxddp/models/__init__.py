"""Models: one flax.nnx module per file, with the same attributes as its twin in torch_ref.models.

Every model takes its sizes and the `Generator` of its initial weights.
"""

from flax import nnx

from jaxddp.config import TrainConfig
from jaxddp.data.datasets import Dataset
from jaxddp.data.model_sizes import model_sizes
from jaxddp.data.torch_rng import Generator
from jaxddp.models.char_mlp import CharMLP
from jaxddp.models.convnet import ConvNet
from jaxddp.models.linear import Linear
from jaxddp.models.mlp import MLP

__all__ = ["MLP", "CharMLP", "ConvNet", "Linear", "build"]

_CLASSES = {"linear": Linear, "mlp": MLP, "char_mlp": CharMLP, "convnet": ConvNet}


def build(config: TrainConfig, dataset: Dataset) -> nnx.Module:
    """Build the model that `config` names, sized for `dataset`, with torch's initial weights for the seed."""
    sizes = model_sizes(config, dataset)
    if config.model in ("char_mlp", "convnet"):
        sizes["sync_batch_norm"] = config.sync_batch_norm
    return _CLASSES[config.model](**sizes, generator=Generator(config.seed))
