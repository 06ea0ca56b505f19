"""Faults that no step of a run exercises are found beyond it, and right ports have none there."""

import pytest

from jaxddp.parity.report.report import Report
from jaxddp.parity.report.sentences import alternatives
from tests.support.checks import Checked
from tests.support.small_port import Change, own_optimizers

IN_JAX = ("    from flax import nnx\n", "    from flax import nnx\n    from jax import numpy as jnp\n")
CAPPED = ("return self.fc2(nnx.tanh(self.fc1(x)))", "return jnp.minimum(self.fc2(nnx.tanh(self.fc1(x))), 3.0)")
OF_TWELVE = ('batch["y"]).mean()', 'batch["y"]).sum() / 12')
LARGE_HALVED = "__import__('jax').tree.map(lambda x: x * (1 - 0.5 * (abs(x) > {})), u)"
STEP = """
def jax_step(loss, optimizer, state, batch):
    import jax, optax
    from jaxddp.state import TrainState
    (value, buffers), local = jax.value_and_grad(loss, has_aux=True)(state.params, state.buffers, batch)
    gradients = {}
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    return TrainState(state.step + 1, optax.apply_updates(state.params, updates), buffers, opt_state), dict()
"""
PMEAN = 'jax.lax.pmean(local, "replica")'
OVER_TWO = 'jax.lax.psum(jax.tree.map(lambda g: g / 2, local), "replica")'
CLAMPED = f"jax.tree.map(lambda g: g.clip(-9, 9), {PMEAN})"


def adam_in(*members: str) -> Change:
    return own_optimizers("Adam(parameters, lr=1e-2)", f"optax.chain({', '.join(members)})")


def halved(bound: float) -> str:
    return f"optax.stateless(lambda u, _: {LARGE_HALVED.format(bound)})"


def beyond_of(report: Report) -> dict[str, str]:
    assert report.verdict == "beyond", str(report)
    return {beyond.trial.what: beyond.stage for beyond in report.beyond}


SLIGHT = (
    "return self.fc2(nnx.tanh(self.fc1(x)))",
    "y = self.fc2(nnx.tanh(self.fc1(x))); return y * (1 + 1e-10 * (y > 3))",
)
FAULTS = {
    "a cap of the logits": ([IN_JAX, CAPPED], "", "with weights 4 times as large", "local_loss"),
    "a slight factor": ([SLIGHT], "", "with weights 4 times as large", "local_loss"),
    "a count of the examples": ([OF_TWELVE], "", "with one example less", "local_loss"),
    "clipping before Adam": (
        [adam_in("optax.clip_by_global_norm(50.0)", "optax.adam(1e-2)")],
        "",
        "with gradients 1000 times as large",
        "update",
    ),
    "large updates halved": (
        [adam_in("optax.adam(1e-2)", halved(0.5))],
        "",
        "with first moments 10,000 times as large",
        "update",
    ),
    "an update skipped at NaN": (
        [own_optimizers("SGD(parameters, lr=0.1)", "optax.apply_if_finite(optax.sgd(0.1), 5)")],
        "",
        "with one NaN among the gradients",
        "update",
    ),
    "a step's own clamp": ([], STEP.format(CLAMPED), "with gradients 1000 times as large", "update"),
    "a count of the replicas": ([], STEP.format(OVER_TWO), "with 3 replicas", "update"),
}


@pytest.mark.one_in(4, first=1)
@pytest.mark.parametrize(("changes", "more", "trial", "stage"), FAULTS.values(), ids=FAULTS)
def test_a_fault_that_the_run_does_not_exercise_is_found_beyond_it(
    changes: list[Change], more: str, trial: str, stage: str, checked: Checked
) -> None:
    report = checked(*changes, more=more, quick=False)
    assert beyond_of(report)[trial] == stage
    assert report.exit_code() == 0 and report.exit_code(strict=True) == 1


def test_the_number_that_counts_examples_is_named_with_its_line(checked: Checked) -> None:
    (beyond,) = checked(OF_TWELVE, quick=False).beyond
    assert alternatives(beyond) == "12 counts the batch of this run"
    assert beyond.jax is not None and OF_TWELVE[1] in beyond.jax.itself


