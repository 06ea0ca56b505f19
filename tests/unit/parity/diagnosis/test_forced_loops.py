"""Torch computes in a loop what the port computes at once: values of a step are part of the port's, or none."""

from collections.abc import Callable, Mapping

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch import Tensor, nn

from jaxddp.parity.diagnosis.forced.causes import LocatedFault
from jaxddp.parity.report.sentences import line, sentence
from tests.support.forced_programs import faults_of

BATCH, TIME, WIDTH = 3, 5, 4
DONE = np.array([[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])


class Critic(nn.Module):
    """Values of states."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, states: Tensor) -> Tensor:
        return torch.tanh(self.value(states)).squeeze(-1)


def torch_loss(model: Critic, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    values, carried, advantages = model(batch["states"]), torch.zeros(BATCH), list[Tensor]()
    for t in reversed(range(TIME - 1)):
        going_on = 1 - batch["done"][:, t]
        delta = batch["rewards"][:, t] + 0.9 * going_on * values[:, t + 1] - values[:, t]
        carried = delta + 0.5 * going_on * carried
        advantages.insert(0, carried)
    found = torch.stack(advantages, 1)
    found = (found - found.mean()) / (found.std() + 1e-8)
    return {"loss": (found * batch["weights"]).square().mean()}


def normalised(x: jax.Array) -> jax.Array:
    return (x - x.mean()) / (x.std(ddof=1) + 1e-8)


def following(going_on: jax.Array, values: jax.Array) -> jax.Array:
    return 0.9 * going_on * values[:, 1:]


def jax_loss(
    p: Mapping[str, jax.Array],
    batch: Mapping[str, jax.Array],
    following: Callable[[jax.Array, jax.Array], jax.Array] = following,
    normalised: Callable[[jax.Array], jax.Array] = normalised,
) -> jax.Array:
    values = jnp.tanh(batch["states"] @ p["value.weight"].T + p["value.bias"][None, None])[..., 0]
    going_on = 1 - batch["done"]
    deltas = batch["rewards"] + following(going_on, values) - values[:, :-1]

    def step(carried: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        carried = now[0] + 0.5 * now[1] * carried
        return carried, carried

    advantages = jax.lax.scan(step, jnp.zeros(BATCH), (deltas.T, going_on.T), reverse=True)[1].T
    return jnp.square(normalised(advantages) * batch["weights"]).mean()


def faults(**pieces: Callable[..., jax.Array]) -> list[LocatedFault]:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = Critic().double()
    batch = {"states": rng.normal(size=(BATCH, TIME, WIDTH)), "done": DONE.astype(float)}
    batch |= {name: rng.normal(size=(BATCH, TIME - 1)) for name in ("rewards", "weights")}
    return faults_of(model, torch_loss, lambda p, b: jax_loss(p, b, **pieces), batch)


def lines_of(fault: LocatedFault) -> list[str]:
    return [line.text for line in fault.text.lines if line is not None]


def test_a_loop_that_is_computed_at_once_has_no_fault() -> None:
    assert faults() == []


def test_a_factor_that_is_left_out_of_a_loop_is_named_in_all_steps() -> None:
    """The factor is 1 in the last step, where its loss shows nothing; no value of the port is one of its products."""
    [fault] = faults(following=lambda going_on, values: 0.9 * values[:, 1:])
    assert [line(name) for name in fault.names] == ["going_on left out of mul by 0.9"]
    assert len(fault.names[0].sites) == TIME - 1
    jax_line, torch_line = lines_of(fault)
    assert "0.9 * values[:, 1:]" in jax_line and torch_line.startswith("delta = ")


def test_a_number_in_place_of_an_array_is_located() -> None:
    [fault] = faults(normalised=lambda x: x.std(ddof=1) + 1e-8)
    assert fault.what and sentence(fault.what) == "sub(...) left out of div"
    jax_line, torch_line = lines_of(fault)
    assert "normalised(advantages)" in jax_line and torch_line.startswith("found = (found")


class Cells(nn.Module):
    """A recurrent layer, whose calls are one line of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)


