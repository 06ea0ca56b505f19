"""A program that changes weights, buffers or optimizer state between updates is not equal to one that does not."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import optax
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import numpy as jnp

from jaxddp.parity import Recorder, Report, compare_runs
from jaxddp.parity.diagnosis.search.decide import Ruling
from jaxddp.parity.recordings import causes

STEPS, FEATURES, HIDDEN, CLASSES = 4, 5, 6, 3
SCALE = 1e-6  # of a change that must be found in float64


@pytest.fixture(autouse=True, scope="module")
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Place(NamedTuple):
    """A moment of a run: a step, before or after the recorder is called."""

    step: int
    when: str


def batches() -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    for step in range(1, STEPS + 1):
        rng = np.random.default_rng(step)
        yield step, rng.normal(size=(8, FEATURES)), rng.integers(0, CLASSES, 8)


def start() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = {"0.weight": (HIDDEN, FEATURES), "0.bias": (HIDDEN,), "3.weight": (CLASSES, HIDDEN), "3.bias": (CLASSES,)}
    return {name: rng.normal(0, 0.5, shape) for name, shape in shapes.items()}


def record_torch(
    folder: Path,
    edit: Callable[[Place, torch.nn.Module, torch.optim.Optimizer], None] = lambda *_: None,
    recorded: Any = STEPS,
    make: Any = torch.optim.Adam,
) -> Path:
    """Train and record; `edit` may change anything around the recorder's call."""
    layers = torch.nn.Linear(FEATURES, HIDDEN), torch.nn.BatchNorm1d(HIDDEN), torch.nn.Tanh()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN, CLASSES)).double()
    model.load_state_dict({n: torch.tensor(x) for n, x in start().items()}, strict=False)
    optimizer = make(model.parameters(), lr=0.01)
    recorder = Recorder(folder, recorded)
    recorder.watch(model, optimizer)
    for step, x, y in batches():
        batch = {"x": torch.tensor(x), "y": torch.tensor(y)}
        loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            edit(Place(step, "before"), model, optimizer)
            recorder.step(batch, loss)
            edit(Place(step, "after"), model, optimizer)
    return folder


@dataclass
class State:
    """What a JAX program keeps between its steps."""

    params: Any
    batch_stats: Any
    opt_state: Any


OPTIMIZER = optax.adam(0.01)


