"""Ports with a `torch_step`: right ones are equal, and what is wrong is named, or located."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxddp.parity.cases import PortCase
from jaxddp.parity.checking import check
from jaxddp.parity.port import PortFile
from jaxddp.parity.report.report import Report
from jaxddp.parity.report.sentences import sentences
from jaxddp.parity.torch_side.pool import TorchPool
from jaxddp.parity.workers import Workers
from tests.support import small_port
from tests.support.small_port import Change
from tests.support.small_step import MODULES, TREES, write
from tests.support.step_ports import NAMES, STEP_PORT
from tests.support.trajectories import drawn

WORLD_SIZE, STEPS = 2, 3
Checked = Callable[..., Report]

JITTED = ("def jax_step(model", "from flax import nnx\n@nnx.jit\ndef jax_step(model")
SCHEDULED = [
    ("    return {\n", "    made = {\n"),
    (
        "momentum=0.9),\n    }\n\n",
        "momentum=0.9),\n    }\n"
        '    return made | {"schedule": torch.optim.lr_scheduler.StepLR(made["critic"], 1, gamma=0.5)}\n\n',
    ),
    ('optimizers["critic"].step()\n', 'optimizers["critic"].step()\n    optimizers["schedule"].step()\n'),
    ("optax.sgd(0.1, momentum=0.9)", "optax.sgd(lambda step: 0.1 * 0.5**step, momentum=0.9)"),
]
# Tensors of which the records hold excerpts.
LARGE = [
    ("nn.Linear(5, 8), nn.Linear(8, 1)", "nn.Linear(5, 30000), nn.Linear(30000, 1)"),
    ("nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 1,", "nnx.Linear(5, 30000, rngs=rngs), nnx.Linear(30000, 1,"),
]
MEAN = 'change(jax.lax.pmean(gradients, "replica"))'
# Of the critic alone: the actor's gradients are clipped behind it.
SUMMED = (MEAN, f'{MEAN} if name == "actor" else jax.lax.psum(gradients, "replica")')
APART = (MEAN, f'{MEAN} if name == "actor" else gradients')
RETURNS = '    return {"actor": actor, "critic": critic}\n\n'
STEPS_TWICE = '    optimizers["actor"].step()\n'
UPDATES = "        return value\n    value = model"
MEAN_OF_LOSSES = (UPDATES, UPDATES.replace("return value", 'return jax.lax.pmean(value, "replica")'))


@pytest.fixture
def checked(tmp_path: Path, workers: Workers) -> Checked:
    def run(*changes: Change, form: str = MODULES, numerics: bool = False, quick: bool = True) -> Report:
        port = write(tmp_path, *changes, form=form)
        return check(port, world_size=WORLD_SIZE, steps=STEPS, workers=workers, numerics=numerics, quick=quick)

    return run


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", [MODULES, TREES], ids=["modules", "trees"])
def test_a_right_port_is_equal_at_every_stage(form: str, checked: Checked) -> None:
    report = checked(form=form, numerics=True)
    assert report.verdict == "equal", report
    assert report.stages.keys() == {"samples", "local_loss", "gradients", "update", "optimizer_state"}
    assert report.stages["local_loss"].tensors.keys() == {"actor", "critic"}
    assert report.stages["update"].tensors.keys() >= {"critic_target.fc1.weight", "actor.fc1.weight"}
    assert {name.partition(":")[0] for name in report.stages["optimizer_state"].tensors} == {"exp_avg", "exp_avg_sq"}
    for stage, result in report.stages.items():
        assert max(result.residuals) <= result.allowed, stage  # measured: up to 2e-15 where 1e-12 is allowed
    assert max(report.free_running["params"].residuals) < 1e-12  # measured: 4e-15
    assert report.numerics.keys() >= {"local_loss", "gradients", "update"}


@pytest.mark.large
@pytest.mark.parametrize("changes", [[JITTED], SCHEDULED, LARGE], ids=["jitted", "scheduled", "large"])
def test_other_right_ports_are_equal_too(changes: list[Change], checked: Checked) -> None:
    assert checked(*changes, quick=False).verdict == "equal"


NOISY = [
    ("        return torch.tanh(self.fc2(F.gelu", "        return torch.tanh(self.fc2(F.dropout(F.gelu"),
    ("(self.fc1(x))))\n\nclass Critic(nn.Module)", "(self.fc1(x)), 0.25)))\n\nclass Critic(nn.Module)"),
    (
        "jnp.tanh(self.fc2(nnx.gelu(self.fc1(x), approximate=False)))",
        "jnp.tanh(self.fc2(nnx.Dropout(0.25, rngs=nnx.Rngs(0))(nnx.gelu(self.fc1(x), approximate=False))))",
    ),
]


@pytest.mark.large
def test_both_steps_draw_the_same_numbers(checked: Checked) -> None:
    report = checked(*NOISY, JITTED)
    assert report.verdict == "equal", report
    report = checked(*NOISY, ("nnx.Dropout(0.25", "nnx.Dropout(0.5"))
    assert {one.cause and one.cause.names for one in report.differences} == {("dropout_rate",)}, report


# Sharpness-aware: the first pass of the critic is each replica's own.
OWN_FIRST = [
    ("    critic = F.mse_loss(", "    with torch.no_grad():\n        critic = F.mse_loss("),
    (
        '    optimizers["critic"].zero_grad()\n    critic.backward()\n',
        '    weights = [*model["critic"].parameters()]\n'
        '    optimizers["critic"].zero_grad()\n'
        '    with model["critic"].no_sync():\n'
        "        F.mse_loss(model['critic'](batch['x'], batch['action']), batch['reward']).backward()\n"
        "    shift = [0.05 * w.grad for w in weights]\n"
        "    torch._foreach_add_([w.data for w in weights], shift)\n"
        '    optimizers["critic"].zero_grad()\n'
        "    F.mse_loss(model['critic'].module(batch['x'], batch['action']), batch['reward']).backward()\n"
        "    torch._foreach_sub_([w.data for w in weights], shift)\n",
    ),
    (
        '    critic = update("critic", lambda critic: ((critic(batch["x"], batch["action"]) - wanted) ** 2).mean())\n',
        '    loss = lambda critic: ((critic(batch["x"], batch["action"]) - batch["reward"]) ** 2).mean()\n'
        "    before = jax.tree.map(jax.numpy.copy, nnx.state(model['critic']))\n"
        "    shift = FIRST(nnx.grad(loss)(model['critic']))\n"
        "    nnx.update(model['critic'], jax.tree.map(lambda w, g: w + 0.05 * g, before, shift))\n"
        "    gradients = nnx.grad(loss)(model['critic'])\n"
        "    nnx.update(model['critic'], before)\n"
        "    critic = ((model['critic'](batch['x'], batch['action']) - wanted) ** 2).mean()\n"
        "    optimizers['critic'].update(model['critic'], jax.lax.pmean(gradients, 'replica'))\n",
    ),
]


@pytest.mark.one_in(2, first=1)
@pytest.mark.parametrize(
    ("first", "verdict"),
    [("lambda gradients: gradients", "equal"), ("lambda gradients: jax.lax.pmean(gradients, 'replica')", "different")],
    ids=["own", "averaged"],
)
def test_gradients_of_a_pass_within_no_sync_are_each_replicas_own(first: str, verdict: str, checked: Checked) -> None:
    report = checked(*OWN_FIRST, ("FIRST", f"({first})"))
    assert report.verdict == verdict, report
    assert {one.stage for one in report.differences} == ({"gradients"} if verdict == "different" else set())


# Fault of one of two optimizers -> how the lines begin that make it, in jax and in torch.
OPTIMIZERS = {
    "eps_value": ('"actor": optax.adam(1e-2, eps=1e-6)', '"actor": torch.optim.Adam('),
    "nesterov": ("jax_optimizer = {", '"critic": torch.optim.SGD('),
    "lr_scaled": ('"critic": optax.sgd(0.05, momentum=0.9)', '"critic": torch.optim.SGD('),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("form", "changes", "stage", "tensor", "names"),
    [
        (MODULES, [("approximate=False", "approximate=True")], "local_loss", "actor", ("gelu_approximation",)),
        (MODULES, [("wanted) ** 2).mean()", "wanted) ** 2).mean() / 2")], "local_loss", "critic", ("loss_scale",)),
        (TREES, [SUMMED], "gradients", "critic.fc2.weight", ("sum_not_mean",)),
        (MODULES, [APART], "gradients", "critic.fc2.weight", ("no_sync",)),
        (MODULES, [("optax.adam(1e-2)", "optax.adam(1e-2, eps=1e-6)")], "update", "actor.fc1.weight", ("eps_value",)),
        (TREES, [("momentum=0.9)}", "momentum=0.9, nesterov=True)}")], "update", "critic.fc2.weight", ("nesterov",)),
        (MODULES, [("optax.sgd(0.1, momentum", "optax.sgd(0.05, momentum")], "update", "critic", ("lr_scaled",)),
        (MODULES, [("RATE = 0.1", "RATE = 0.02")], "update", "critic_target.fc1.weight", ("number",)),
    ],
    ids=["model", "loss", "sum", "no mean", "eps", "nesterov", "rate", "rate of an average"],
)
def test_a_fault_is_named(
    form: str, changes: list[Change], stage: str, tensor: str, names: tuple[str, ...], checked: Checked
) -> None:
    report = checked(*changes, form=form)
    (first, *others) = report.differences
    assert (first.stage, first.step, first.cause and first.cause.names) == (stage, 1, names), report
    assert first.tensor.partition(".")[0] == tensor.partition(".")[0]
    assert all(other.stage == stage and other.cause and other.cause.names == names for other in others), report
    if names[0] in OPTIMIZERS:
        assert first.cause is not None and first.cause.jax is not None and first.cause.torch is not None
        quoted = [quote.text[quote.line - quote.first].strip() for quote in (first.cause.jax, first.cause.torch)]
        assert all(map(str.startswith, quoted, OPTIMIZERS[names[0]])), quoted


ONLINE = 'model["critic"](batch["next"], model["actor_target"](batch["next"]))\n    critic = F'
# The critic is its own target, whose gradient torch stops.
BOOTSTRAPPED = [
    ('model["critic_target"](batch["next"], model["actor_target"](batch["next"]))\n    critic = F', ONLINE),
    ("- wanted) ** 2", '- batch["reward"] - 0.9 * critic(batch["next"], model["actor_target"](batch["next"]))) ** 2'),
]
STOPPED = (
    "            return self.fc2(nnx.gelu(self.fc1(jnp.concatenate([x, action], -1)), approximate=False))[:, 0]",
    "            import jax\n"
    "            x = jax.lax.stop_gradient(nnx.gelu(self.fc1(jnp.concatenate([x, action], -1)), approximate=False))\n"
    "            return self.fc2(x)[:, 0]",
)


@pytest.mark.large
@pytest.mark.parametrize(
    ("changes", "name", "jax_line", "torch_line"),
    [
        (BOOTSTRAPPED, "gradient_not_stopped", '- 0.9 * critic(batch["next"]', "+ 0.9 * value)"),
        ([STOPPED], "gradient_stopped", "jax.lax.stop_gradient(", "return self.fc2(F.gelu("),
    ],
    ids=["not stopped", "stopped"],
)
def test_gradients_of_equal_losses_are_explained(
    changes: list[Change], name: str, jax_line: str, torch_line: str, checked: Checked
) -> None:
    first = checked(*changes).differences[0]
    assert (first.stage, first.step, first.cause and first.cause.names) == ("gradients", 1, (name,)), first
    assert first.cause is not None and first.cause.residual < 1e-12  # measured: 3e-16
    for quote, text in ((first.cause.jax, jax_line), (first.cause.torch, torch_line)):
        assert quote is not None and text in quote.text[quote.line - quote.first]


@pytest.mark.large
def test_clipping_in_the_chain_of_a_step_is_explained(tmp_path: Path, workers: Workers) -> None:
    step = "    optimizer.step()\n"
    clips = f"    nn.utils.clip_grad_norm_(nets['online'].parameters(), 0.05)\n{step}"
    chain = ("optax.adam(LR)", "optax.chain(optax.clip(0.01), optax.sgd(LR))")
    changes = (step, clips), ("torch.optim.Adam(", "torch.optim.SGD("), chain
    more = f"{NAMES}torch_clip_grad_norm = 0.05\n"
    port = small_port.write(tmp_path, *changes, more=more, text=STEP_PORT)
    report = check(port, world_size=WORLD_SIZE, steps=STEPS, workers=workers, numerics=False)
    assert [one.cause and one.cause.names for one in report.differences] == [("clip_by_value",)], report


@pytest.mark.large
def test_an_update_by_a_gradient_that_only_the_port_computes_is_no_equal_step(checked: Checked) -> None:
    report = checked(("    actor.backward()\n", ""))
    assert report.stages["update"].residuals[0] > 0.1
    (found, *_) = report.differences
    assert (found.stage, found.step, found.tensor.partition(".")[0]) == ("update", 1, "actor"), report
    assert found.detail == "torch's optimizer makes no update in this step"


def test_a_loss_that_is_the_mean_over_the_replicas_is_said(checked: Checked) -> None:
    difference = checked(MEAN_OF_LOSSES).differences[0]
    assert (difference.stage, difference.cause) == ("local_loss", None) and difference.tensor.startswith("actor")
    assert "it is the mean over the replicas; return each replica's own loss" in difference.detail


def test_what_has_no_name_is_said_as_code(checked: Checked) -> None:
    difference = checked(("    wanted = batch", "    wanted = 1e-3 + batch")).differences[0]
    assert difference.stage == "local_loss" and difference.tensor.startswith("critic")
    assert difference.cause is not None
    assert sentences(difference.cause) == ("added: 0.001 + reward instead of reward, in add",)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("changes", "form", "message"),
    [
        ([(RETURNS, "    return actor\n\n")], MODULES, "returns the losses actor, critic; must be torch_step's, loss"),
        ([(STEPS_TWICE, 2 * STEPS_TWICE)], MODULES, "torch_step: updates actor.fc1.bias twice"),
        (
            [(UPDATES, f"        optimizers[name].update(model[name], gradients)\n{UPDATES}")],
            MODULES,
            "jax_step: updates actor.fc1.bias twice",
        ),
        ([("opt_state=opt_state)", "opt_state={})")], TREES, "must return an opt_state like the one it is given"),
        (
            [('jax_optimizer = {"actor"', 'jax_optimizer = {"policy"')],
            TREES,
            "jax_optimizer: policy: must be a branch of what jax_model returns",
        ),
        (
            [("def configure_optimizers", "clip_grad_norm = 0.1\ndef configure_optimizers")],
            MODULES,
            "clip_grad_norm: must not be given with torch_step",
        ),
        (
            [("def configure_optimizers", "def others")],
            MODULES,
            "has no configure_optimizers",
        ),
        (
            [("    with torch.no_grad():\n        value", "    F.dropout(batch['x'])\n    if True:\n        value")],
            MODULES,
            "torch draws a bernoulli (6, 3), jax none",
        ),
        (
            [("    critic.backward()", "    with model['critic'].join(): critic.backward()")],
            MODULES,
            "torch_step: calls join of DistributedDataParallel; must call no others than module, no_sync, ",
        ),
    ],
    ids=["losses", "torch twice", "jax twice", "state", "branch", "clipping", "optimizers", "draws", "ddp"],
)
def test_what_cannot_be_checked_is_told(changes: list[Change], form: str, message: str, checked: Checked) -> None:
    report = checked(*changes, form=form)
    assert report.verdict == "incomplete"
    assert any(message in str(problem) for problem in report.problems), report


AS_STEP = """
def configure_optimizers(model): return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def torch_step(model, optimizer, batch):
    optimizer.zero_grad()
    halves = [{name: x[part] for name, x in batch.items()} for part in (slice(0, 4), slice(4, 12))]
    for half in halves:
        loss = F.cross_entropy(model(half["x"]), half["y"], reduction="sum") / 12
        loss.backward()
    optimizer.step()
    return loss
