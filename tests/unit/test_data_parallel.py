"""DistributedDataParallel with a user's module: one step by hand, donation, dispatches, refused options."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp

from benchmarks.compilations import Compilations
from jaxddp import optim
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data.torch_rng import Generator
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.devices import prepare
from jaxddp.errors import InputError
from jaxddp.models import MLP
from jaxddp.nn import layers
from jaxddp.nn.losses import Losses
from jaxddp.step.gradient_hooks import GradientHook
from tests.support.step_cases import first, two_epochs

LR = 0.1
TOLERANCE = 5e-7  # relative, float32; measured: 4.3e-8

Arrays = dict[str, np.ndarray]


class Line(nnx.Module):
    """y = slope * x + offset, with parameter names that no layer of jaxddp has."""

    def __init__(self) -> None:
        self.slope = nnx.Param(jnp.asarray(2.0))
        self.offset = nnx.Param(jnp.asarray(-1.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.slope[...] * x + self.offset[...]


def squared_error(model: Line, batch: Any) -> jax.Array:
    return (model(batch["x"]) - batch["y"]) ** 2


@functools.cache
def trainer() -> DistributedDataParallel:
    return DistributedDataParallel(Line(), optim.sgd(LR), squared_error, replicas=first(2))


def data() -> Arrays:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(2, 1, 3)).astype("float32"), "y": rng.normal(size=(2, 1, 3)).astype("float32")}


def one_step(ddp: DistributedDataParallel, state: Any) -> Any:
    return ddp.steps(state, ddp.replicas.shard(MicroBatches(None, data())))


def by_hand(slope: float, offset: float) -> Arrays:
    """Compute the parameters after one step."""
    x, y = (data()[name].astype("float64") for name in "xy")
    residual = slope * x + offset - y
    return {"slope": slope - LR * 2 * (residual * x).mean(), "offset": offset - LR * 2 * residual.mean()}


def check_params(state: Any, expected: Arrays) -> None:
    assert jax.device_get(state.params) == pytest.approx(expected, rel=TOLERANCE)


def test_a_users_module_with_a_plain_loss_trains() -> None:
    state, sums = one_step(trainer(), trainer().init())
    assert (int(trainer().init().step), int(state.step)) == (0, 1)
    check_params(state, by_hand(2.0, -1.0))
    assert sums.keys() == {"loss", "count"}
    assert sums["count"].tolist() == [6]
    with pytest.raises(AssertionError):
        check_params(state, by_hand(2.0, -1.001))


def test_donation_frees_no_array_of_the_caller() -> None:
    model = Line()
    ddp = DistributedDataParallel(model, optim.sgd(LR), squared_error, replicas=first(2))
    given = {"slope": jnp.asarray(5.0), "offset": jnp.asarray(7.0)}
    for _ in range(2):
        check_params(one_step(ddp, ddp.init())[0], by_hand(2.0, -1.0))
        check_params(one_step(ddp, ddp.init(given))[0], by_hand(5.0, 7.0))
    assert (float(model.slope[...]), float(given["slope"])) == (2.0, 5.0)


def test_replicated_arrays_are_copies() -> None:
    """`jax.device_put` alone would keep the caller's array as one of the copies."""
    replicas, kept, donated = first(2), jnp.ones(3), jnp.ones(3)
    count = replicas.map(lambda tree, rank: jax.tree.map(lambda x: x + 1, tree), (None, 0), None, donate=(0,))
    ranks = replicas.shard(np.arange(2))
    jax.block_until_ready(count(replicas.replicate(kept), ranks))
    assert np.asarray(kept).all()
    jax.block_until_ready(count(jax.device_put(donated, replicas.replicate(kept).sharding), ranks))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(donated)


def test_a_module_taken_out_survives_further_steps() -> None:
    ddp = trainer()
    state, _ = one_step(ddp, ddp.init())
    module = ddp.module(state)
    one_step(ddp, state)
    assert module.slope[...] == pytest.approx(by_hand(2.0, -1.0)["slope"], rel=TOLERANCE)
    assert isinstance(module, Line)


def test_the_default_replicas_are_the_prepared_devices() -> None:
    assert DistributedDataParallel(Line(), optim.sgd(LR), squared_error).replicas.devices == prepare()


def test_dtype_applies_to_floating_point_arrays_only() -> None:
    with jax.enable_x64(True):
        state = DistributedDataParallel(layers.BatchNorm(2), optim.adam(), dtype="float64", replicas=first(2)).init()
        dtypes = {name: value.dtype for name, value in {**state.params, **state.buffers}.items()}
    assert dtypes.pop("num_batches_tracked") == "int32"
    assert set(dtypes.values()) == {np.dtype("float64")}


def test_elements_of_weight_0_do_not_count() -> None:
    def last_out(model: Line, batch: Any) -> Losses:
        return Losses(squared_error(model, batch), jnp.array([1, 1, 0]), {"x": batch["x"]})

    ddp = DistributedDataParallel(Line(), optim.sgd(LR), last_out, replicas=first(2))
    _, sums = one_step(ddp, ddp.init())
    x, y = (data()[name][..., :2] for name in "xy")
    expected = {"count": 4, "loss": ((2 * x - 1 - y) ** 2).sum(), "x": x.sum()}
    assert {name: float(value[0]) for name, value in sums.items()} == pytest.approx(expected, rel=TOLERANCE)


# ---- invalid losses and batches


def test_losses_without_an_example_axis_are_refused() -> None:
    ddp = DistributedDataParallel(Line(), optim.sgd(LR), lambda model, batch: Losses(jnp.float32(1)), replicas=first(2))
    with pytest.raises(ValueError, match=r"^the loss function must return one loss per example, shape \(B, \.\.\.\)"):
        one_step(ddp, ddp.init())


