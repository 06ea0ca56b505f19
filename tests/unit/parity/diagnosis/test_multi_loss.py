"""Differences of a `torch_step` and its twin, from their records."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch import nn

from jaxddp.parity.compare.judge import Located
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis import multi_loss
from jaxddp.parity.diagnosis.forward.calls import CallEdit, Change
from jaxddp.parity.diagnosis.forward.loss_causes import search_model
from jaxddp.parity.diagnosis.forward.rank_job import UNKNOWN, LossOfStep, UnknownWeights
from jaxddp.parity.diagnosis.forward.reading import Reading
from jaxddp.parity.diagnosis.forward.replay import ModelEvidence, ModelStep, Replay
from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling
from jaxddp.parity.graph import operations_of
from jaxddp.parity.jax_side.value_graph import graph_of
from jaxddp.parity.records import KIND, NUMBER
from jaxddp.parity.report.sentences import line
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
        summands=(),
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
        ({}, (Hypothesis((Deviation("no_sync", Statement("")),), 0.0),), ""),
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


@pytest.mark.parametrize(("residual", "searched"), [(0.0, 1), (0.5, 0)])
def test_gradients_of_losses_that_differ_are_not_searched(residual: float, searched: int) -> None:
    of_step = evidence([{"a": 0.0}], [{"a"}], {"gradients": Located(1, "a", 0.5, 1e-12)})
    of_step.torch[0]["gradients"] = {"a": np.array([1.0, 2.0])}
    of_step.jax[0] |= {"gradients": {"a": np.array([1.0, 3.0])}, "spread": {}}
    of_step.judgement.residuals["local_loss"] = [{"loss": residual}]
    of_step.summary = SimpleNamespace(sizes={})
    jobs: list[Any] = []
    read: Any = lambda *where: SimpleNamespace(program=())  # noqa: E731
    multi_loss.explain_gradients(of_step, jobs.append, read)
    assert len(jobs) == searched


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
    harmless = CallEdit(Change("none", Statement("batch_statistics")), frozenset())
    for changes_weights, second in ((True, 0.0), (False, 1.0)):
        replay = Replay(ModelEvidence(model, loss, [step], 1, changes_weights=changes_weights))
        losses = [replay.run(0, [0], patches)[0].pieces[0].loss for patches in ((), (harmless,))]
        assert losses == [0.0, second]


AVERAGES = {
    "another rate": (
        lambda old, before, after: 0.7 * old + 0.3 * after,
        "before add_, slow.weight times 0.7, the reference has 0.9; add_'s alpha 0.3, the reference has 0.1",
    ),
    "before the update": (
        lambda old, before, after: 0.9 * old + 0.1 * before,
        "weights from before optimizer.step() are used, and not those after it",
    ),
}


def test_what_a_step_changes_itself_differs_by_itself_if_it_differs_more_than_the_updates_do() -> None:
    both = [{"a": 1e-7, "slow": 0.3}], [{"a": 0.3, "slow": 0.2}]
    found = [[where.tensor for where, _ in multi_loss.differing_updates(evidence(of, [{"a"}]))] for of in both]
    assert found == [["a", "slow"], ["a"]]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("by_data", [False, True], ids=["no_grad", "data"])
@pytest.mark.parametrize("case", AVERAGES)
def test_a_moving_average_that_differs_has_a_cause(case: str, by_data: bool) -> None:
    average, says = AVERAGES[case]
    model = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in ("fast", "slow")}).double()

    def step(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        loss = model["fast"](batch["x"]).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slow = model["slow"].weight.data if by_data else model["slow"].weight
        with torch.no_grad():
            slow.mul_(0.9).add_(model["fast"].weight, alpha=0.1)
        return loss

    rng, after = np.random.default_rng(0), {}
    batch = {"x": torch.from_numpy(rng.normal(size=(4, 3)))}
    state = {name: rng.normal(size=(2, 3)) for name in ("fast.weight", "slow.weight")}
    after["fast.weight"] = rng.normal(size=(2, 3))
    with jax.enable_x64(True):
        arrays = (*map(jnp.asarray, (state["slow.weight"], state["fast.weight"], after["fast.weight"])),)
        update = np.asarray(average(*arrays)) - state["slow.weight"]
        graph = graph_of(average, arrays)
    steps = TorchStep(
        lambda model: torch.optim.SGD(model["fast"].parameters(), lr=1.0),
        lambda *arguments: {"loss": step(*arguments)},
    )
    taken = ModelStep(state, None, [[batch]], np.zeros(0), {"slow.weight": update[None]}, {}, {})
    loss = LossOfStep(steps, "", [[[batch]]], lambda step: after)
    moved = {"changes_weights": True, "moved": ("slow.weight",)}
    ruling, _ = search_model(
        ModelEvidence(model, loss, [taken], 1, reading=Reading(operations_of(graph), 0, 0, graph=graph), **moved)
    )
    says = says.replace("slow.weight", "slow") if by_data else says
    assert [line(one) for one in ruling.named] == [says]
    assert ruling.lines[0].torch is not None