jax_optimizer = {}
def jax_step(optimizers, state, batch): ...
"""


def test_gradients_are_averaged_as_ddp_averages_them(tmp_path: Path) -> None:
    # The same step through DDP, and by two backward passes of unequal size without it.
    ddp = small_port.write(
        tmp_path, small_port.own_optimizers("SGD(parameters, lr=0.1, momentum=0.9)", "optax.sgd(0.1, momentum=0.9)")
    )
    (tmp_path / "step").mkdir()
    text = ddp.read_text().replace("def torch_loss", "def _torch_loss").replace("def jax_loss", "def _jax_loss")
    text = text.replace("def torch_optimizer", "def _torch_optimizer")
    (step := tmp_path / "step" / "port.py").write_text(text + AS_STEP)
    cases = [PortCase(PortFile(str(path)), WORLD_SIZE, STEPS) for path in (ddp, step)]
    with TorchPool(WORLD_SIZE) as pool:
        of_ddp, of_step = (pool.run(case, drawn(case)) for case in cases)
    for one, other in zip(of_ddp.records, of_step.records, strict=True):
        for stage in ("gradients", "params"):
            for name, value in one[stage].items():
                np.testing.assert_allclose(other[stage][name], value, rtol=0, atol=1e-15)  # measured: 6e-17
    one, other = (run.records[0]["gradients"]["fc2.bias"] for run in (of_ddp, of_step))
    assert np.abs(WORLD_SIZE * one - other).max() > 1e-3  # a sum would be seen
