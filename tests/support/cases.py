"""Cases of the equivalence tests, and the table of the differences that they measured."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxddp.config.choices import MODELS
from jaxddp.parity.cases import Case
from jaxddp.parity.cases import make_case as make_builtin_case
from jaxddp.parity.jax_side.side import JaxSide
from jaxddp.parity.torch_side.side import BuiltIn, TorchSide

FEWER_LAYERS = {"mlp": (8,), "convnet": (3,)}

make_case = partial(make_builtin_case, steps=20)


def small_case(model: str, *args: Any, **options: Any) -> Case:
    """Make a case with as few layers as possible: XLA's compile time grows with the number of tensors."""
    fewer = {"hidden_sizes": FEWER_LAYERS[model]} if model in FEWER_LAYERS else {}
    return make_case(model, *args, **(fewer | options))


# Without an epoch's smaller last batch, which takes a second program, and so half of the time.
even_case = partial(small_case, drop_last_batch=True)


def unchanged(side: Any) -> Any:
    return side


@dataclass(frozen=True)
class ChangedSource(BuiltIn):
    """torch's side of a built-in case, changed."""

    change: Callable[[TorchSide], TorchSide] = unchanged

    def torch_side(self, steps: int, dtype: str) -> TorchSide:
        return self.change(super().torch_side(steps, dtype))


@dataclass(frozen=True)
class ChangedCase(Case):
    """Built-in case with what a configuration cannot express, in both frameworks or, as a fault, in jaxddp alone.

    Attributes:
        of_jax: jaxddp's `ReplicaStep` -> the step to take.
        of_torch: torch's side -> the side to run; at the top level of a module, which the ranks import.
    """

    of_jax: Callable[[Any], Any] = unchanged
    of_torch: Callable[[TorchSide], TorchSide] = unchanged

    @property
    def torch_source(self) -> BuiltIn:
        return ChangedSource(self.config, self.dataset(), self.of_torch)

    def jax_side(self) -> JaxSide:
        side = super().jax_side()
        return dataclasses.replace(side, replica_step=self.of_jax(side.replica_step))


# (model, optimizer) -> largest residual of any stage, step and world size; filled by test_matrix.
WORST: dict[tuple[str, str], float] = {}
# (model, optimizer) -> distance of the float32 run from the float64 run, jaxddp's divided by torch's.
FLOAT32: dict[tuple[str, str], float] = {}


def summary(optimizers: tuple[str, ...]) -> list[str]:
    """Return the lines of the table: what was compared, a row per model, a column per optimizer."""
    width = 16 if FLOAT32 else 9

    def cell(key: tuple[str, str]) -> str:
        ratio = f" ({FLOAT32[key]:.2f})" if key in FLOAT32 else ""
        return f"{WORST[key]:.0e}{ratio}" if key in WORST else "-"

    rows = [f"{model:9}" + "".join(f"{cell((model, name)):>{width}}" for name in optimizers) for model in MODELS]
    in_brackets = ["In brackets: float32 error of jaxddp divided by that of PyTorch."] if FLOAT32 else []
    left_out = ["-: left to `make test-all`."] if len(WORST) < len(MODELS) * len(optimizers) else []
    return [
        "20 steps from the same weights on the same batches, on up to 8 replicas, in float64 (which rounds at 1e-16).",
        "Each number: largest difference of any loss, gradient, parameter or buffer after any step, relative to the",
        "norm of all tensors of its kind.",
        *in_brackets,
        *left_out,
        "",
        f"{'':9}" + "".join(f"{optimizer:>{width}}" for optimizer in optimizers),
        *rows,
    ]
