"""Frozen and unused parameters: their names, their state, and the program of a step with them."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx
from jax import numpy as jnp

from jaxddp import cli, optim
from jaxddp.comm_hooks import CommHook
from jaxddp.config import TrainConfig
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.collectives import all_reduce_mean
from jaxddp.errors import InputError
from jaxddp.nn.torch_weights import load_weights
from jaxddp.step import local_gradients
from jaxddp.train import main
from tests.support.step_cases import Net, dealt, first


class Partly(nnx.Module):
    """A net that learns, a net that is never called, and a net behind `stop_gradient`."""

    def __init__(self) -> None:
        self.net, self.unused, self.stopped = (Net() for _ in range(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.net(x) + jax.lax.stop_gradient(self.stopped(x))


LAYERS = ("fc1.bias", "fc1.kernel", "fc2.bias", "fc2.kernel")
NEVER = {f"{net}.{name}" for net in ("unused", "stopped") for name in LAYERS}


def trainer(model: nnx.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, optim.adamw(0.1), replicas=first(2), dtype="float32", **options)


def batches(ddp: DistributedDataParallel) -> MicroBatches:
    return ddp.replicas.shard(
        jax.tree.map(lambda x: x.astype("float32") if x.dtype == "float64" else x, dealt(2, 1, (2, 2)))
    )


def test_frozen_and_unused_parameters_are_named() -> None:
    ddp = trainer(Partly(), frozen=("net.fc1.*",), find_unused_parameters=True)
    state = ddp.init()
    assert ddp.frozen_parameters == ("net.fc1.kernel", "net.fc1.bias")
    assert set(ddp.unused_parameters(state, batches(ddp).last)) == NEVER
    assert trainer(Net()).unused_parameters(trainer(Net()).init(), batches(ddp).last) == ()


def test_unused_parameters_keep_their_state_and_a_comm_hook_sees_zeros() -> None:
    seen = {}

    def reduce(gradients: Any, state: Any) -> Any:
        seen.update(jax.tree.map(jnp.shape, gradients))
        return all_reduce_mean(gradients), jax.tree.map(jnp.add, state, gradients)

    hook = CommHook(lambda params: jax.tree.map(jnp.zeros_like, params), reduce)
    ddp = trainer(Partly(), find_unused_parameters=True, comm_hook=hook)
    start = jax.device_get(ddp.init())
    state, _ = ddp.steps(ddp.init(), batches(ddp))
    after = jax.device_get(state)
    assert seen.keys() == start.params.keys() == after.comm_state.keys()
    for name, value in start.params.items():
        moved = not (value == after.params[name]).all()
        moments = after.opt_state[0].mu[name].any()
        summed = after.comm_state[name].any()
        assert moved == moments == summed == (name not in NEVER), name


def test_the_optimizer_holds_no_state_of_frozen_parameters() -> None:
    ddp = trainer(Net(), frozen=("fc1.*",))
    state = ddp.init()
    assert state.opt_state[0].mu.keys() == {"fc2.bias", "fc2.kernel"} and state.params.keys() == set(LAYERS)
    after, _ = ddp.steps(state, batches(ddp))
    assert after.opt_state[0].mu.keys() == {"fc2.bias", "fc2.kernel"} and after.params.keys() == set(LAYERS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "jax_loss: does not depend on stopped.fc1.bias, stopped.fc1.kernel, stopped.fc2.bias, ...; freeze these"),
        ({"frozen": ("unused.*",)}, "jax_loss: does not depend on stopped.fc1.bias, .*find_unused_parameters=True"),
    ],
)
def test_parameters_that_the_loss_does_not_depend_on_are_refused(options: dict[str, Any], message: str) -> None:
    ddp = trainer(Partly(), **options)
    for call in (ddp.check, ddp.steps):
        with pytest.raises(InputError, match=message):
            call(ddp.init(), batches(ddp))


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (("fc3.*",), r"frozen fc3.\*: matches no parameter; did you mean fc[12].\w+\? \(parameters: fc1.bias, "),
        (("fc1.*", "fc2.*"), r"frozen fc1.\* fc2.\*: leaves no parameter to train"),
    ],
)
def test_patterns_that_match_nothing_or_everything_are_refused(frozen: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        trainer(Net(), frozen=frozen)


@pytest.mark.large
def test_finding_unused_parameters_does_not_change_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> str:
        ddp = trainer(Net())
        text = ddp.compiled_text(ddp.init(), batches(ddp))
        return re.sub(r"metadata={.*?}|stack_frame_id=\d+", "", text[text.index("\n\n%") :])

    expected = program()
    monkeypatch.setattr(local_gradients, "noted", lambda params, reached: reached.update(params) or params)
    assert program() == expected


@pytest.mark.large
def test_a_run_resumes_only_with_the_same_frozen_parameters(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    common = {"dataset": "linear", "num_examples": 64, "devices": 2, "platform": "cpu", "hidden_sizes": (8,)}
    main(TrainConfig(epochs=1, freeze=("layers.0.*",), output=folder, **common))
    first_weights = load_weights(f"{folder}/model.safetensors")
    argv = ["--resume", folder, "--epochs", "2"]
    main(cli.parse(TrainConfig, argv, "prog"))
    weights = load_weights(f"{folder}/model.safetensors")
    same = {name for name in weights if (weights[name] == first_weights[name]).all()}
    assert same == {"layers.0.weight", "layers.0.bias"}
    with pytest.raises(InputError, match=r"--freeze \*.bias: the run in .* must continue with --freeze layers.0.\*"):
        cli.parse(TrainConfig, [*argv, "--freeze", "*.bias"], "prog")
