"""A port with a hole: one filling has a fault, the other is the code that the fault's fix gives."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from jaxddp.parity.catalogue import FAULTS, TorchOptimizer
from jaxddp.parity.deviation import Deviation, Statement
from tests.support.checks import STEPS
from tests.support.small_port import Change, own_optimizers

HOLE = "<HOLE>"

# Names that the pieces of code use.
NAMES = """
import itertools
import jax
import jaxddp.nn.layers
import jaxddp.optim
import optax
from flax import linen, nnx
from jax import numpy as jnp
from jaxddp.nn.layers import BatchNorm

axis_name = "replica"
lr, decay, eps, max_norm = 0.01, 0.1, 1e-6, 0.05
p, padding_idx, label_smoothing = 0.25, 0, 0.1
"""
PRELUDE = ("import os, time\n", f"import os, time\n{NAMES}")


@dataclass(frozen=True)
class Fix:
    """A fix, and a port to apply it to.

    Attributes:
        fault: name in the catalogue.
        piece: piece of the fix text.
        wrong: code in the place of HOLE with which the port has the fault.
        changes: changes of the small port.
        more: code that is appended to it. `changes` or `more` have the hole.
        right: code in the hole with which the port is equal; has the piece in it, word for word; "": the piece itself.
        sentence: the piece is no code; `right` does what it says.
        detail: the deviation's detail, on which the fix depends.
        also: names of faults that the run cannot tell from this one.
        world_size, steps: of the check.
    """

    fault: str
    piece: str
    wrong: str
    changes: tuple[Change, ...] = ()
    more: str = ""
    right: str = ""
    sentence: bool = False
    detail: str = ""
    also: Collection[str] = ()
    world_size: int = 2
    steps: int = STEPS

    @property
    def text(self) -> str:
        """Fix of the fault in a run of the port."""
        return FAULTS[self.fault].fix_for(Deviation(self.fault, Statement(""), detail=self.detail), self._optimizer())

    def _optimizer(self) -> TorchOptimizer:
        """Make the port's torch optimizer, for a matrix and a bias."""
        names: dict[str, Any] = {"torch": torch, "decay": 0.1}
        text = next((new for _, new in self.changes if "def torch_optimizer" in new), "")
        (of_torch,) = re.findall(r"return (torch\.optim\..*)", text) or ["torch.optim.SGD(parameters)"]
        names["parameters"] = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,))]
        made = eval(of_torch, names)
        return TorchOptimizer(type(made).__name__, made.param_groups)

    @property
    def filling(self) -> str:
        """Code with which the port is equal."""
        return self.right or self.piece

    def filled(self, code: str) -> tuple[list[Change], str]:
        """Return changes and appended code of the port with this code in the hole."""
        return [PRELUDE, *((old, new.replace(HOLE, code)) for old, new in self.changes)], self.more.replace(HOLE, code)


def optimizers(torch: str, flax: str = HOLE) -> tuple[Change, ...]:
    """Return the change that gives each side an optimizer."""
    return (own_optimizers(torch, flax),)


def between(torch: str, flax: str, torch_layer: str = "", flax_layer: str = "") -> tuple[Change, ...]:
    """Return changes that put code between fc1 and fc2, and a layer `self.middle` that it calls."""
    of_torch, of_jax = (f"; self.middle = {layer}" * bool(layer) for layer in (torch_layer, flax_layer))
    return (
        ("self.fc2 = torch.nn.Linear(5, 4)", f"self.fc2 = torch.nn.Linear(5, 4){of_torch}"),
        ("torch.tanh(self.fc1(x))", torch),
        ("self.fc2 = nnx.Linear(5, 4, rngs=rngs)", f"self.fc2 = nnx.Linear(5, 4, rngs=rngs){of_jax}"),
        ("nnx.tanh(self.fc1(x))", flax),
    )


# The layer `self.middle` between fc1 and the tanh, as the first arguments of `between`.
NORM = "torch.tanh(self.middle(self.fc1(x)))", "nnx.tanh(self.middle(self.fc1(x)))"


def losses(torch: str, flax: str) -> tuple[Change, ...]:
    """Return changes that replace the ends of both losses, from `return` on."""
    return (
        ('return F.cross_entropy(model(batch["x"]), batch["y"])', torch),
        ('return cross_entropy(model(batch["x"]), batch["y"]).mean()', flax),
    )


# Torch has images (N, C, H, W), jax (N, H, W, C).
IMAGES = (("def batch(", "def torch_batch("), ("(12, 3)", "(12, 2, 6, 8)"))
