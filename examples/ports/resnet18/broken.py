"""port.py with another flax_model, in which the convolutions are built as in flax/examples/imagenet.

    python -m jaxddp.parity examples/ports/resnet18/broken.py --steps 3

It trains, and its loss falls. Run the check before you read on.
"""

from functools import partial

from flax import linen as nn
from flax_resnet18 import ResNet18
from port import (  # noqa: F401
    CLASSES,
    batch,
    flax_loss,
    flax_optimizer,
    names,
    torch_loss,
    torch_model,
    torch_optimizer,
)


def flax_model():
    return ResNet18(num_classes=CLASSES, conv=partial(nn.Conv, use_bias=False))