def torch_loss_of_cells(model: Cells, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"loss": (model.gru(batch["states"])[0] ** 2).mean()}


def jax_loss_of_cells(p: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], with_candidate: bool) -> jax.Array:
    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        given = jnp.split(x @ p["gru.weight_ih_l0"].T + p["gru.bias_ih_l0"][None], 3, axis=-1)
        kept = jnp.split(h @ p["gru.weight_hh_l0"].T + p["gru.bias_hh_l0"][None], 3, axis=-1)
        reset, update = (jax.nn.sigmoid(given[k] + kept[k]) for k in (0, 1))
        candidate = jnp.tanh(given[2] + reset * kept[2])
        new = (1 - update) * candidate if with_candidate else 1 - update
        h = new + update * h
        return h, h

    start = jnp.zeros((BATCH, WIDTH))
    return jnp.square(jax.lax.scan(step, start, batch["states"].swapaxes(0, 1))[1]).mean()


@pytest.mark.parametrize("with_candidate", [True, False])
def test_a_factor_that_is_left_out_of_a_cell_is_named_at_its_line(with_candidate: bool) -> None:
    """Calls of a cell are planted by what they compute: all are one line of torch's."""
    torch.manual_seed(0)
    model = Cells().double()
    batch = {"states": np.random.default_rng(0).normal(size=(BATCH, TIME, WIDTH))}
    found = faults_of(model, torch_loss_of_cells, lambda p, b: jax_loss_of_cells(p, b, with_candidate), batch)
    if with_candidate:
        assert found == []
        return
    [fault] = found
    says = "the result of tanh of the candidate left out of mul of the update gate and the candidate"
    assert [line(name) for name in fault.names] == [says]
    assert lines_of(fault)[0] in (
        "new = (1 - update) * candidate if with_candidate else 1 - update",
        "h = new + update * h",
    )


class Recurrence(nn.Module):
    """A state that is carried on, and read at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.read = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)


def torch_loss_of_states(model: Recurrence, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state, outputs = torch.zeros(BATCH, WIDTH), list[Tensor]()
    for t in range(TIME):
        state = 0.5 * state + torch.tanh(model.inner(batch["states"][:, t]))
        outputs.append(model.read(state * batch["states"][:, t]))
    return {"loss": torch.stack(outputs, 1).square().mean()}


def faults_of_states(advance: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]) -> list[LocatedFault]:
    """Return the faults of a port whose step returns the new state and the state that is read."""
    torch.manual_seed(0)
    batch = {"states": np.random.default_rng(0).normal(size=(BATCH, TIME, WIDTH))}

    def jax_loss(p: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> jax.Array:
        def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            inner = jnp.tanh(x @ p["inner.weight"].T + p["inner.bias"][None])
            state, seen = advance(state, inner)
            return state, seen * x @ p["read.weight"].T + p["read.bias"][None]

        outputs = jax.lax.scan(step, jnp.zeros((BATCH, WIDTH)), batch["states"].swapaxes(0, 1))[1]
        return jnp.square(outputs).mean()

    return faults_of(Recurrence().double(), torch_loss_of_states, jax_loss, batch)


def after(state: jax.Array, inner: jax.Array) -> jax.Array:
    return 0.5 * state + inner


def test_a_state_that_is_read_after_its_update_has_no_fault() -> None:
    assert faults_of_states(lambda state, inner: (after(state, inner),) * 2) == []


def test_a_state_that_is_read_before_its_update_is_named_so() -> None:
    [fault] = faults_of_states(lambda state, inner: (after(state, inner), state))
    assert [line(name) for name in fault.names] == ["state of the step before in mul"]
    assert len(fault.names[0].sites) == TIME


def test_a_state_that_stays_0_is_found_where_it_becomes_0() -> None:
    """No single 0 makes the losses equal: the sum is 0 at each step, and its factors are not."""
    [fault] = faults_of_states(lambda state, inner: (state * inner,) * 2)
    assert fault.text.lines.torch is not None and fault.text.lines.torch.text.startswith("state = 0.5 * state")
    assert fault.text.lines.jax is not None and "state * inner" in fault.text.lines.jax.text
