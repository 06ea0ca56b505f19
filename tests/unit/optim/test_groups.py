"""optim.grouped beside torch_ref's param_groups of the same patterns: rates, decays, schedule, norm, frozen parts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from jaxddp import DistributedDataParallel, optim, schedules
from jaxddp.checkpoint import Checkpoints
from jaxddp.config.choices import OPTIMIZERS
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data.torch_rng import Generator
from jaxddp.errors import InputError
from jaxddp.nn import layers
from jaxddp.nn.torch_weights import to_torch
from jaxddp.optim.groups import Grouped
from tests.support.step_cases import first
from torch_ref.optim import param_groups

TOLERANCE = 1e-12  # of a tensor's path, float64; measured: 8.0e-15 (radam)
FAULT = 1e-3  # smallest with a planted fault: 0.0069 (frozen parts in the norm)
STEPS = 100
CLIP = 0.5
# Pattern -> rate and decay; None: frozen.
GROUPS: dict[str, tuple[float, float] | None] = {
    "norm.*": None,
    "*.bias": (0.1, 0.0),
    "fc2.*": (0.03, 0.2),
    "*": (0.01, 0.1),
}
FACTOR = 0.97


class Net(nnx.Module):
    def __init__(self) -> None:
        generator = Generator(0)
        self.fc1 = layers.Linear(4, 5, generator=generator)
        self.norm = nnx.LayerNorm(5, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.fc2 = layers.Linear(5, 2, generator=generator)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(jnp.tanh(self.norm(self.fc1(x))))


class TorchNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = torch.nn.Linear(4, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.norm(self.fc1(x))))


def squared(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)


def batches() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(2, STEPS, 3, 4)), "y": 3 * rng.normal(size=(2, STEPS, 3, 2))}


def grouped(name: str, groups: Any = GROUPS, factor: float = FACTOR) -> Grouped:
    def one(rate: float, decay: float) -> optax.GradientTransformation:
        options = {} if name == "rprop" else {"weight_decay": decay}
        return getattr(optim, name)(schedules.exponential(rate, factor), **options)

    return optim.grouped({pattern: group and one(*group) for pattern, group in groups.items()})


def params_of_jax(optimizer: optax.GradientTransformation, **options: Any) -> dict[str, np.ndarray]:
    ddp = DistributedDataParallel(
        Net(), optimizer, squared, dtype="float64", replicas=first(2), clip_grad_norm=CLIP, **options
    )
    state, _ = ddp.steps(ddp.init(), ddp.replicas.shard(MicroBatches(None, batches())))
    return to_torch(ddp.values(state)[0])


CLASSES = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim)}


def params_of_torch(name: str) -> dict[str, np.ndarray]:
    model = TorchNet().double()
    start = to_torch(
        DistributedDataParallel(Net(), optim.sgd(), squared, dtype="float64", replicas=first(2)).init().params
    )
    model.load_state_dict({key: torch.tensor(np.asarray(value, np.float64)) for key, value in start.items()})
    options = {p: g and {"lr": g[0], "weight_decay": g[1]} for p, g in GROUPS.items()}
    if name == "rprop":
        options = {p: o and {"lr": o["lr"]} for p, o in options.items()}
    optimizer = CLASSES[name](param_groups(model, options))
    scheduler = LambdaLR(optimizer, lambda step: FACTOR**step)
    data = {key: torch.tensor(value) for key, value in batches().items()}
    for step in range(STEPS):
        optimizer.zero_grad()
        squared(model, {key: value[:, step].flatten(0, 1) for key, value in data.items()}).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
    return {key: value.detach().numpy() for key, value in model.state_dict().items()}


def deviation(ours: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> float:
    start = to_torch(
        DistributedDataParallel(Net(), optim.sgd(), squared, dtype="float64", replicas=first(2)).init().params
    )
    moved = max(np.abs(truth[name] - start[name]).max() for name in truth)
    return max(float(np.abs(ours[name] - truth[name]).max() / moved) for name in truth)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_equal_torchs(name: str, sharded: bool, x64: None) -> None:
    truth = params_of_torch(name)
    ours = params_of_jax(grouped(name), shard_optimizer=sharded)
    assert deviation(ours, truth) <= TOLERANCE
    assert not ours["norm.bias"].any()


FAULTS: dict[str, Callable[[], dict[str, np.ndarray]]] = {
    "last match wins": lambda: params_of_jax(
        grouped("sgd", {k: GROUPS[k] for k in ("norm.*", "fc2.*", "*.bias", "*")})
    ),
    "one rate for all": lambda: params_of_jax(grouped("sgd", {"norm.*": None, "*": (0.03, 0.1)})),
    "nothing frozen": lambda: params_of_jax(grouped("sgd", {"norm.*": (0.01, 0.0), **dict(list(GROUPS.items())[1:])})),
    "slices without groups": lambda: params_of_jax(
        grouped("sgd").having(group_of=lambda name: 0), shard_optimizer=True
    ),
    "no schedule": lambda: params_of_jax(grouped("sgd", factor=1.0)),
    "frozen parts in the norm": lambda: params_of_jax(optax.chain(grouped("sgd"))),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_catches(fault: str, x64: None) -> None:
    assert deviation(FAULTS[fault](), params_of_torch("sgd")) > FAULT


@pytest.mark.parametrize("sharded", [False, True])
def test_a_plateau_lowers_the_rates_of_all_groups_as_torchs(sharded: bool, x64: None, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1).double()
    reference = torch.optim.SGD(param_groups(model, {"bias": None, "weight": {"lr": 0.1}}), momentum=0.5)
    scheduler = ReduceLROnPlateau(reference, patience=0, factor=0.5)
    optimizer = optim.reduce_on_plateau(
        lambda rate, other: optim.grouped({"bias": None, "weight": optim.sgd(rate, 0.5)}),
        (0.1, 1.0),
        patience=0,
        factor=0.5,
    )
    generator = Generator(0)
    ddp = DistributedDataParallel(
        layers.Linear(2, 1, generator=generator),
        optimizer,
        squared,
        dtype="float64",
        replicas=first(2),
        shard_optimizer=sharded,
    )
    assert ddp.frozen_parameters == ("bias",)
    state = ddp.init()
    model.load_state_dict({k: torch.tensor(np.array(v, np.float64)) for k, v in to_torch(ddp.values(state)[0]).items()})
    data = {"x": np.ones((2, 1, 1, 2)), "y": np.zeros((2, 1, 1, 1))}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.create()
    for metric in (3.0, 3.0, 2.0, 2.0):
        state, _ = ddp.steps(state, ddp.replicas.shard(MicroBatches(None, data)))
        state = ddp.observed(state, metric)
        checkpoints.save(ddp.unsharded(state))
        checkpoints.wait()
        state = ddp.place_state(checkpoints.restore(ddp.unsharded(ddp.init())))
        reference.zero_grad()
        squared(model, {"x": torch.ones(1, 2, dtype=torch.float64), "y": torch.zeros(1, 1)}).mean().backward()
        reference.step()
        scheduler.step(metric)
    assert ddp.rates(state) == (0.025, 0.25)
    ours = to_torch(ddp.values(state)[0])
    assert np.abs(ours["weight"] - model.weight.detach().numpy()).max() <= TOLERANCE


@pytest.mark.parametrize(
    "params",
    [
        {"fc": {"kernel": jnp.ones(2), "value": jnp.ones(3)}},
        nnx.from_flat_state([(("fc", "kernel"), nnx.Param(jnp.ones(2))), (("fc", "value"), nnx.Param(jnp.ones(3)))]),
        {"fc.kernel": jnp.ones(2), "fc.value": jnp.ones(3)},
        {"net/~/fc": {"kernel": jnp.ones(2), "value": jnp.ones(3)}},
    ],
    ids=["tree", "nnx", "flat", "haiku"],
)
def test_patterns_see_the_paths_of_any_tree(params: Any) -> None:
    optimizer = optim.grouped({"*fc.weight": optim.sgd(0.5), "*fc.value": None})
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert [float(x.mean()) for x in jax.tree.leaves(updates)] == [-0.5, 0.0]
    by_path = optim.grouped({"*.kernel": optim.sgd(0.5), "*": None}, names=str)
    updates, _ = by_path.update(params, by_path.init(params), params)
    assert [float(x.mean()) for x in jax.tree.leaves(updates)] == [-0.5, 0.0]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["fc1.weigth", "*"], r"^{} fc1.weigth: matches no parameter; did you mean fc1.weight\?"),
        (["*", "*.bias"], r"^{} \*.bias: matches only parameters of patterns before it$"),
        (["fc?.*"], r"^{}: no pattern matches norm.\w+; add '\*' as the last$"),
    ],
)
def test_patterns_without_parameters_and_parameters_without_a_pattern_are_refused(
    patterns: list[str], message: str
) -> None:
    for last in (optim.sgd(), None):
        groups = {**dict.fromkeys(patterns, optim.sgd()), patterns[0]: last}
        with pytest.raises(InputError, match=message.format("grouped")):
            DistributedDataParallel(Net(), optim.grouped(groups), squared, replicas=first(2))
    with pytest.raises(InputError, match=message.format("grouped")):
        optim.grouped(dict.fromkeys(patterns, optim.sgd())).init(nnx.state(Net(), nnx.Param))
    with pytest.raises(InputError, match=message.format("param_groups")):
        param_groups(TorchNet(), {pattern: {} for pattern in patterns})


def test_groups_need_no_parameter_that_is_frozen_elsewhere() -> None:
    optimizer = optim.grouped({"*.bias": None, "fc2.*": optim.sgd(1.0), "*": optim.sgd(0.1)})
    ddp = DistributedDataParallel(Net(), optimizer, squared, replicas=first(2), frozen=("fc2.*",))
    assert set(ddp.frozen_parameters) == {"fc1.bias", "norm.bias", "fc2.bias", "fc2.kernel"}
    ddp.init()
    chained = optax.chain(optim.grouped({"*.bias": optim.sgd(1.0), "*": optim.sgd(0.1)}))
    with pytest.raises(InputError, match=r"^grouped \*: matches"):  # slices have the names of the optimizer's groups
        DistributedDataParallel(Net(), chained, squared, replicas=first(2), shard_optimizer=True).init()
    with pytest.raises(InputError, match=r"^grouped: needs at least one pattern"):
        optim.grouped({})
