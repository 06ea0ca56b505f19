"""The cases of the parity tests, and what was measured on them."""

from functools import partial

from jaxddp.choices import MODELS
from jaxddp.parity.builtin import make_case as make_builtin_case

make_case = partial(make_builtin_case, steps=20)
# Without the smaller batch at an epoch's end, which takes a program of its own, and so half of the time.
even_case = partial(make_case, drop_last_batch=True)


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
