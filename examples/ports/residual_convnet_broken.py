"""residual_convnet.py with two layers as a first draft would have them.

    jaxddp check examples/ports/residual_convnet_broken.py

It trains, and its loss falls. Run the check before you compare the files line by line.
"""

from flax import nnx
from residual_convnet import (  # noqa: F401
    CHANNELS,
    WIDER,
    FlaxNet,
    batch,
    jax_loss,
    jax_optimizer,
    names,
    torch_loss,
    torch_model,
    torch_optimizer,
    torch_scheduler,
)


def jax_model() -> nnx.Module:
    rngs = nnx.Rngs(0)
    model = FlaxNet(rngs)
    model.bn = nnx.BatchNorm(CHANNELS, rngs=rngs)  # type: ignore[assignment]
    model.block2.conv1 = nnx.Conv(CHANNELS, WIDER, (3, 3), strides=2, use_bias=False, rngs=rngs)
    return model