def test_a_mean_is_a_loss_unless_there_is_padding_to_leave_out() -> None:
    mean = DistributedDataParallel(
        Line(), optim.sgd(LR), lambda *given: squared_error(*given).mean(), replicas=first(2)
    )
    (one, _), (other, _) = (one_step(ddp, ddp.init()) for ddp in (mean, trainer()))
    for name in one.params:  # 1e-6 of the parameters; measured: 0
        np.testing.assert_allclose(one.params[name], other.params[name], rtol=1e-6)
    padded = {**data(), "valid": np.ones_like(data()["y"])}
    with pytest.raises(InputError, match=r"^the loss is a mean over a batch, from which padding cannot be left out"):
        mean.steps(mean.init(), MicroBatches(None, padded))


def test_a_batch_for_other_replicas_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a batch of shape \(2, 1, 3\) cannot be sharded over 4 replicas"):
        first(4).shard(data())
    with pytest.raises(ValueError, match=r"a batch of shape \(1, 1, 3\) cannot be sharded over 2 replicas"):
        trainer().steps(trainer().init(), MicroBatches(None, {name: x[:1] for name, x in data().items()}))


# ---- several steps in one dispatch


class Normalized(nnx.Module):
    """A linear layer and a BatchNorm."""

    def __init__(self) -> None:
        self.fc = layers.Linear(2, 3, generator=Generator(0))
        self.bn = layers.BatchNorm(3)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.bn(self.fc(x))


@functools.cache
def trained(steps_per_dispatch: int) -> tuple[Arrays, list[float], list[int]]:
    """Return state and losses of two epochs of 7 full steps and a smaller one, and the traces until each one's end."""
    data = {"x": np.random.default_rng(0).normal(size=(59, 2)).astype("float32")}
    loss_fn = lambda model, batch: (model(batch["x"]) - 1) ** 2  # noqa: E731
    options = {"global_batch_size": 8, "steps_per_dispatch": steps_per_dispatch}
    ddp, state, losses, traced = two_epochs(Normalized(), loss_fn, optim.sgd(LR, momentum=0.9), data, **options)
    ddp.verify(state)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}, losses, traced


@pytest.mark.one_in(2)
@pytest.mark.parametrize("steps_per_dispatch", [3, 7])
def test_steps_per_dispatch_changes_no_bit(steps_per_dispatch: int) -> None:
    one, several = trained(1), trained(steps_per_dispatch)
    assert len(one[1]) == 16
    assert one[1] == several[1]
    for name, value in one[0].items():
        np.testing.assert_array_equal(several[0][name], value, name)


@pytest.mark.parametrize(("steps_per_dispatch", "shapes"), [(1, 2), (3, 3), (7, 2)])
def test_each_shape_is_traced_once(steps_per_dispatch: int, shapes: int) -> None:
    _, _, (after_one, after_two) = trained(steps_per_dispatch)
    assert after_one == after_two == shapes


# ---- invalid options and states


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ema_decay": 1.5}, r"^ema_decay 1.5: must be 0 to 1"),
        ({"shard_optimizer": True, "find_unused_parameters": True}, r"^shard_optimizer: cannot be combined with"),
        (
            {"shard_optimizer": True, "gradient_hooks": (GradientHook("*", lambda name, gradient: None),)},
            r"^shard_optimizer: replicas hold slices of the mean",
        ),
        ({"keep_buffers": "rank1"}, r"^keep_buffers rank1: unknown; did you mean rank0\?"),
        ({"loss_normalization": "globl"}, r"^loss_normalization globl: unknown; did you mean global\?"),
        ({"clip_grad_norm": -1.0}, r"^clip_grad_norm -1.0: must be above 0$"),
        ({"dtype": "float64"}, r"^dtype float64: needs jax's 64-bit mode"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DistributedDataParallel(Line(), optim.sgd(LR), squared_error, replicas=first(2), **options)


@pytest.mark.parametrize("use", ["steps", "evaluate", "verify"])
def test_a_donated_state_is_refused(use: str) -> None:
    ddp, arrays = trainer(), {name: x[0, 0] for name, x in data().items()}
    start = ddp.init()
    one_step(ddp, start)
    uses = {"steps": lambda: one_step(ddp, start), "evaluate": lambda: ddp.evaluate(start, arrays)}
    with pytest.raises(ValueError, match=r"^this state was used up by an earlier `steps`"):
        uses.get(use, lambda: ddp.verify(start))()


def test_a_buffer_may_be_boolean() -> None:
    class Flagged(Line):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nnx.Variable(jnp.array(False))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.seen[...] = jnp.array(True)
            return super().__call__(x)

    ddp = DistributedDataParallel(Flagged(), optim.sgd(LR), squared_error, replicas=first(2))
    state, _ = one_step(ddp, ddp.init())
    assert state.buffers["seen"].dtype == bool and bool(state.buffers["seen"])


def test_averaged_needs_a_moving_average() -> None:
    ddp = trainer()
    with pytest.raises(InputError, match="no moving average is kept"):
        ddp.averaged(ddp.init())


def test_the_first_state_takes_as_few_programs_for_many_shapes_as_for_few() -> None:
    """The optimizer's zeros by themselves take one program per shape: 3 and 7."""

    def programs(hidden_sizes: tuple[int, ...]) -> int:
        model = MLP(4, hidden_sizes, 3, generator=Generator(0))
        ddp = DistributedDataParallel(model, optim.adam(), replicas=first(2))
        compilations = Compilations()
        ddp.init()
        return compilations.count

    programs((11,))  # the first call traces what every later one reuses
    assert programs((13,)) == programs((17, 19, 23)) == 1
