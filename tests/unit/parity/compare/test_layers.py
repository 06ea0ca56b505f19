"""LayerCalls of layers are recorded in both frameworks and matched; the first that differs is located."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from jaxddp.nn.functional import Functional
from jaxddp.parity.compare.layers import first_difference, in_torch_layout, not_finite_layer
from jaxddp.parity.jax_side.layers import listening_nnx
from jaxddp.parity.records import Records, StoredRecord
from jaxddp.parity.torch_side.layers import LayerCalls, listen

Arrays = dict[str, np.ndarray]


def passed(folder: Path, outputs: Arrays, inputs: Arrays | None = None, **notes: Any) -> StoredRecord:
    """Record a forward pass, the layers in the order of their calls."""
    calls = LayerCalls()
    for name, made in outputs.items():
        calls.add(name, (inputs or {}).get(name), made)
    calls.write(folder, **notes)
    return Records([folder])[0]


def compared(folder: Path, torch: Arrays, flax: Arrays, twins: dict[str, str], **inputs: Arrays) -> Any:
    theirs = passed(folder / "torch", torch, inputs.get("of_torch"))
    return first_difference(theirs, passed(folder / "jax", flax, inputs.get("of_jax")), twins)[0]


X = np.arange(24.0).reshape(2, 3, 4)  # NCL
TWINS = {"conv": "inner", "fc": "outer"}


def test_layers_equal_in_another_layout_and_order_are_equal(tmp_path: Path) -> None:
    flax = {"outer": X[:, 0] * (1 + 1e-14), "inner": np.moveaxis(X, 1, -1)}
    assert compared(tmp_path, {"conv": X, "fc": X[:, 0]}, flax, TWINS) is None
    assert not_finite_layer(Records([tmp_path / "torch"])[0]) == ("", False)


def test_the_first_differing_layer_in_torchs_order_is_returned(tmp_path: Path) -> None:
    wrong = X.copy()
    wrong[1, 2, 3] += 0.5
    torch = {"conv": X, "fc": X, "head": X}
    flax = {"head": 9 * X, "outer": np.moveaxis(wrong, 1, -1), "inner": X}
    inputs = {"of_torch": {"fc": X[:, :1]}, "of_jax": {"outer": X[:, :1] * (1 + 1e-3)}}
    layer = compared(tmp_path, torch, flax, {**TWINS, "head": "head"}, **inputs)
    assert (layer.torch, layer.jax, layer.before) == ("fc", "outer", "conv")
    assert (layer.element, layer.values) == ((1, 2, 3), (23.5, 23.0))
    assert layer.shapes == ((2, 4, 3), (2, 3, 4))
    assert layer.residual == pytest.approx(0.5 / np.linalg.norm(X))
    assert layer.input_residual == pytest.approx(1e-3)


@pytest.mark.parametrize("shape", [(6, 5), (3, 2, 5), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize(
    ("order", "wrong", "runs"),
    [
        ([3, 4, 0, 1, 2], 0.0, ((3, 4), (0, 2))),
        ([1, 0, 2, 4, 3], 0.0, ((1, 1), (0, 0), (2, 2), (4, 4), (3, 3))),
        ([3, 4, 0, 1, 2], 1e-6, ()),  # another difference, too
        ([0, 1, 2, 3, 4], 1e-6, ()),
        ([3, 4, 0, 1, 1], 0.0, ()),
    ],
)
def test_an_input_with_its_channels_in_another_order_is_recognised(
    shape: tuple[int, ...], order: list[int], wrong: float, runs: tuple, tmp_path: Path
) -> None:
    given = np.random.default_rng(0).normal(size=shape)
    of_jax = given[..., order] * (1 + 1e-15)
    of_jax.flat[0] += wrong
    of_torch = np.moveaxis(given, -1, 1) if given.ndim == 4 else given
    inputs = {"of_torch": {"fc": of_torch}, "of_jax": {"outer": of_jax}}
    layer = compared(tmp_path, {"fc": X}, {"outer": 2 * X}, TWINS, **inputs)
    assert layer.columns == runs


def test_channels_that_are_alike_keep_their_order(tmp_path: Path) -> None:
    given = np.maximum(np.random.default_rng(0).normal(size=(6, 5)), 0) * [0, 1, 0, 0, 1]
    inputs = {"of_torch": {"fc": given}, "of_jax": {"outer": given[:, [3, 4, 0, 1, 2]]}}
    layer = compared(tmp_path, {"fc": X}, {"outer": 2 * X}, TWINS, **inputs)
    order = [channel for first, last in layer.columns for channel in range(first, last + 1)]
    assert np.array_equal(given[:, order], inputs["of_jax"]["outer"])
    assert layer.columns == ((3, 4), (0, 2))


BLOCK = {"block": "block", "block.fc": "block.fc", "head": "head", "": ""}


@pytest.mark.parametrize(
    ("after", "given", "located"),
    [
        ({"head": X}, X, None),  # torch's block adds its input, and jax adds it outside
        ({"head": 5 * X}, X, ("head", "block.fc", 1)),
        ({"head": 5 * X}, 3 * X, ("block", "block.fc", 1)),  # what is added is missing
        ({"head": X}, None, ("block", "block.fc", 1)),
        ({"": X}, None, None),
        ({"": 5 * X}, None, ("block", "block.fc", 1)),
    ],
    ids=["outside", "head differs", "missing", "unknown", "outside, at the end", "missing, at the end"],
)
def test_a_module_of_layers_differs_if_what_comes_after_it_differs(
    after: Arrays, given: np.ndarray | None, located: tuple[str, str, int] | None, tmp_path: Path
) -> None:
    torch = passed(tmp_path / "torch", {"block.fc": X, "block": 2 * X, **dict.fromkeys(after, X)}, {"head": X})
    to_head = {} if given is None else {"head": given}
    flax = passed(tmp_path / "jax", {"block.fc": X, "block": X, **after}, to_head)
    layer, equal = first_difference(torch, flax, BLOCK)
    assert (None if layer is None else (layer.torch, layer.before, equal)) == located


def test_layers_without_a_twin_are_skipped(tmp_path: Path) -> None:
    torch = {"conv": X, "dropout": X, "fc": X}
    layer = compared(tmp_path, torch, {"inner": X, "outer": 2 * X}, TWINS)
    assert (layer.torch, layer.before, layer.input_residual) == ("fc", "conv", None)
    assert compared(tmp_path / "none", torch, {"other": X}, TWINS) is None


def test_outputs_of_different_shapes_are_skipped(tmp_path: Path) -> None:
    torch, flax = {"conv": X, "fc": X, "head": X}, {"inner": X, "outer": X[:, :2], "head": 2 * X}
    layer = compared(tmp_path, torch, flax, {**TWINS, "head": "head"})
    assert (layer.torch, layer.before) == ("head", "conv")
    assert compared(tmp_path / "alone", {"fc": X}, {"outer": X[:, :2]}, TWINS) is None


def test_calls_of_a_layer_in_another_order_are_compared_by_their_inputs(tmp_path: Path) -> None:
    def called(name: str, of: Arrays) -> StoredRecord:
        calls = LayerCalls()
        for given, output in of.values():
            calls.add(name, given, output)
        calls.write(tmp_path / name)
        return Records([tmp_path / name])[0]

    pairs = {"anchor": (X, 2 * X), "positive": (-X, 3 * X)}
    turned = {name: pairs[name] for name in reversed(pairs)}
    assert first_difference(called("fc", pairs), called("outer", turned), TWINS) == (None, 2)
    wrong = {**turned, "positive": (-X, 5 * X)}
    layer, _ = first_difference(called("fc", pairs), called("outer", wrong), TWINS)
    assert (layer.torch, layer.jax, layer.input_residual) == ("fc (2)", "outer", 0.0)


def test_each_call_of_a_layer_is_compared_with_the_same_call(tmp_path: Path) -> None:
    def twice(first: np.ndarray, second: np.ndarray, name: str) -> StoredRecord:
        calls = LayerCalls()
        calls.add(name, None, first)
        calls.add(name, None, second)
        calls.write(tmp_path / name)
        return Records([tmp_path / name])[0]

    layer, equal = first_difference(twice(X, X, "fc"), twice(X, -X, "outer"), TWINS)
    assert (layer.torch, layer.jax, layer.before, equal) == ("fc (2)", "outer (2)", "fc", 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_equal_in_both_and_different_in_one(value: float, tmp_path: Path) -> None:
    masked = X.copy()
    masked[0, 1] = value
    assert compared(tmp_path / "both", {"fc": masked}, {"outer": masked.copy()}, TWINS) is None
    layer = compared(tmp_path / "one", {"fc": X}, {"outer": masked}, TWINS)
    assert (layer.residual, layer.element[:2]) == (np.inf, (0, 1))
    everywhere = compared(tmp_path / "all", {"fc": X}, {"outer": np.full_like(X, value)}, TWINS)
    assert everywhere.residual == np.inf
    assert compared(tmp_path / "zeros", {"fc": 0 * X}, {"outer": 0 * X}, TWINS) is None


def test_channels_are_moved_only_where_the_shapes_require_it() -> None:
    assert in_torch_layout(X, X) is X
    moved = in_torch_layout(X, np.zeros((2, 4, 3)))
    assert moved is not None and np.array_equal(moved, np.moveaxis(X, -1, 1))
    assert in_torch_layout(X, np.zeros((4, 2, 3))) is None
    assert in_torch_layout(X[0], np.zeros((4, 3))) is None  # without channels
    cube = np.arange(54.0).reshape(2, 3, 3, 3)
    of_torch = np.moveaxis(cube, -1, 1) + 1e-3
    for of_jax in (cube, np.moveaxis(cube, -1, 1)):  # both shapes fit
        nearer = in_torch_layout(of_jax, of_torch)
        assert nearer is not None and np.allclose(nearer, of_torch, atol=1e-2)


class TorchBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.fc(self.fc(x)), 7


def torch_record(folder: Path, model: torch.nn.Module, x: torch.Tensor) -> tuple[StoredRecord, Any]:
    """Record a call of a model, and none of the next; return also the output."""
    calls = LayerCalls()
    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            listen(module, name, calls, hooks)
        made = model(x)
    model(x)
    calls.write(folder)
    return Records([folder])[0], made


def test_torch_calls_are_recorded_inside_out_and_the_hooks_removed(tmp_path: Path) -> None:
    record, (made, _) = torch_record(tmp_path, TorchBlock(), torch.ones(2, 3))
    assert record.notes["order"] == ["fc", "fc (2)", ""]
    assert np.array_equal(record["outputs"][""], made.numpy())
    assert np.array_equal(record["inputs"]["fc (2)"], record["outputs"]["fc"])


def test_torch_layers_that_work_in_place_are_recorded_as_they_were(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU(inplace=True))
    record, _ = torch_record(tmp_path, model, torch.tensor([-1.0, 2.0]))
    assert record["outputs"]["0"].tolist() == record["inputs"]["1"].tolist() == record["inputs"][""].tolist() == [-1, 2]
    assert record["outputs"]["1"].tolist() == [0, 2]


class Scaled(nnx.Linear):
    def __call__(self, x: jax.Array) -> jax.Array:  # with super().__call__, still one call
        return 2 * super().__call__(x)


class FlaxBlock(nnx.Module):
    def __init__(self) -> None:
        self.fc = Scaled(3, 3, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(3, 3, rngs=nnx.Rngs(0))  # the base class of fc

    def __call__(self, x: jax.Array) -> tuple[jax.Array, int]:
        return self.head(self.fc(self.fc(x))), 7


def test_nnx_calls_are_recorded_once_each_and_the_classes_restored(tmp_path: Path) -> None:
    model, calls = FlaxBlock(), LayerCalls()
    before = (Scaled.__call__, nnx.Linear.__call__)
    functional = Functional(model)
    with ExitStack() as stack:
        bound: Any = listening_nnx(functional, (functional.params, functional.buffers), calls, stack)
        made, _ = bound(jax.numpy.ones((2, 3)))
        model(jax.numpy.ones((2, 3)))  # another model of the same classes is not recorded
    assert (Scaled.__call__, nnx.Linear.__call__) == before
    calls.write(tmp_path)
    record = Records([tmp_path])[0]
    assert record.notes["order"] == ["fc", "fc (2)", "head", ""]
    assert np.array_equal(record["outputs"][""], made)
    assert np.array_equal(record["inputs"]["head"], record["outputs"]["fc (2)"])


def test_layers_inside_compiled_code_are_skipped(tmp_path: Path) -> None:
    model, calls = FlaxBlock(), LayerCalls()
    functional = Functional(model)
    with ExitStack() as stack:
        bound: Any = listening_nnx(functional, (functional.params, functional.buffers), calls, stack)
        jax.jit(lambda x: bound(x)[0])(jax.numpy.ones((2, 3)))
    calls.write(tmp_path)
    assert Records([tmp_path])[0].notes["order"] == []


def test_a_flattened_image_is_compared_in_torchs_order(tmp_path: Path) -> None:
    rows = X.reshape(2, -1)  # (N, C L)
    moved = np.moveaxis(X, 1, -1).reshape(2, -1)  # (N, L C)
    theirs = passed(tmp_path / "torch", {"fc": X[:, 0], "flat": rows}, {"fc": rows})
    for images, input_residual in (([(3, 4)], 0.0), ([], None)):
        ours = passed(
            tmp_path / f"jax{len(images)}", {"outer": 2 * X[:, 0], "flat": moved}, {"outer": moved}, images=images
        )
        layer = first_difference(theirs, ours, {**TWINS, "flat": "flat"})[0]
        assert layer is not None and layer.torch == "fc"
        assert layer.input_residual == input_residual or (not images and layer.input_residual > 0.1)
    ours = passed(tmp_path / "equal", {"outer": X[:, 0], "flat": moved}, images=[(3, 4)])
    assert first_difference(theirs, ours, {**TWINS, "flat": "flat"}) == (None, 2)