# Logits that are shifted together: the loss does not depend on `shift`, whose gradients are only rounding.
SHIFTED = [
    ("self.fc2 = torch.nn.Linear(5, 4)", "self.fc2 = torch.nn.Linear(5, 4); self.shift = torch.nn.Linear(3, 1)"),
    ("self.fc2(torch.tanh(self.fc1(x)))", "self.fc2(torch.tanh(self.fc1(x))) + self.shift(3 * x)"),
    (
        "self.fc2 = nnx.Linear(5, 4, rngs=rngs)",
        "self.fc2, self.shift = (nnx.Linear(*n, rngs=rngs) for n in ((5, 4), (3, 1)))",
    ),
    ("self.fc2(nnx.tanh(self.fc1(x)))", "self.fc2(nnx.tanh(self.fc1(x))) + self.shift(3 * x)"),
]
HALVING = """
def torch_scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
"""
HALVED = own_optimizers(
    "Adam(parameters, lr=1e-2, eps=1e-5)", "optax.adam(lambda count: 1e-2 * 0.5 ** (count // 2), eps=1e-5)"
)
# optax computes the first rates of a warm-up relative to its last, in float32.
WARM = """
def torch_scheduler(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, 1.0, 999)
"""
WARMED = own_optimizers(
    "AdamW(parameters, lr=1e-3)", "optax.adamw(optax.linear_schedule(1e-6, 1e-3, 999), weight_decay=1e-2)"
)
HAND = (
    "class TorchNet(",
    """class Hand(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * p.grad)

class TorchNet(""",
)
BY_HAND = 'optimizer = "sgd"\n', "import optax\ntorch_optimizer, jax_optimizer = Hand, optax.sgd(0.1)\n"
# Muon takes matrices alone.
MATRICES = [
    ("Linear(3, 5)", "Linear(3, 5, bias=False)"),
    ("Linear(5, 4)", "Linear(5, 4, bias=False)"),
    ("rngs=rngs", "use_bias=False, rngs=rngs"),
]
MUON = own_optimizers("Muon(parameters, lr=1e-2)", "jaxddp.optim.muon(1e-2)")
# A loss that loses digits where tanh is near 1, written in two ways.
DENSITY = [
    (
        'return F.cross_entropy(model(batch["x"]), batch["y"])',
        'return -torch.log(1 - torch.tanh(2 * model(batch["x"])) ** 2 + 1e-7).mean()',
    ),
    (
        'return cross_entropy(model(batch["x"]), batch["y"]).mean()',
        'from jax import numpy as jnp; t = jnp.tanh(2 * model(batch["x"])); return -jnp.log(1e-7 + (1 - t * t)).mean()',
    ),
]
RIGHT = {
    "the port as it is": ([], ""),
    "a loss that loses digits": (DENSITY, ""),
    "a step of its own": ([], STEP.format(PMEAN)),
    "clipping on both sides": ([], "clip_grad_norm = 0.05"),
    "clipping in the chain": (
        [adam_in("optax.stateless(lambda g, _: jaxddp.optim.clip_by_global_norm(g, 0.05)[0])", "optax.adam(1e-2)")],
        "torch_clip_grad_norm = 0.05",
    ),
    # Idle in the run; torch adds 1e-6 to the norm, and optax does not.
    "clipping by optax in the chain": (
        [own_optimizers("SGD(parameters, lr=0.1)", "optax.chain(optax.clip_by_global_norm(0.6), optax.sgd(0.1))")],
        "torch_clip_grad_norm = 0.6",
    ),
    "gradients of rounding in a step of its own": ([*SHIFTED, adam_in("optax.adam(1e-2)")], STEP.format(PMEAN)),
    "an optimizer of its own": ([HAND, BY_HAND], STEP.format(PMEAN)),
    "accumulation": ([], "accumulation_steps = 3"),
    "Muon": ([*MATRICES, MUON], ""),
    "RMSprop": (
        [own_optimizers("RMSprop(parameters, lr=0.01, alpha=0.9)", "jaxddp.optim.rmsprop(0.01, alpha=0.9)")],
        "",
    ),
}


@pytest.mark.one_in(9, first=1)
@pytest.mark.parametrize(("changes", "more"), RIGHT.values(), ids=RIGHT)
def test_a_right_port_is_equal_beyond_the_run(changes: list[Change], more: str, checked: Checked) -> None:
    report = checked(*changes, more=more, quick=False)
    assert report.verdict == "equal", str(report)
    assert len(report.trials) >= 12
    assert not [trial for trial in report.trials if trial.left_out]


def test_rates_are_read_beside_updates_that_are_lost_in_the_rounding_of_parameters(checked: Checked) -> None:
    report = checked(*SHIFTED, HALVED, more=HALVING + STEP.format(PMEAN))
    assert report.aspects["rates"].verdict == "equal", str(report)
    wrong = checked(*SHIFTED, HALVED, more=HALVING.replace("2, 0.5", "2, 0.4") + STEP.format(PMEAN))
    assert wrong.verdict == "different"


