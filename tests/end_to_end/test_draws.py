"""Checks of ports whose losses draw random numbers: both sides get the same ones, or the check refuses."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxddp.parity.cases import PortCase
from jaxddp.parity.findings import EXIT_CODES
from jaxddp.parity.port import Port, PortFile
from jaxddp.parity.port.draws import ENTRY, DrawnSource
from jaxddp.parity.report.sentences import sentences
from jaxddp.parity.runs import Runs
from jaxddp.parity.workers import Workers
from tests.support.checks import Checked
from tests.support.small_port import FLAX_IMAGES, LINEN, Change, write

TORCH_DROPOUT = [
    ("torch.nn.Linear(5, 4)", "torch.nn.Linear(5, 4)\n        self.drop = torch.nn.Dropout(0.25)"),
    ("torch.tanh(self.fc1(x))", "self.drop(torch.tanh(self.fc1(x)))"),
]
NNX_DROPOUT = [
    (
        "nnx.Linear(5, 4, rngs=rngs)",
        "nnx.Linear(5, 4, rngs=rngs)\n            self.drop = nnx.Dropout(0.25, rngs=rngs)",
    ),
    ("nnx.tanh(self.fc1(x))", "self.drop(nnx.tanh(self.fc1(x)))"),
]
DROPOUT = [*TORCH_DROPOUT, *NNX_DROPOUT]
OTHER_RATE = ("nnx.Dropout(0.25", "nnx.Dropout(0.5")
GELU = [("torch.tanh(", "torch.nn.functional.gelu("), ("nnx.tanh(", "nnx.gelu(")]  # jax's is the approximate one

# Dropout of a linen module; its loss gives no key, gives a key, or asks for a key at rate 0.
LINEN_DROP = [
    *LINEN,
    ("from flax import nnx", "from flax import linen"),
    (
        "return self.fc2(nnx.tanh(self.fc1(x)))",
        'x = linen.tanh(linen.Dense(5, name="fc1")(x))\n'
        "            x = linen.Dropout(0.25, deterministic=False)(x)\n"
        '            return linen.Dense(4, name="fc2")(x)',
    ),
]
LINEN_RATE = ("linen.Dropout(0.25", "linen.Dropout(0.5")
OWN_KEY = (
    'cross_entropy(model(batch["x"]), batch["y"]).mean()',
    'cross_entropy(model(batch["x"], rngs={"dropout": jax.random.key(3)}), batch["y"]).mean()',
)
IMPORTS_JAX = ("def jax_loss(model, batch):\n", "def jax_loss(model, batch):\n    import jax\n")
WANTS_A_KEY = [
    ("linen.Dropout(0.25, deterministic=False)(x)", 'x + 0 * jax.random.key_data(self.make_rng("noise"))[0]'),
    ("from flax import linen", "import jax\n    from flax import linen"),
]

# Images, in torch's layout and in jax's, with masks of elements and masks of whole channels.
IMAGES = [
    ("torch.nn.Linear(3, 5)", "torch.nn.Conv2d(2, 5, 3)"),
    ("torch.nn.Linear(5, 4)", "torch.nn.Linear(5, 4)\n        self.of_maps = torch.nn.Dropout2d(0.5)"),
    ("torch.tanh(self.fc1(x))", "self.of_maps(F.dropout(torch.tanh(self.fc1(x)), 0.25)).mean((2, 3))"),
    ("nnx.Linear(3, 5, rngs=rngs)", 'nnx.Conv(2, 5, (3, 3), padding="VALID", rngs=rngs)'),
    (
        "nnx.Linear(5, 4, rngs=rngs)",
        "nnx.Linear(5, 4, rngs=rngs)\n            self.drop = nnx.Dropout(0.25, rngs=rngs)\n"
        "            self.of_maps = nnx.Dropout(0.5, broadcast_dims=(1, 2), rngs=rngs)",
    ),
    ("nnx.tanh(self.fc1(x))", "self.of_maps(self.drop(nnx.tanh(self.fc1(x)))).mean((1, 2))"),
    ("def batch(", "def torch_batch("),
    ("(12, 3)", "(12, 2, 7, 7)"),  # maps of 5 x 5 with 5 channels: both layouts have one shape
]
WHOLE_MAPS = ("(0.5, broadcast_dims=(1, 2), rngs=rngs)", "(0.5, rngs=rngs)")

# A variational bottleneck of two numbers, which draws its noise itself.
NOISE = [
    ("self.fc2(torch.tanh(self.fc1(x)))", "self.fc2(self.sample(self.fc1(x)))"),
    ("torch.nn.Linear(3, 5)", "torch.nn.Linear(3, 4)"),
    (
        "        self.fc2 = torch.nn.Linear(5, 4)",
        "        self.fc2 = torch.nn.Linear(2, 4)\n"
        "    def sample(self, h):\n"
        "        mean, logvar = h.chunk(2, -1)\n"
        "        return mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)",
    ),
    ("self.fc2(nnx.tanh(self.fc1(x)))", "self.fc2(self.sample(self.fc1(x)))"),
    ("nnx.Linear(3, 5, rngs=rngs)", "nnx.Linear(3, 4, rngs=rngs)"),
    (
        "            self.fc2 = nnx.Linear(5, 4, rngs=rngs)",
        "            self.fc2 = nnx.Linear(2, 4, rngs=rngs)\n"
        "            self.rngs = rngs\n"
        "        def sample(self, h):\n"
        "            mean, logvar = jnp.split(h, 2, -1)\n"
        "            return mean + jnp.exp(0.5 * logvar) * jax.random.normal(self.rngs(), mean.shape)",
    ),
    ("from flax import nnx", "import jax\n    from jax import numpy as jnp\n    from flax import nnx"),
]
BY_DISTRIBUTION = (
    "mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)",
    "torch.distributions.Normal(mean, torch.exp(0.5 * logvar)).rsample()",
)
BY_RNGS = ("jax.random.normal(self.rngs(), mean.shape)", "self.rngs.normal(mean.shape)")
NO_HALF = ("jnp.exp(0.5 * logvar)", "jnp.exp(logvar)")
OTHER_NOISE = ("jax.random.normal(", "jax.random.gumbel(")
TWO_NOISES = [
    ("* torch.randn_like(mean)", "* torch.randn_like(mean) + mean * torch.randn_like(mean)"),
    (
        "return mean + jnp.exp(0.5 * logvar) * jax.random.normal(self.rngs(), mean.shape)",
        "one, other = (jax.random.normal(self.rngs(), mean.shape) for _ in range(2))\n"
        "            return mean + jnp.exp(0.5 * logvar) * one + mean * other",
    ),
]
SWAPPED = ("one, other =", "other, one =")
WITHIN_JIT = (
    "jax.random.normal(self.rngs(), mean.shape)",
    "jax.jit(lambda key: jax.random.normal(key, mean.shape))(self.rngs())",
)

ACCUMULATES = """
accumulation_steps = 2
def jax_step(loss, optimizer, state, batch):
    import jax, optax
    from jaxddp.state import TrainState
    def add(before, micro_batch):
        (value, buffers), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, before[2], micro_batch)
        return jax.tree.map(jax.numpy.add, before[:2], (value / 2, jax.tree.map(lambda g: g / 2, gradients))) + (
            buffers,), None
    zeros = jax.tree.map(jax.numpy.zeros_like, state.params)
    (value, local, buffers), _ = jax.lax.scan(add, (jax.numpy.zeros(()), zeros, state.buffers), batch)
    gradients = jax.lax.pmean(local, "replica")
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    stages = dict(local_loss=value, local_gradients=local, gradients=gradients)
    return TrainState(state.step + 1, params, buffers, opt_state), stages
