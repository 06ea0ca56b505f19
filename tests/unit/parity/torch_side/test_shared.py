"""Ranks of a large model share their parameters, unless its loss or its optimizer might tell."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from jaxddp.parity.port import PortFile
from jaxddp.parity.torch_side import draw_weights
from jaxddp.parity.torch_side.draw_weights import DrawWeights
from jaxddp.parity.torch_side.shared import OnDisk, SharedParameters, may_share
from tests.support.small_port import at_start_of, wide, write
from torch_ref.distributed import World


class Other(Optimizer):
    """An optimizer that is not torch's own."""


def stepped(shares: bool, folder: Path) -> tuple[nn.Module, AdamW]:
    """Return a model and its optimizer after three steps."""
    torch.manual_seed(0)
    model = nn.Linear(400, 400)
    optimizer = AdamW(model.parameters())
    shared = SharedParameters(model, World(), folder) if shares else None
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 400)).square().sum().backward()
        optimizer.step() if shared is None else shared.update(optimizer)
    return model, optimizer


def test_shared_parameters_are_updated_as_others_are(tmp_path: Path) -> None:
    (model, optimizer), (apart, of_apart) = stepped(True, tmp_path), stepped(False, tmp_path)
    assert torch.equal(model.weight, apart.weight) and torch.equal(model.bias, apart.bias)
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[model.weight][key], of_apart.state[apart.weight][key])
    assert list(tmp_path.iterdir()) == []  # the files have no names any more
    for line in ("zeros_like", "clone"):
        with OnDisk(tmp_path):
            assert torch.equal(getattr(torch, line)(model.weight), getattr(torch, line)(apart.weight))


def test_only_optimizers_of_torch_itself_are_left_to_one_rank() -> None:
    model = nn.Linear(1, 1)
    assert may_share(model, AdamW(model.parameters()), World())
    assert not may_share(model, Other(model.parameters(), {}), World())


@pytest.mark.parametrize(
    ("code", "moves"), [("model.fc1.weight.data.mul_(0.5)", True), ("model.fc1.weight.data.mul_(1.0)", False)]
)
def test_a_loss_that_moves_weights_is_noticed(
    code: str, moves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_weights, "is_large_model", lambda start: True)
    port = write(tmp_path, *wide(6), at_start_of("torch_loss(model, batch)", code))
    _, facts, *_ = DrawWeights(PortFile(str(port)), "float64", tmp_path / "weights").run(World(), lambda where: None)
    assert facts.moves_weights == moves