@jax.jit
def jax_step(params: Any, stats: Any, opt_state: Any, x: Any, y: Any) -> Any:
    def loss_of(params: Any) -> Any:
        hidden = x @ params["0"]["kernel"] + params["0"]["bias"][None]
        mean, var, count = hidden.mean(0), hidden.var(0), len(x)
        old = stats["1"]
        new = {"mean": 0.9 * old["mean"] + 0.1 * mean, "var": 0.9 * old["var"] + 0.1 * var * count / (count - 1)}
        normed = (hidden - mean[None]) / jnp.sqrt(var + 1e-5)[None] * params["1"]["scale"][None]
        hidden = jnp.tanh(normed + params["1"]["bias"][None])
        logits = hidden @ params["3"]["kernel"] + params["3"]["bias"][None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), {"1": new}

    (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return loss, stats, grads, updates, opt_state


def record_jax(
    folder: Path,
    edit: Callable[[Place, State], None] = lambda *_: None,
    recorded: Any = STEPS,
    shown: tuple[str, ...] = ("grads", "updates", "params", "batch_stats", "opt_state"),
) -> Path:
    """Train and record; `edit` may change anything around the recorder's call."""
    begin = start()
    layers = {n: {"kernel": jnp.array(begin[f"{n}.weight"].T), "bias": jnp.array(begin[f"{n}.bias"])} for n in "03"}
    params = layers | {"1": {"scale": jnp.ones(HIDDEN), "bias": jnp.zeros(HIDDEN)}}
    state = State(params, {"1": {"mean": jnp.zeros(HIDDEN), "var": jnp.ones(HIDDEN)}}, OPTIMIZER.init(params))
    recorder = Recorder(folder, recorded)
    recorder.watch({"params": state.params, "batch_stats": state.batch_stats})
    for step, x, y in batches():
        loss, state.batch_stats, grads, updates, state.opt_state = jax_step(
            state.params, state.batch_stats, state.opt_state, x, y
        )
        state.params = optax.apply_updates(state.params, updates)
        edit(Place(step, "before"), state)
        every = {"grads": grads, "updates": updates, **vars(state)}
        recorder.step({"x": x, "y": y}, loss, **{name: every[name] for name in shown})
        edit(Place(step, "after"), state)
    return folder


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Record both programs as they are."""
    folder = tmp_path_factory.mktemp("right")
    return record_torch(folder / "torch"), record_jax(folder / "jax")


def clamp_torch(place: Place, model: torch.nn.Module, _: Any, when: str = "before") -> None:
    if place.when == when:
        for parameter in model.parameters():
            parameter.clamp_(-0.4, 0.4)


def clamp_jax(place: Place, state: State, when: str = "before") -> None:
    if place.when == when:
        state.params = jax.tree.map(lambda x: x.clip(-0.4, 0.4), state.params)


def reset_torch(place: Place, model: torch.nn.Module, _: Any) -> None:
    if place == (2, "after"):
        model[3].weight.copy_(torch.tensor(start()["3.weight"]))  # type: ignore[index, operator]


def forget_torch(place: Place, _: Any, optimizer: torch.optim.Optimizer) -> None:
    if place == (2, "before"):
        optimizer.state.clear()


def forget_jax(place: Place, state: State) -> None:
    if place == (2, "after"):
        state.opt_state = OPTIMIZER.init(state.params)


def zero_mean_torch(place: Place, model: torch.nn.Module, _: Any) -> None:
    if place == (2, "before"):
        model[1].running_mean.zero_()  # type: ignore[index, operator, union-attr]


def shrink_torch(place: Place, model: torch.nn.Module, _: Any) -> None:
    if place.when == "before":
        model[3].weight.mul_(0.999)  # type: ignore[index, operator]


def compared(right: tuple[Path, Path], folder: Path, torch_edit: Any = None, jax_edit: Any = None) -> Report:
    """Compare the programs of which one, or both, are edited."""
    torch_run = right[0] if torch_edit is None else record_torch(folder / "torch", torch_edit)
    jax_run = right[1] if jax_edit is None else record_jax(folder / "jax", jax_edit)
    return compare_runs(torch_run, jax_run)


def found(report: Report) -> list[tuple[str, int]]:
    return [(difference.stage, difference.step) for difference in report.differences]


def test_programs_that_change_nothing_between_steps_are_equal(right: tuple[Path, Path]) -> None:
    report = compare_runs(*right)
    assert report.verdict == "equal", str(report)
    assert report.stages["outside_changes"].residuals == (0.0,) * STEPS
    assert not report.left_out and "alike" not in str(report)


EDITS = {
    "clamped in torch": (clamp_torch, None, ("outside_changes", 1), "torch changes 0."),
    "reset in torch": (reset_torch, None, ("outside_changes", 2), "torch changes 3.weight"),
    "shrunk in torch": (shrink_torch, None, ("outside_changes", 1), "torch changes 3.weight"),
    "state forgotten in torch": (forget_torch, None, ("update", 3), "its optimizer's state (exp_avg, exp_avg_sq)"),
    "running mean of torch": (zero_mean_torch, None, ("buffers", 2), "in 1.running_mean"),
    "clamped in jax": (None, clamp_jax, ("outside_changes", 1), "jax changes 0."),
    "clamped in jax afterwards": (None, partial(clamp_jax, when="after"), ("outside_changes", 2), "jax changes 0."),
    "state forgotten in jax": (None, forget_jax, ("update", 3), "[state_reset]"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_change_on_one_side_is_a_difference_with_its_step_and_side(
    edit: str, right: tuple[Path, Path], tmp_path: Path
) -> None:
    torch_edit, jax_edit, where, says = EDITS[edit]
    report = compared(right, tmp_path, torch_edit, jax_edit)
    assert report.verdict == "different" and found(report) == [where], str(report)
    assert says in " ".join(str(report).split())


@pytest.mark.parametrize("jax_when", ["before", "after"])
@pytest.mark.parametrize("torch_when", ["before", "after"])
def test_the_same_change_on_both_sides_is_equal_with_a_remark(
    torch_when: str, jax_when: str, right: tuple[Path, Path], tmp_path: Path
) -> None:
    edits = partial(clamp_torch, when=torch_when), partial(clamp_jax, when=jax_when)
    report = compared(right, tmp_path, *edits)
    assert report.verdict == "equal", str(report)
    assert "Both sides change 0." in str(report) and "alike" in str(report)
    for part in report.left_out:  # the last step, which no other follows
        assert (part.stages, part.steps) == (("outside_changes",), (STEPS,))
        assert "after" in (torch_when, jax_when)


@pytest.mark.parametrize("shown", [("grads", "params"), ("params",)], ids=["replayed", "direct"])
@pytest.mark.parametrize("jax_edit", [None, clamp_jax, partial(clamp_jax, when="after")])
def test_changes_are_found_in_updates_that_are_differences_of_parameters(
    jax_edit: Any, shown: tuple[str, ...], tmp_path: Path
) -> None:
    torch_run = record_torch(tmp_path / "torch", clamp_torch)
    jax_run = record_jax(tmp_path / "jax", *[jax_edit] * (jax_edit is not None), shown=shown)
    report = compare_runs(torch_run, jax_run)
    assert report.verdict == ("different" if jax_edit is None else "equal"), str(report)
    assert jax_edit is not None or found(report)[0] == ("outside_changes", 1)


def record_with_target(folder: Path, side: str, tau: float, recorded: Any) -> Path:
    """Record a program whose second network follows the first by an average, in torch or JAX."""
    begin, rate = np.random.default_rng(3).normal(size=(2, FEATURES)), 0.1
    batch = {"x": np.random.default_rng(4).normal(size=(8, FEATURES))}
    recorder = Recorder(folder, recorded)
    if side == "torch":
        model = torch.nn.ModuleDict({name: torch.nn.Linear(FEATURES, 2, bias=False) for name in ("net", "target")})
        for parameter in model.double().parameters():
            parameter.data = torch.tensor(begin)
        optimizer = torch.optim.SGD(model["net"].parameters(), lr=rate)
        model["target"].requires_grad_(False)
        recorder.watch(model, optimizer)
        for _ in range(STEPS):
            x = torch.tensor(batch["x"])
            loss = (model["net"](x) - 0.9 * model["target"](x)).square().mean() + model["net"](x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model["target"].weight.lerp_(model["net"].weight, tau)  # type: ignore[operator]
            recorder.step({"x": x}, loss)
        return folder
    params = {name: {"kernel": jnp.asarray(begin.T)} for name in ("net", "target")}

    def loss_of(net: Any, target: Any) -> Any:
        x = batch["x"]
        return ((x @ net["kernel"] - 0.9 * (x @ target["kernel"])) ** 2).mean() + (x @ net["kernel"]).mean()

    recorder.watch(params)
    for _ in range(STEPS):
        loss, grads = jax.value_and_grad(loss_of)(params["net"], params["target"])
        zeros = jax.tree.map(jnp.zeros_like, params["target"])
        updates = {"net": jax.tree.map(lambda g: -rate * g, grads), "target": zeros}
        params = optax.apply_updates(params, updates)
        params["target"] = jax.tree.map(lambda t, n: t + tau * (n - t), params["target"], params["net"])
        recorder.step(batch, loss, grads={"net": grads, "target": zeros}, updates=updates, params=params)
    return folder


@pytest.mark.parametrize("recorded", [STEPS, [1, 3, 4]], ids=["all", "gap"])
@pytest.mark.parametrize("tau", [0.05, 0.06])
def test_a_target_network_that_both_sides_average_alike_is_equal(tau: float, recorded: Any, tmp_path: Path) -> None:
    torch_run = record_with_target(tmp_path / "torch", "torch", 0.05, recorded)
    report = compare_runs(torch_run, record_with_target(tmp_path / "jax", "jax", tau, recorded))
    assert report.verdict == ("equal" if tau == 0.05 else "different"), str(report)
    assert tau == 0.05 or found(report)[0] == ("outside_changes", 1)


def test_a_state_that_both_sides_forget_is_equal(right: tuple[Path, Path], tmp_path: Path) -> None:
    report = compared(right, tmp_path, forget_torch, forget_jax)
    assert report.verdict == "equal", str(report)
    assert "From step 3 on torch's updates are not what its Adam makes" in " ".join(str(report).split())


def test_a_single_recorded_step_and_steps_behind_a_gap_show_changes_too(tmp_path: Path) -> None:
    for recorded, step in ((1, 1), ([1, 4], 1), ([2], 2)):
        folder = tmp_path / str(recorded)
        jax_run = record_jax(folder / "jax", recorded=recorded)
        report = compare_runs(record_torch(folder / "right", recorded=recorded), jax_run)
        assert report.verdict == "equal", str(report)
        report = compare_runs(record_torch(folder / "torch", shrink_torch, recorded), jax_run)
        assert ("outside_changes", step) in found(report), str(report)


FLOATS = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias", "1.running_mean", "1.running_var"]
LEAVES = ["params", "batch_stats", "opt_state"]
places = st.sampled_from([Place(n, when) for n in range(1, STEPS + 1) for when in ("before", "after")][:-1])


def nudged(x: Any, element: int) -> np.ndarray:
    """Return an array of which one element has changed by `SCALE` of the largest."""
    moved = np.array(x)
    moved.ravel()[element % moved.size] += SCALE * (np.abs(moved).max() or 1.0)
    return moved


def nudge_torch(
    place: Place, model: torch.nn.Module, optimizer: torch.optim.Optimizer, at: Place, where: str, element: int
) -> None:
    if place != at:
        return
    name, _, part = where.partition(":")
    tensor = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
    tensor = optimizer.state[tensor][part] if part else tensor
    tensor.copy_(torch.tensor(nudged(tensor.detach().numpy(), element)))


def nudge_jax(place: Place, state: State, at: Place, where: str, leaf: int, element: int) -> None:
    if place == at:
        leaves = jax.tree.leaves_with_path(getattr(state, where))
        paths = [path for path, x in leaves if x.ndim and not noise(path, where)]
        chosen = paths[leaf % len(paths)]
        nudge = lambda path, x: jnp.asarray(nudged(x, element)) if path == chosen else x  # noqa: E731
        setattr(state, where, jax.tree.map_with_path(nudge, getattr(state, where)))


def noise(path: Any, where: str) -> bool:
    """Return whether a state is that of the bias before BatchNorm, which sums up rounding: its scale is 1e-17."""
    return where == "opt_state" and jax.tree_util.keystr(path).endswith("['0']['bias']")


STATES = [f"{name}:{part}" for name in FLOATS[:6] if name != "0.bias" for part in ("exp_avg", "exp_avg_sq")]
torch_edits = st.builds(
    lambda **options: partial(nudge_torch, **options),
    at=places,
    where=st.sampled_from(FLOATS + STATES),
    element=st.integers(0, 99),
)
jax_edits = st.builds(
    lambda **options: partial(nudge_jax, **options),
    at=places,
    where=st.sampled_from(LEAVES),
    leaf=st.integers(0, 99),
    element=st.integers(0, 99),
)
# Each run writes a folder of its own; a run takes as long as it takes.
EXAMPLES = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


def check_nudge(edits: tuple[Any, Any], right: tuple[Path, Path], folder: Path) -> None:
    """Check the verdict alone: a search for a name takes most of the time, and a nudge has none."""
    search = mock.patch.object(causes, "explain_optimizer", return_value=Ruling((), None))
    with tempfile.TemporaryDirectory(dir=folder) as fresh, search:
        report = compared(right, Path(fresh), *edits)
    assert report.verdict == "different", f"{edits}\n{report}"


@settings(EXAMPLES, max_examples=8)
@given(edits=st.one_of(st.tuples(torch_edits, st.none()), st.tuples(st.none(), jax_edits)))
def test_any_element_that_changes_between_steps_is_found(
    edits: tuple[Any, Any], right: tuple[Path, Path], tmp_path: Path
) -> None:
    check_nudge(edits, right, tmp_path)


@pytest.mark.large
@settings(EXAMPLES, max_examples=150)
@given(edits=st.one_of(st.tuples(torch_edits, st.none()), st.tuples(st.none(), jax_edits)))
def test_any_of_many_elements_that_change_between_steps_is_found(
    edits: tuple[Any, Any], right: tuple[Path, Path], tmp_path: Path
) -> None:
    check_nudge(edits, right, tmp_path)
