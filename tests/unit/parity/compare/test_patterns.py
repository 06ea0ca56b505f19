"""What the tensors of a stage have in common over the steps: factors by tensor and by step."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from jaxddp.parity.compare.patterns import pattern

VALUES = np.array([1.0, -2.0])


def said(factors: Mapping[str, Sequence[float]], sizes: Mapping[int, str] | None = None) -> str:
    """Return the pattern of a run in which jax's tensors are torch's times these factors; "dead" ones are 0."""
    torch = {name: VALUES * (name != "dead") for name in factors}
    return pattern(
        (
            ({name: factor * torch[name] for name, factor in zip(factors, of_step, strict=True)}, torch)
            for of_step in zip(*factors.values(), strict=True)
        ),
        sizes,
    )


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        (
            {"fc1.weight": [0.5] * 4, "fc1.bias": [0.5] * 4, "fc2.weight": [2] * 4},
            "0.5 times torch's in fc1.bias, fc1.weight; 2 times torch's in fc2.weight",
        ),
        (
            {"a": [0.5] * 4, "b": [1] * 4, "c": [1, 1, 3, 3]},
            "0.5 times torch's in a; 3 times torch's in c, from step 3 on",
        ),
        ({"a": [2, 3, 2, 3], "b": [2, 3, 2, 3]}, "2, 3 times torch's in all tensors, in turn from step 1 on"),
        ({"a": [1, 1, 1.5, 1.5, 0.5, 0.5]}, "1.5 times torch's in a, from step 3 on; 0.5 times from step 5 on"),
        ({"a": [2, 2, 1, 1]}, "2 times torch's in a, from step 1 on; equal from step 3 on"),
        (
            {name: [factor] * 2 for factor, name in enumerate("abcde", start=2)},
            "2 times torch's in a; 3 times torch's in b; 4 times torch's in c; ...",
        ),
        ({"a": [0.5] * 4, "dead": [1] * 4}, "0.5 times torch's in a"),
        ({"a": [1.000001] * 2 + [3] * 2}, "1.000001 times torch's in a, from step 1 on; 3 times from step 3 on"),
        ({"a": [2, 3, 2.000001, 3]}, ""),
        ({"a": [1, 2, 3, 4]}, ""),
        ({"a": [2] * 4, "b": [1, 2, 3, 4]}, ""),
    ],
)
def test_factors_by_tensor_and_by_step_are_told(factors: Mapping[str, Sequence[float]], expected: str) -> None:
    assert said(factors) == expected


def test_a_factor_that_is_a_size_of_the_batch_is_a_sum_against_a_mean() -> None:
    sizes = {32: "the batch", 7: "the sequence"}
    assert said({"a": [1 / 32] * 3, "b": [1] * 3}, sizes).endswith("a mean over the batch, the reference takes the sum")
    assert said({"a": [7] * 3, "b": [7] * 3}, sizes).endswith("a sum over the sequence, the reference takes the mean")
    assert "batch" not in said({"a": [32] * 3, "b": [2] * 3}, sizes) + said({"a": [33] * 3}, sizes)