def test_the_rounding_of_a_warm_ups_first_rate_is_allowed_for_with_other_sizes(checked: Checked) -> None:
    """The rounding is 5e-6 of that rate, and 6e-9 of the highest."""
    report = checked(WARMED, more=WARM, quick=False)
    assert report.verdict == "equal", str(report)


def test_a_loss_that_raises_leaves_its_trial_out_and_no_other(checked: Checked) -> None:
    raises = (
        'return F.cross_entropy(model(batch["x"]',
        'assert batch["x"].sum() > 0; return F.cross_entropy(model(batch["x"]',
    )
    report = checked(raises, quick=False)
    assert report.verdict == "equal", str(report)
    left_out = {trial.what: trial.left_out for trial in report.trials if trial.left_out}
    assert [*left_out] == ["with a batch of the other sign"]
    assert "torch_loss raises AssertionError" in left_out["with a batch of the other sign"]


OF_MAXIMA = [
    ('F.cross_entropy(model(batch["x"]), batch["y"])', 'model(batch["x"]).max(-1).values.square().mean()'),
    ('cross_entropy(model(batch["x"]), batch["y"]).mean()', '(model(batch["x"]).max(-1) ** 2).mean()'),
]
NORMALIZED = [
    IN_JAX,
    ("return self.fc2(torch.tanh(self.fc1(x)))", "return self.fc2(F.normalize(self.fc1(x)))"),
    (
        "return self.fc2(nnx.tanh(self.fc1(x)))",
        "h = self.fc1(x); return self.fc2(h / jnp.linalg.norm(h, axis=-1, keepdims=True))",
    ),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("changes", "left_out"),
    [(NORMALIZED, {"with weights of 0": "the local loss is not finite in jax"}), (OF_MAXIMA, {})],
    ids=["a length of 0", "a tie"],
)
def test_with_weights_of_0_only_what_is_not_finite_counts(
    changes: list[Change], left_out: dict[str, str], checked: Checked
) -> None:
    report = checked(*changes, quick=False)
    assert report.verdict == "equal", str(report)
    assert {trial.what: trial.left_out for trial in report.trials if trial.left_out} == left_out
    assert ("with weights of 0" in {trial.what for trial in report.trials}) == bool(left_out)  # it compares no values


# Of equal logits, torch's max passes the gradient to one, and jax's to all.
DRAWN_MAXIMA = [
    ("self.fc2(torch.tanh(self.fc1(x)))", "self.fc2(F.dropout(torch.tanh(self.fc1(x)), 0.25))"),
    ("self.fc2(nnx.tanh(self.fc1(x)))", "self.fc2(nnx.Dropout(0.25, rngs=self.rngs)(nnx.tanh(self.fc1(x))))"),
    ("self.fc2 = nnx.Linear(5, 4, rngs=rngs)", "self.fc2 = nnx.Linear(5, 4, rngs=rngs); self.rngs = rngs"),
    ('F.cross_entropy(model(batch["x"]), batch["y"])', '(model(batch["x"]).max(-1).values + 1).square().mean()'),
    ('cross_entropy(model(batch["x"]), batch["y"]).mean()', '((model(batch["x"]).max(-1) + 1) ** 2).mean()'),
]
ADADELTA = own_optimizers("Adadelta(parameters, lr=0.5)", "optax.adadelta(0.5, rho=0.9, eps=1e-6)")


@pytest.mark.large
def test_a_tie_at_weights_of_0_leaves_the_later_steps_of_a_step_of_its_own_alone(checked: Checked) -> None:
    """Its optimizer's state goes on from the other gradient; with 6 steps, all variants of the model are one run."""
    report = checked(*DRAWN_MAXIMA, ADADELTA, more=STEP.format(PMEAN), quick=False, steps=6)
    assert report.verdict == "equal", str(report)
    by_loss = [trial for trial in report.trials if trial.kind == "gradients"]
    assert len(by_loss) == 4 and not [trial for trial in by_loss if trial.left_out]


@pytest.mark.large
def test_a_slight_difference_stays_where_torchs_loss_raises_in_float32(checked: Checked) -> None:
    """Then nothing says how far torch rounds."""
    raises = (
        "def torch_loss(model, batch):\n",
        "def torch_loss(model, batch):\n    w = model.fc1.weight\n    assert w.dtype == torch.float64 or w.max() < 1\n",
    )
    what = "with weights 4 times as large"
    assert what in beyond_of(checked(SLIGHT, raises, quick=False))


def test_a_quick_check_tries_nothing_beyond_the_run(checked: Checked) -> None:
    assert checked(OF_TWELVE).trials == ()