"""


TUPLES = [
    (
        '{"x": rng.normal(1, 1, (12, 3)), "y": rng.integers(0, 4, 12)}',
        "rng.normal(1, 1, (12, 3)), rng.integers(0, 4, 12)",
    )
]
TUPLES += [('batch["x"]', "batch[0]"), ('batch["y"]', "batch[1]")]


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        pytest.param([*DROPOUT, *TUPLES], "", id="nnx"),
        pytest.param([*DROPOUT], ACCUMULATES, id="custom_step", marks=pytest.mark.large),
        pytest.param([*TORCH_DROPOUT, *LINEN_DROP], "", id="linen", marks=pytest.mark.large),
        pytest.param([*TORCH_DROPOUT, *LINEN_DROP, IMPORTS_JAX, OWN_KEY], "", id="linen_key", marks=pytest.mark.large),
        pytest.param([*LINEN_DROP, *WANTS_A_KEY], "", id="linen_wants_a_key", marks=pytest.mark.large),
        pytest.param(IMAGES, FLAX_IMAGES, id="images", marks=pytest.mark.large),
        pytest.param(NOISE, "", id="noise", marks=pytest.mark.large),
        pytest.param(
            [*NOISE, BY_DISTRIBUTION, BY_RNGS], "accumulation_steps = 2", id="rsample", marks=pytest.mark.large
        ),
        pytest.param([*NOISE, *TWO_NOISES], "", id="two_noises", marks=pytest.mark.large),
    ],
)
def test_a_correct_port_that_draws_is_equal(changes: list[Change], more: str, checked: Checked) -> None:
    report = checked(*changes, more=more, numerics=True)
    assert report.verdict == "equal", str(report)
    assert report.numerics and not report.differences


@pytest.mark.parametrize(("changes", "draws"), [([], False), (DROPOUT, True)], ids=["none", "dropout"])
def test_only_ports_that_draw_get_numbers(changes: list[Change], draws: bool, tmp_path: Path, workers: Workers) -> None:
    case = PortCase(PortFile(str(write(tmp_path, *changes))), world_size=2, steps=1)
    runs = Runs(case, workers)
    runs.in_float64()
    assert isinstance(runs.case, PortCase) and not runs.problems and len(runs.jax) == 1
    assert isinstance(runs.case.source, DrawnSource) == draws
    entries = next(runs.case.batches()).last.keys()
    assert entries == ({"x", "y", f"{ENTRY}0"} if draws else {"x", "y"})
    if not draws:  # the run is the one that was asked for, and its port is the port of the file
        assert runs.case == replace(case, casts=())
        assert type(runs.case.port) is Port


@pytest.mark.large
def test_a_step_that_does_not_hand_on_the_batch_is_told_so(checked: Checked) -> None:
    loses = ("state.buffers), batch)", 'state.buffers), {name: batch[name] for name in ("x", "y")})')
    assert loses[0] in ACCUMULATES
    report = checked(*DROPOUT, more=ACCUMULATES.replace(*loses))
    messages = [problem.message for problem in report.problems]
    assert messages == ["jax_step: must give the loss all entries of the batch, with their shapes"]


SCALED_BY_HALF = ("self.drop(nnx.tanh(self.fc1(x)))", "self.drop(nnx.tanh(self.fc1(x))) / 2")
RATE = "dropout rate 0.5 instead of 0.25"
# Changes, more of the port; the fault's name, and what is said of it.
FAULTS = {
    "logvar": ([*NOISE, NO_HALF], "", "call_left_out", "mul by 0.5 left out of logvar"),
    "order": (
        [*NOISE, *TWO_NOISES, SWAPPED],
        "",
        "other_expression",
        "randn_like(...) instead of randn_like(... 2), in mul",
    ),
    "gelu": ([*DROPOUT, *GELU], "", "gelu_approximation", "GELU by tanh"),
    "nnx": ([*DROPOUT, OTHER_RATE], "", "dropout_rate", f"{RATE} in drop"),
    "linen": ([*TORCH_DROPOUT, *LINEN_DROP, LINEN_RATE], "", "dropout_rate", f"{RATE} in drop"),
    "images": ([*IMAGES, OTHER_RATE], FLAX_IMAGES, "dropout_rate", RATE),
    "rate that does not explain it": (
        [*DROPOUT, OTHER_RATE, SCALED_BY_HALF],
        "",
        "other_expression",
        "where((draw 1 < 0.5), (tanh(...) / 0.5), 0) / 2 instead of dropout(tanh(...), p=0.25, numbers=draw 1), "
        "in linear of fc2",
    ),
}


@pytest.mark.one_in(len(FAULTS))
@pytest.mark.parametrize(("changes", "more", "name", "says"), FAULTS.values(), ids=FAULTS)
def test_a_fault_beside_a_draw_is_located_and_named(
    changes: list[Change], more: str, name: str, says: str, checked: Checked
) -> None:
    report = checked(*changes, more=more)
    (difference,) = report.differences
    assert (report.verdict, difference.stage, difference.step) == ("different", "local_loss", 1)
    assert difference.layer is not None and difference.layer.torch == "fc2"
    cause = difference.cause
    assert cause is not None and (cause.names, sentences(cause)) == ((name,), (says,))
    assert cause.residual < 1e-14  # measured: 2e-16


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        (TORCH_DROPOUT, "", "torch draws a bernoulli (12, 5) in drop, jax none"),
        (NNX_DROPOUT, "", "jax draws a bernoulli (12, 5) in drop, torch none"),
        (
            [*IMAGES, WHOLE_MAPS],
            FLAX_IMAGES,
            "torch draws a bernoulli (12, 5, 1, 1) in of_maps, jax a bernoulli (12, 5, 5, 5) in of_maps as draw 2; "
            "must be of one kind and size, in the same order",
        ),
        (
            [*NOISE, OTHER_NOISE],
            "",
            "jax draws a gumbel (12, 2): only normal, uniform, bernoulli numbers can be the same on both sides; make "
            "them an entry of the batch",
        ),
        (
            [*NOISE, WITHIN_JIT],
            "",
            "jax draws a normal (12, 2): it is drawn inside of a jit, scan, vmap or remat of the port, where all "
            "calls would get the same numbers",
        ),
    ],
)
def test_a_draw_without_a_partner_is_refused(changes: list[Change], more: str, message: str, checked: Checked) -> None:
    report = checked(*changes, more=more)
    assert [(problem.side, problem.where, problem.message) for problem in report.problems] == [
        ("port", "draws", message)
    ]
    assert report.verdict == "incomplete" and EXIT_CODES[report.verdict] == 2
