"""ResNet-18, torchvision's and a Linen one: in-place ReLU, BatchNorm, strided convolutions, 11 million parameters.

    python -m jaxddp.parity examples/ports/resnet18/port.py --steps 3

SGD with momentum and decay, as in torchvision's references/classification/train.py. `--write-names` wrote `names`.
"""

import numpy as np
import optax
from flax_resnet18 import ResNet18
from jax import numpy as jnp
from torch import optim
from torch.nn import functional as F
from torch_resnet18 import resnet18

CLASSES, SIZE, BATCH = 100, 64, 8
LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 1e-4


def torch_model():
    return resnet18(num_classes=CLASSES)


def flax_model():
    return ResNet18(num_classes=CLASSES)


def torch_loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["label"])


def flax_loss(model, batch):
    logits = model(jnp.moveaxis(batch["image"], 1, -1), train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def torch_optimizer(parameters):
    return optim.SGD(parameters, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


flax_optimizer = optax.chain(optax.add_decayed_weights(WEIGHT_DECAY), optax.sgd(LR, MOMENTUM))


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    label = rng.integers(0, CLASSES, BATCH)
    image = rng.normal(0.1 * label[:, None, None, None], 1, (BATCH, 3, SIZE, SIZE))
    return {"image": image, "label": label}


names = {
    "Conv_0": "conv1",
    "TorchBatchNorm_0": "bn1",
    "ResNetBlock_0.Conv_0": "layer1.0.conv1",
    "ResNetBlock_0.TorchBatchNorm_0": "layer1.0.bn1",
    "ResNetBlock_0.Conv_1": "layer1.0.conv2",
    "ResNetBlock_0.TorchBatchNorm_1": "layer1.0.bn2",
    "ResNetBlock_1.Conv_0": "layer1.1.conv1",
    "ResNetBlock_1.TorchBatchNorm_0": "layer1.1.bn1",
    "ResNetBlock_1.Conv_1": "layer1.1.conv2",
    "ResNetBlock_1.TorchBatchNorm_1": "layer1.1.bn2",
    "ResNetBlock_2.Conv_0": "layer2.0.conv1",
    "ResNetBlock_2.TorchBatchNorm_0": "layer2.0.bn1",
    "ResNetBlock_2.Conv_1": "layer2.0.conv2",
    "ResNetBlock_2.TorchBatchNorm_1": "layer2.0.bn2",
    "ResNetBlock_2.Conv_2": "layer2.0.downsample.0",
    "ResNetBlock_2.TorchBatchNorm_2": "layer2.0.downsample.1",
    "ResNetBlock_3.Conv_0": "layer2.1.conv1",
    "ResNetBlock_3.TorchBatchNorm_0": "layer2.1.bn1",
    "ResNetBlock_3.Conv_1": "layer2.1.conv2",
    "ResNetBlock_3.TorchBatchNorm_1": "layer2.1.bn2",
    "ResNetBlock_4.Conv_0": "layer3.0.conv1",
    "ResNetBlock_4.TorchBatchNorm_0": "layer3.0.bn1",
    "ResNetBlock_4.Conv_1": "layer3.0.conv2",
    "ResNetBlock_4.TorchBatchNorm_1": "layer3.0.bn2",
    "ResNetBlock_4.Conv_2": "layer3.0.downsample.0",
    "ResNetBlock_4.TorchBatchNorm_2": "layer3.0.downsample.1",
    "ResNetBlock_5.Conv_0": "layer3.1.conv1",
    "ResNetBlock_5.TorchBatchNorm_0": "layer3.1.bn1",
    "ResNetBlock_5.Conv_1": "layer3.1.conv2",
    "ResNetBlock_5.TorchBatchNorm_1": "layer3.1.bn2",
    "ResNetBlock_6.Conv_0": "layer4.0.conv1",
    "ResNetBlock_6.TorchBatchNorm_0": "layer4.0.bn1",
    "ResNetBlock_6.Conv_1": "layer4.0.conv2",
    "ResNetBlock_6.TorchBatchNorm_1": "layer4.0.bn2",
    "ResNetBlock_6.Conv_2": "layer4.0.downsample.0",
    "ResNetBlock_6.TorchBatchNorm_2": "layer4.0.downsample.1",
    "ResNetBlock_7.Conv_0": "layer4.1.conv1",
    "ResNetBlock_7.TorchBatchNorm_0": "layer4.1.bn1",
    "ResNetBlock_7.Conv_1": "layer4.1.conv2",
    "ResNetBlock_7.TorchBatchNorm_1": "layer4.1.bn2",
    "Dense_0": "fc",
}
