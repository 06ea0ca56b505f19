"""Complex arrays of a port's models, which are refused before anything is compared."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxddp.errors import InputError
from jaxddp.parity.cases import PortCase
from jaxddp.parity.checking import check
from jaxddp.parity.jax_side.twins import FindTwins
from jaxddp.parity.port import Port

REFUSED = "{} is complex64; must be two real arrays, its real and its imaginary part"


class Torch(torch.nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64 if kind == "parameter" else torch.float32))
        if kind in ("buffer", "unsaved buffer"):
            self.register_buffer("b", torch.ones(2, dtype=torch.complex64), persistent=kind == "buffer")


class Flax(nnx.Module):
    def __init__(self, kind: str):
        self.a = nnx.Param(jnp.ones(2, "complex64" if kind == "parameter" else "float32"))
        if kind == "buffer":
            self.b = nnx.BatchStat(jnp.ones(2, "complex64"))


class Source:
    """A port whose models have complex arrays of these kinds; "": none."""

    name = "complex arrays"

    def __init__(self, torch_kind: str, flax_kind: str):
        self.kinds = torch_kind, flax_kind

    def port(self) -> Port:
        torch_kind, flax_kind = self.kinds

        def flax_model() -> Any:
            return {"a_re": np.ones(2), "a_im": np.ones(2)} if flax_kind == "two parts" else Flax(flax_kind)

        return Port(
            torch_model=lambda: Torch(torch_kind),
            flax_model=flax_model,
            torch_loss=lambda model, batch: (batch["x"] * model.get_parameter("a")).abs().sum(),
            flax_loss=lambda model, batch: jnp.abs(batch["x"] * 1.0).sum(),
            optimizer="sgd",
            batch=lambda step, rank: {"x": np.ones((4, 2))},
        )


@pytest.mark.parametrize(
    ("kinds", "refused"),
    [
        (("parameter", "two parts"), "torch_model: a"),
        (("buffer", ""), "torch_model: b"),
        (("unsaved buffer", ""), "torch_model: b"),
        (("", "parameter"), "flax_model: a"),
        (("", "buffer"), "flax_model: b"),
    ],
    ids=str,
)
def test_a_complex_array_is_refused_before_names_are_compared(kinds: tuple[str, str], refused: str) -> None:
    with pytest.raises(InputError, match=f"^{REFUSED.format(refused)}$"):
        FindTwins(PortCase(Source(*kinds), 1)).run(lambda where: None)


def test_the_report_has_one_line_about_it() -> None:
    (problem,) = check(Source("parameter", "two parts"), world_size=1, steps=1, numerics=False).problems
    assert problem.message == REFUSED.format("torch_model: a")
