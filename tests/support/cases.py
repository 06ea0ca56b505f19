"""The cases of the parity tests, and what was measured on them."""

from functools import partial
from typing import Any

from jaxddp.config.choices import MODELS
from jaxddp.parity.cases import Case
from jaxddp.parity.cases import make_case as make_builtin_case

FEWER_LAYERS = {"mlp": (8,), "convnet": (3,)}

make_case = partial(make_builtin_case, steps=20)


def small_case(model: str, *args: Any, **options: Any) -> Case:
    """With as few layers as there can be of each kind: XLA's compiler takes its time for each tensor."""
    fewer = {"hidden_sizes": FEWER_LAYERS[model]} if model in FEWER_LAYERS else {}
    return make_case(model, *args, **(fewer | options))


# Without the smaller batch at an epoch's end, which takes a program of its own, and so half of the time.
even_case = partial(small_case, drop_last_batch=True)


# (model, optimizer) -> the worst residual of any stage, step and world size; filled by test_matrix.
WORST: dict[tuple[str, str], float] = {}
# (model, optimizer) -> how far float32 is from float64, jaxddp's over torch's.
FLOAT32: dict[tuple[str, str], float] = {}


def summary(optimizers: tuple[str, ...]) -> list[str]:
    """The matrix as a table: a row per model, a column per optimizer."""
    head = f"{'':9}" + "".join(f"{optimizer:>20}" for optimizer in optimizers)

    def cell(key: tuple[str, str]) -> str:
        in_float32 = f"({FLOAT32[key]:.2f})" if key in FLOAT32 else "      "
        return f"{WORST[key]:.0e} {in_float32}" if key in WORST else "-"

    rows = [f"{model:9}" + "".join(f"{cell((model, optimizer)):>20}" for optimizer in optimizers) for model in MODELS]
    return [head, *(row.rstrip() for row in rows)]
