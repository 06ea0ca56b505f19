"""Complex arrays of a port's models, which are refused before anything is compared."""

from pathlib import Path
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
from jaxddp.parity.port import Port, PortFile

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

        def jax_model() -> Any:
            return {"a_re": np.ones(2), "a_im": np.ones(2)} if flax_kind == "two parts" else Flax(flax_kind)

        return Port(
            torch_model=lambda: Torch(torch_kind),
            jax_model=jax_model,
            torch_loss=lambda model, batch: (batch["x"] * model.get_parameter("a")).abs().sum(),
            jax_loss=lambda model, batch: jnp.abs(batch["x"] * 1.0).sum(),
            optimizer="sgd",
            batch=lambda step, rank: {"x": np.ones((4, 2))},
        )


@pytest.mark.parametrize(
    ("kinds", "refused"),
    [
        (("parameter", "two parts"), "torch_model: a"),
        (("buffer", ""), "torch_model: b"),
        (("", "parameter"), "jax_model: a"),
        (("", "buffer"), "jax_model: b"),
    ],
    ids=str,
)
def test_a_complex_array_is_refused_before_names_are_compared(kinds: tuple[str, str], refused: str) -> None:
    with pytest.raises(InputError, match=f"^{REFUSED.format(refused)}$"):
        FindTwins(PortCase(Source(*kinds), 1)).run(lambda where: None)


def test_the_report_has_one_line_about_it() -> None:
    (problem,) = check(Source("parameter", "two parts"), world_size=1, steps=1, numerics=False).problems
    assert problem.message == REFUSED.format("torch_model: a")


TABLE = """
import flax.nnx as nnx, jax.numpy as jnp, numpy as np, torch

class Turned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        angles = torch.arange(2) / 3
        table = torch.polar(torch.ones_like(angles), angles)
        KEPT

    def forward(self, x):
        pairs = torch.view_as_complex(self.fc(x).reshape(-1, 2, 2))
        return torch.view_as_real(pairs * self.table).flatten(1)

class Flax(nnx.Module):
    def __init__(self):
        self.fc = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        pairs = self.fc(x).reshape(-1, 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * jnp.exp(SIGN * 1j * np.arange(2) / 3)
        return jnp.stack([turned.real, turned.imag], -1).reshape(x.shape)

torch_model, jax_model, optimizer = Turned, Flax, "sgd"
jax_loss = torch_loss = lambda model, batch: ((model(batch["x"]) - batch["x"]) ** 2).mean()
batch = lambda step, rank: {"x": np.random.default_rng((step, rank)).normal(size=(8, 4))}
"""
UNSAVED = 'self.register_buffer("table", table, persistent=False)'


@pytest.mark.one_in(3, first=2)
@pytest.mark.parametrize(
    ("kept", "sign", "verdict"),
    [(UNSAVED, "1", "equal"), ("self.table = table", "1", "equal"), (UNSAVED, "-1", "different")],
    ids=["buffer", "attribute", "turned backwards"],
)
def test_a_complex_table_that_is_not_saved_is_a_constant(kept: str, sign: str, verdict: str, tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(TABLE.replace("KEPT", kept).replace("SIGN", sign))
    report = check(PortFile(str(tmp_path / "port.py")), steps=2, numerics=False)
    assert report.verdict == verdict and not report.problems
