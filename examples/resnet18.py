r"""ResNet-18 (He et al. 2015) on CIFAR-10's binary files, in Flax and in PyTorch, with torchvision's names.

    jaxddp train examples/resnet18.py      # 24 s on two cores; accuracy 1.0 on the images made here
    python -m torch_ref.train examples/resnet18.py   # 12 s; in float64 the losses agree to 8 digits

On CIFAR-10 itself, on the 8 GPUs of a node (or `torchrun --nproc-per-node 8 -m torch_ref.train`):

    jaxddp train examples/resnet18.py --data cifar-10-batches-bin --width 64 --global-batch-size 512 \
        --epochs 30 --lr 0.4 --amp bf16 --output runs/resnet18
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp import TrainConfig, layers
from jaxddp.data.torch_rng import Generator

epochs, global_batch_size, schedule = 3, 64, "one_cycle"
optimizer, lr, momentum, nesterov, weight_decay = "sgd", 0.1, 0.9, True, 5e-4


@dataclass
class Options:
    data: str | None = None
    """Folder of data_batch_1.bin to data_batch_5.bin and test_batch.bin. None: images made in their format."""
    width: int = 8
    """Channels of the first layer; 64 in ResNet-18."""


def records(folder: str | None, part: str, made: int) -> dict[str, np.ndarray]:
    """Return images (N, 3, 32, 32) and labels of records of 1 + 3,072 bytes."""
    if folder is not None:
        files = sorted(Path(folder).glob(f"{part}*.bin"))
        rows = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
    else:  # waves whose length and colour tell the class
        rng = np.random.default_rng(made)
        label, phase, angle = rng.integers(0, 10, made), *rng.uniform(0, 2 * np.pi, (2, made, 1, 1))
        y, x = np.mgrid[:32, :32]
        wave = np.sin(0.3 * (2 + label[:, None, None] % 5) * (x * np.cos(angle) + y * np.sin(angle)) + phase)
        colour = np.where(np.arange(3) == label[:, None] // 5, 60, 20)[:, :, None, None]
        images = 128 + colour * wave[:, None] + rng.normal(0, 40, (made, 3, 32, 32))
        rows = np.hstack([label[:, None], images.clip(0, 255).reshape(made, -1)]).astype(np.uint8)
    return {"image": rows[:, 1:].reshape(-1, 3, 32, 32), "label": rows[:, 0].astype(np.int32)}


def train_data(options: Options) -> dict[str, np.ndarray]:
    return records(options.data, "data_batch_", made=4000)


def test_data(options: Options) -> dict[str, np.ndarray]:
    return records(options.data, "test_batch", made=1000)


def augment(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Cut 32 x 32 pixels out of the image with 4 black ones around, and mirror every second image."""
    top, left = rng.integers(0, 9, 2)
    image = np.pad(example["image"], ((0, 0), (4, 4), (4, 4)))[:, top : top + 32, left : left + 32]
    return {"image": image[:, :, ::-1] if rng.random() < 0.5 else image, "label": example["label"]}


def predict(model: Any, batch: dict[str, Any]) -> Any:
    return model(batch["image"])


def metrics(logits: Any, batch: dict[str, Any]) -> dict[str, Any]:
    return {"accuracy": logits.argmax(-1) == batch["label"]}


class TorchBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample = nn.Sequential()
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.downsample(x))


class TorchResNet18(nn.Module):
    def __init__(self, options: Options):
        super().__init__()
        width = options.width
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        for i in range(4):
            first = TorchBlock(width * 2 ** max(i - 1, 0), width * 2**i, stride=1 + (i > 0))
            setattr(self, f"layer{i + 1}", nn.Sequential(first, TorchBlock(width * 2**i, width * 2**i, 1)))
        self.fc = nn.Linear(8 * width, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(image.to(self.fc.weight.dtype) / 64 - 2)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def torch_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["label"].long(), reduction="none")


class Block(nnx.Module):
    def __init__(self, channels: int, out: int, stride: int, generator: Generator):
        conv = partial(layers.Conv, bias=False, generator=generator)
        self.conv1, self.bn1 = conv(channels, out, (3, 3), stride=stride, padding=1), layers.BatchNorm(out)
        self.conv2, self.bn2 = conv(out, out, (3, 3), padding=1), layers.BatchNorm(out)
        shortcut = [conv(channels, out, (1, 1), stride=stride), layers.BatchNorm(out)] if stride > 1 else []
        self.downsample = nnx.List(shortcut)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.bn2(self.conv2(nnx.relu(self.bn1(self.conv1(x)))))
        for layer in self.downsample:
            x = layer(x)
        return nnx.relu(y + x)


class ResNet18(nnx.Module):
    def __init__(self, options: Options, config: TrainConfig):
        width, generator = options.width, Generator(config.seed)
        self.conv1 = layers.Conv(3, width, (3, 3), padding=1, bias=False, generator=generator)
        self.bn1 = layers.BatchNorm(width)
        for i in range(4):
            first = Block(width * 2 ** max(i - 1, 0), width * 2**i, 1 + (i > 0), generator)
            setattr(self, f"layer{i + 1}", nnx.List([first, Block(width * 2**i, width * 2**i, 1, generator)]))
        self.fc = layers.Linear(8 * width, 10, generator=generator)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = jnp.moveaxis(image, 1, -1).astype(self.fc.kernel.dtype) / 64 - 2
        x = nnx.relu(self.bn1(self.conv1(x)))
        for block in (*self.layer1, *self.layer2, *self.layer3, *self.layer4):
            x = block(x)
        return self.fc(x.mean((1, 2)))


def jax_loss(model: nnx.Module, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])


torch_model, jax_model = TorchResNet18, ResNet18
