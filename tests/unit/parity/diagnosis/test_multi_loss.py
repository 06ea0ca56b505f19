"""Differences of a `torch_step` and its twin, from their records."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jaxddp.parity.compare.judge import Located
from jaxddp.parity.diagnosis import multi_loss
from jaxddp.parity.diagnosis.decide import Hypothesis, Ruling
from jaxddp.parity.diagnosis.forward.calls import Change, Patch
from jaxddp.parity.diagnosis.forward.one_loss import LossOfStep, UnknownWeights
from jaxddp.parity.diagnosis.forward.rank_job import UNKNOWN
from jaxddp.parity.diagnosis.forward.replay import ModelEvidence, ModelStep, Replay
from jaxddp.parity.records import KIND, NUMBER
from jaxddp.parity.torch_side.side import TorchStep

NAMED = Ruling((), None, cut_short=True)


class Step(dict[str, Any]):
    """A record of torch's, whose two optimizers update `a` and `b`."""

    notes = {"groups": [{NUMBER: number, KIND: "SGD", "names": [name]} for number, name in enumerate("ab")]}  # noqa: RUF012


def evidence(updates: list[dict[str, float]], made: list[set[str]], first: dict[str, Located] | None = None) -> Any:
    """Return evidence of steps with these residuals of the updates, in which torch updates these parameters."""
    return SimpleNamespace(
        torch=[Step(clipped_gradients=dict.fromkeys(names), local_loss={"loss": np.ones(2)}) for names in made],
        jax=[{"local_loss": {"loss": np.full(2, 3.0)}} for _ in made],
        judgement=SimpleNamespace(
            residuals={"update": updates}, allowed=lambda stage, step: 1e-12, first=first or {}, same_examples=[[0, 1]]
        ),
        case=SimpleNamespace(world_size=2, torch_source=None),
        is_large=False,
        **dict.fromkeys(("start", "torch_folder", "jax_folder")),
    )


@pytest.mark.parametrize(("made", "detail", "moved_by"), [({"a"}, multi_loss.NO_UPDATE, None), ({"a", "b"}, "", 1)])
def test_an_update_that_torch_does_not_make_has_no_cause_in_the_optimizer(
    made: set[str], detail: str, moved_by: int | None
) -> None:
    of_steps = evidence([{"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.5}], [{"a", "b"}, made])
    ((located, number),) = multi_loss.differing_updates(of_steps)
    assert (located.step, located.tensor, located.detail, number) == (2, "b", detail, moved_by)


@pytest.mark.parametrize(
    ("others", "named", "detail"),
    [
        ({}, (), multi_loss.EQUAL_LOSSES),
        ({"local_loss": Located(1, "loss", 0.5, 1e-12)}, (), ""),
        ({}, (Hypothesis(("no_sync",), "", 0.0),), ""),
    ],
)
def test_gradients_that_differ_alone_say_where_to_look(
    others: dict[str, Located], named: tuple[Hypothesis, ...], detail: str
) -> None:
    of_step = evidence([{"a": 0.0}], [{"a"}], {"gradients": Located(1, "a", 0.5, 1e-12), **others})
    assert multi_loss.located_gradients(of_step, Ruling(named, None)).detail == detail


def test_a_loss_behind_a_large_update_follows_it_if_it_differs() -> None:
    located = Located(1, "loss", 0.5, 1e-12)
    alone = evidence([{"a": 0.0}], [{"a"}])
    followed = evidence([{"a": 0.5}], [{"a"}], {"update": Located(1, "a", 0.5, 1e-12)})
    search = lambda job: (UNKNOWN, None)  # noqa: E731
    ruling, where = multi_loss.explain_loss(alone, located, search, lambda *where: None) or (NAMED, located)
    assert ruling is None and where.detail == multi_loss.BEHIND
    assert multi_loss.explain_loss(followed, located, search, lambda *where: None) is None


def test_a_loss_that_depends_on_weights_that_are_not_known_is_not_computed() -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> dict[str, float]:
        first = model["a"](batch["x"]).sum()
        first.backward()
        optimizer.step()
        after = model["a"](batch["x"]).sum()
        return {"before": float(first.detach()), "after": float(after.detach())}

    batch = {"x": torch.ones(1, 1)}
    steps = TorchStep(lambda model: torch.optim.SGD(model["a"].parameters(), lr=1.0), step)

    def loss(name: str, known: dict[str, np.ndarray]) -> float:
        with torch.no_grad():
            model["a"].weight.fill_(3.0)
        return float(LossOfStep(steps, name, [[[batch]]], lambda step: known)(model, batch)["loss"])

    known = {"a.weight": np.full((1, 1), 5.0), "b.weight": np.zeros((1, 1))}
    assert loss("before", {}) == loss("before", known) == 3.0
    assert loss("after", known) == 5.0
    with pytest.raises(UnknownWeights):
        loss("after", {"b.weight": np.zeros((1, 1))})


def test_a_replay_begins_at_the_weights_before_the_step_though_a_step_has_changed_large_ones() -> None:
    model = nn.Linear(400, 400, bias=False).double()  # so large that a replay keeps it from one to the next

    def loss(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        first = model.weight[0, 0].detach().clone()
        with torch.no_grad():
            model.weight.add_(1.0)
        return {"loss": first, "count": torch.tensor(1.0)}

    state = {"weight": np.zeros((400, 400))}
    step = ModelStep(state, None, [[{"x": torch.ones(1)}]], *[np.zeros(0)] * 4)
    harmless = Patch(Change("none", "no change"), frozenset())
    for changes_weights, second in ((True, 0.0), (False, 1.0)):
        replay = Replay(ModelEvidence(model, loss, [step], 1, changes_weights=changes_weights))
        losses = [replay.run(0, [0], patches)[0].pieces[0].loss for patches in ((), (harmless,))]
        assert losses == [0.0, second]
