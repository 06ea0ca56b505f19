"""Checks of the small port in worker processes that are reused from test to test."""

from collections.abc import Callable
from pathlib import Path

from jaxddp.parity.checking import check
from jaxddp.parity.report.report import Report
from jaxddp.parity.workers import Workers
from tests.support.small_port import Change, write

STEPS = 3
Checked = Callable[..., Report]

FROZEN = ("return TorchNet()", "net = TorchNet()\n    net.fc1.requires_grad_(False)\n    return net")
FORGETS_MOMENTS = """
def jax_restore(state):
    import dataclasses
    return dataclasses.replace(state, opt_state=jax_optimizer.init(state.params))
restore_at = 2
"""
# A constant that one side keeps as a buffer.
SCALED = [
    (
        "self.fc2 = torch.nn.Linear(5, 4)",
        'self.fc2 = torch.nn.Linear(5, 4); self.register_buffer("two", torch.tensor(2.0))',
    ),
    ("self.fc2(torch.tanh(self.fc1(x)))", "self.two * self.fc2(torch.tanh(self.fc1(x)))"),
    ("self.fc2(nnx.tanh(self.fc1(x)))", "2 * self.fc2(nnx.tanh(self.fc1(x)))"),
]


def checker(folder: Path, workers: Workers, world_size: int) -> Checked:
    """Return a function that checks the small port with changes: (changes, more, numerics, quick, steps) -> report."""

    def checked(
        *changes: Change, more: str = "", numerics: bool = False, quick: bool = True, steps: int = STEPS
    ) -> Report:
        port = write(folder, *changes, more=more)
        return check(port, world_size=world_size, steps=steps, workers=workers, numerics=numerics, quick=quick)

    return checked
