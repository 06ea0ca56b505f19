"""Sizes for which there is no memory are refused, with the flags that ask for them."""

from typing import Any

import pytest

from jaxddp.config import TrainConfig
from jaxddp.data import datasets
from jaxddp.data.model_sizes import model_sizes
from jaxddp.errors import InputError
from jaxddp.models import build
from jaxddp.nn.functional import Functional


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_sizes": (10**9,)}, "--model mlp --hidden-sizes 1000000000: 74000000000 weights"),
        ({"model": "convnet", "hidden_sizes": (10**6,)}, "--model convnet --hidden-sizes 1000000"),
        ({"model": "char_mlp", "dataset": "names", "embedding_size": 10**9}, "--model char_mlp --embedding-size 10000"),
    ],
)
def test_a_model_larger_than_memory_is_refused(fields: dict[str, Any], message: str) -> None:
    config = TrainConfig(**fields)
    with pytest.raises(InputError, match=f"^{message}.* and their gradients take [0-9,]+ GiB, and this machine has "):
        model_sizes(config, datasets.load(config))


@pytest.mark.parametrize("name", ["num_examples", "num_features", "num_classes", "context_length"])
def test_data_larger_than_memory_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxddp.data.memory.memory", lambda: 3 * 2**30)
    dataset, model, message = "linear", "mlp", "--num-examples .*: the numbers"
    if name == "context_length":
        dataset, model, message = "names", "char_mlp", "--context-length 2147483647: the contexts"
    with pytest.raises(InputError, match=rf"^{message} take [0-9,]+ GiB, and this machine has 3 GiB$"):
        datasets.load(TrainConfig(dataset=dataset, model=model, **{name: 2**31 - 1}))


def test_more_stages_than_can_halve_the_image_are_refused() -> None:
    dataset = datasets.load(TrainConfig())
    model_sizes(TrainConfig(model="convnet", hidden_sizes=(2,) * 4), dataset)
    with pytest.raises(InputError, match=r"^--hidden-sizes: 5 stages halve the image 4 times, too often for 8 x 8 pi"):
        model_sizes(TrainConfig(model="convnet", hidden_sizes=(2,) * 5), dataset)


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(model="linear"),
        TrainConfig(hidden_sizes=(30, 20)),
        TrainConfig(model="char_mlp", dataset="names"),
        TrainConfig(model="convnet"),
    ],
    ids=lambda config: config.model,
)
def test_the_numbers_of_a_model_are_counted(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is of the weights of the layers; biases, BatchNorm and embeddings come on top."""
    needed: list[int] = []
    monkeypatch.setattr("jaxddp.data.model_sizes.check_memory", lambda where, bytes: needed.append(bytes))
    params = Functional(build(config, datasets.load(config))).params
    kernels = sum(value.size for name, value in params.items() if name.endswith("kernel"))
    assert needed == [8 * kernels]
