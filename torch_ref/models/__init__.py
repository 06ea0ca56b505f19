"""Models: one torch.nn module per file, with the same attributes as its twin in jaxddp.models."""

import torch
from torch import nn

from jaxddp.config import TrainConfig
from jaxddp.config.name_patterns import frozen_names
from jaxddp.data.datasets import Dataset
from jaxddp.data.model_sizes import model_sizes
from torch_ref.models.char_mlp import CharMLP
from torch_ref.models.convnet import ConvNet
from torch_ref.models.linear import Linear
from torch_ref.models.mlp import MLP

__all__ = ["MLP", "CharMLP", "ConvNet", "Linear", "build"]

_CLASSES = {"linear": Linear, "mlp": MLP, "char_mlp": CharMLP, "convnet": ConvNet}


def build(config: TrainConfig, dataset: Dataset) -> nn.Module:
    """Build the model that `config` names, sized for `dataset`, with torch's initial weights for the seed.

    Weights are drawn in float32 whatever the run's `--dtype`, and then converted, so that a float64
    run starts from the numbers of the float32 run. The function sets torch's global seed.

    Raises:
        InputError: a dataset or hidden sizes that the model does not support, or a --freeze that matches no parameter
            or all of them.

    >>> from jaxddp.data import datasets
    >>> config = TrainConfig(model="mlp", hidden_sizes=(32,), dtype="float64")
    >>> for name, parameter in build(config, datasets.load(config)).named_parameters():
    ...     print(name, tuple(parameter.shape), parameter.dtype)
    layers.0.weight (32, 64) torch.float64
    layers.0.bias (32,) torch.float64
    layers.1.weight (10, 32) torch.float64
    layers.1.bias (10,) torch.float64
    """
    torch.manual_seed(config.seed)
    sizes = model_sizes(config, dataset)
    if config.dropout:
        sizes["dropout_masks"] = config.dropout_masks
    model = _CLASSES[config.model](**sizes)
    for name in frozen_names("--freeze", config.freeze, dict(model.named_parameters())):
        model.get_parameter(name).requires_grad_(False)
    return model.to(getattr(torch, config.dtype))
