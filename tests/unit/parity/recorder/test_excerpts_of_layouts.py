"""Excerpts are bounded in size, and those of one tensor in two layouts have the same elements."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from jaxddp.parity import Recorder
from jaxddp.parity.convert import Converter
from jaxddp.parity.recorder.excerpt_grid import kept, positions, strides_of

LIMIT = 2**8


@pytest.mark.parametrize("shape", [(5000,), (300, 70), (3, 3, 64, 128), (7, 7, 7, 7), (8, 8, 8, 8, 8), (2, 90, 40)])
def test_an_excerpt_has_at_most_the_limit_and_elements_of_both_ends(shape: tuple[int, ...]) -> None:
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    excerpt = kept({"x": x}, LIMIT)["x"]
    assert LIMIT / 16 < excerpt.size <= LIMIT
    np.testing.assert_array_equal(excerpt.ravel(), positions(shape, LIMIT).ravel())


def test_a_transposed_kernel_keeps_the_same_elements() -> None:
    x = np.random.default_rng(0).normal(size=(3, 5, 48, 96))
    turned = kept({"x": x.transpose(3, 2, 0, 1)}, LIMIT)["x"]
    np.testing.assert_array_equal(turned.transpose(2, 3, 1, 0), kept({"x": x}, LIMIT)["x"])


@pytest.mark.parametrize(
    ("module", "shapes"),
    [
        (nn.Linear(96, 64), {"kernel": (96, 64), "bias": (64,)}),
        (nn.MultiheadAttention(64, 4), {f"{n}.kernel": (64, 4, 16) for n in ("query", "key", "value")}),
    ],
)
def test_parts_and_reshapes_of_a_tensor_have_common_elements(
    module: nn.Module, shapes: dict[str, tuple[int, ...]]
) -> None:
    if isinstance(module, nn.MultiheadAttention):
        shapes |= {f"{n}.bias": (4, 16) for n in ("query", "key", "value")}
        shapes |= {"out.kernel": (4, 16, 64), "out.bias": (64,)}
    converter = Converter(module, shapes)
    state = {name: x.detach().numpy() for name, x in module.state_dict().items()}
    arrays = converter.to_jax(state)
    back = converter.to_torch({name: _at_positions(x) for name, x in arrays.items()})
    for name, x in state.items():
        at = positions(x.shape, LIMIT).ravel()
        both = np.isin(np.asarray(back[name]).ravel()[at], [1.0])
        assert both.mean() >= 1 / 8, name  # of the excerpt


def _at_positions(x: np.ndarray) -> np.ndarray:
    """Return ones where the excerpt has elements."""
    ones = np.zeros(x.size)
    ones[positions(x.shape, LIMIT).ravel()] = 1.0
    return ones.reshape(x.shape)


def test_a_recording_of_a_larger_model_is_no_larger(tmp_path: Path) -> None:
    def size(width: int) -> int:
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))
        optimizer = torch.optim.Adam(model.parameters())
        recorder = Recorder(tmp_path / f"{width}", 1, limit=2**10)
        recorder.watch(model, optimizer)
        x = torch.ones(2, width)
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        recorder.step({"x": x}, loss)
        return sum(path.stat().st_size for path in (tmp_path / f"{width}").rglob("*"))

    # 4 M parameters against 66 k; 3 tensors of each stage reach the limit
    assert size(2048) < 2 * size(256) < 2 * 5 * (3 * 2**10 + 1) * 4 + 20_000


def test_strides_are_powers_of_two_so_that_stacks_and_parts_meet() -> None:
    assert {stride for size in range(300, 400) for stride in strides_of((size, 2 * size), LIMIT)} <= {16, 32, 64}
