"""Proofs of equivalence: what they prove is the same program, and whatever means something else they do not prove."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp

from tests.faults.exam import COUNTS, HALVES, PORTS, Mutant, share_of_exam
from tests.faults.exam.equivalence import unproved_parts
from tests.faults.exam.equivalence.graphs import graph_digest
from tests.faults.exam.equivalence.jaxprs import program_digest
from tests.faults.exam.equivalents import EQUIVALENTS, MOST, Equivalent
from tests.faults.exam.operators import Edit

X = np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3)
Function = Callable[..., object]


def unproved(port: str, half: str, old: str, new: str) -> list[str]:
    """Return the parts that are not proved equal after one piece of a half is replaced."""
    text = PORTS[port].sources[half].text
    assert text.count(old) == 1
    start = text.index(old)
    return unproved_parts(Mutant(port, half, Edit("hand", 1, 1, 0, start, start + len(old), old, new)))


def scanned(scale: float) -> Function:
    """Return a scan with a constant and a carry."""
    return lambda x: jax.lax.scan(lambda carry, row: (carry + scale * row, carry), jnp.zeros(3), x)


@pytest.mark.parametrize(
    ("function", "same"),
    [
        (lambda x: x * x + x, lambda x: x + x * x),
        (lambda x: jnp.sin(x) + jnp.sin(x), lambda x: (y := jnp.sin(x)) + y),
        (lambda x: x, lambda x: (jnp.exp(x), x)[1]),
        (lambda x: x, lambda x: 1.0 * x / 1.0 - 0.0),
        (lambda x: jnp.sum(x, axis=-1), lambda x: jnp.sum(x, axis=1)),
        (lambda x: jnp.tanh(x), lambda x: jax.jit(lambda y: jnp.tanh(y))(x)),
        (scanned(2.0), scanned(2.0)),
    ],
    ids=["order", "common", "unused", "neutral", "axis", "called", "scan"],
)
def test_programs_that_mean_the_same_have_one_digest(function: Function, same: Function) -> None:
    assert program_digest(function, X) == program_digest(same, X)


@pytest.mark.parametrize(
    ("function", "edited"),
    [
        (lambda x: x - 2 * x, lambda x: 2 * x - x),
        (lambda x: x * 0.1, lambda x: x * 0.10001),
        (lambda x: x + 0.0, lambda x: x),
        (lambda x: (x, x + 1), lambda x: (x + 1, x)),
        (lambda x: {"a": x}, lambda x: {"b": x}),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: jnp.where(x > 2, x, 0), lambda x: jnp.where(x >= 2, x, 0)),
        (scanned(2.0), scanned(3.0)),
        (lambda x: x * X, lambda x: x * (2 * X)),
        (jax.grad(lambda x: (x * x).sum()), jax.grad(lambda x: (x * jax.lax.stop_gradient(x)).sum())),
    ],
    ids=["sides", "number", "zero", "outputs", "names", "axis", "comparison", "scan", "constant", "stopped"],
)
def test_programs_that_differ_have_two_digests(function: Function, edited: Function) -> None:
    assert program_digest(function, X) != program_digest(edited, X)


@pytest.mark.parametrize(
    ("function", "edited", "equal"),
    [
        (lambda x: x * x + x, lambda x: x + x * x, True),
        (lambda x: x.sum(dim=-1), lambda x: x.sum(1), True),
        (lambda x: x, lambda x: (x.exp(), x)[1], True),
        (lambda x: x.softmax(0), lambda x: x.softmax(1), False),
        (lambda x: x * 0.1, lambda x: x * 0.2, False),
        (lambda x: torch.rand(2), lambda x: (torch.rand(2), torch.rand(2))[1], False),
        (lambda x: x.clone().add_(1), lambda x: x.clone().add_(2), False),
    ],
    ids=["order", "axis", "unused", "other axis", "number", "draws", "in place"],
)
def test_torch_programs_have_one_digest_if_they_mean_the_same(
    function: Function, edited: Function, equal: bool
) -> None:
    tensor = torch.from_numpy(X)
    assert (graph_digest(function, [tensor], {}) == graph_digest(edited, [tensor], {})) is equal


SAME = [
    ("vae", "jax", "(1 + logvar - jnp.square(mean)", "(logvar + 1 - jnp.square(mean)"),
    ("vae", "jax", "nnx.Linear(INPUTS, HIDDEN, rngs=rngs)", "nnx.Linear(HIDDEN, INPUTS, rngs=rngs)"),
    ("vae", "torch", "BETA * divergence", "divergence * BETA"),
    ("mlp", "torch", "T_max=STEPS", "T_max=10"),
    ("mine", "jax", 'batch["x"]), batch["y"]).mean()', 'batch["x"]), batch["y"]).mean(-1)'),
]
MEAN = 'jax.lax.pmean(gradients, "replica")'
OTHER = [
    ("diffusion", "jax", '"ema": Denoiser(nnx.Rngs(0))', '"ema": Denoiser(nnx.Rngs(1))', "start x2"),
    ("critics", "jax", "Critic().init(key, inputs)", "Critic().init(keys[0], inputs)", "start x2"),
    ("vae", "jax", "divergence).mean()", "divergence).sum() / 8", "loss x3"),
    ("vae", "jax", "optax.adamax(1e-2)", "optax.adamax(lambda n: jnp.where(n < 900, 1e-2, 1e-3))", "optimizer x2"),
    ("vae", "jax", "nnx.Rngs(0, noise=1)", "nnx.Rngs(3, noise=1)", "start x2"),
    ("vae", "jax", "optax.adamax(1e-2)", "optax.chain(optax.clip(1e9), optax.adamax(1e-2))", "optimizer x2"),
    ("mlp", "jax", "np.random.default_rng(epoch)", "np.random.default_rng(epoch + (epoch > 5))", "batches"),
    ("mlp", "jax", MEAN, "jax.tree.map(lambda g: jax.lax.psum(g, 'replica') / 2, gradients)", "step x3"),
    ("vae", "torch", "divergence).mean()", "divergence).sum() / 8", "loss of 7"),
    ("mlp", "torch", "T_max=STEPS", "T_max=STEPS + 1", "rates"),
    ("mlp", "torch", "momentum=MOMENTUM", "momentum=0.8", "optimizers"),
    ("vae", "torch", "return VAE()", "torch.rand(1)\n    return VAE()", "start"),
]


@pytest.mark.parametrize(("port", "half", "old", "new"), SAME)
def test_an_edit_without_effect_is_proved(port: str, half: str, old: str, new: str) -> None:
    assert unproved(port, half, old, new) == []


@pytest.mark.parametrize(("port", "half", "old", "new", "part"), OTHER)
def test_an_edit_that_acts_outside_of_the_run_is_not_proved(
    port: str, half: str, old: str, new: str, part: str
) -> None:
    assert part in unproved(port, half, old, new)


def test_a_half_that_fails_is_not_proved() -> None:
    assert unproved("mine", "jax", 'batch["y"]).mean()', 'batch["z"]).mean()') == ["KeyError: 'z'"]


@pytest.mark.one_in(26, first=10)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("port", PORTS)
def test_every_half_can_be_traced_and_is_equal_to_itself(port: str, half: str) -> None:
    text = PORTS[port].sources[half].text
    assert unproved_parts(Mutant(port, half, Edit("hand", 1, 1, 0, len(text), len(text), "", "\n"))) == []


def test_few_mutants_are_equivalent_by_hand() -> None:
    assert EQUIVALENTS.keys() <= {mutant.name for mutant in share_of_exam()}
    assert len(EQUIVALENTS) <= MOST <= 0.03 * sum(COUNTS.values())


@pytest.mark.parametrize("name", [name for name, edit in EQUIVALENTS.items() if not edit.draws])
def test_both_expressions_of_an_equivalent_mutant_have_the_same_values(name: str) -> None:
    edit = EQUIVALENTS[name]
    for inputs in random_inputs(edit):
        jax.tree.map(np.testing.assert_array_equal, edit.before(*inputs), edit.after(*inputs))


@pytest.mark.parametrize("name", [name for name, edit in EQUIVALENTS.items() if edit.draws])
def test_both_expressions_of_an_equivalent_mutant_draw_from_one_distribution(name: str) -> None:
    edit = EQUIVALENTS[name]
    before, after = np.asarray([(edit.before(*x), edit.after(*x)) for x in random_inputs(edit)]).T
    assert not (before == after).any()
    assert len(np.unique([before, after])) > 1990  # of 2,000, of which few are equal in float32; measured: 1,997
    # Of 1,000 pairs; the distance of two samples exceeds 0.087 once in a thousand times.
    assert distance_of_samples(before, after) < 0.087
    assert distance_of_samples(before, 1.3 * after) > 0.05 > distance_of_samples(before, after)
    assert abs(np.corrcoef(before, after)[0, 1]) < 0.1


def random_inputs(edit: Equivalent) -> list[list[np.ndarray]]:
    """Return 1,000 inputs of an edit's expressions."""
    rng = np.random.default_rng(0)
    return [[np.asarray(rng.standard_normal(shape)) for shape in edit.shapes] for _ in range(1000)]


def distance_of_samples(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest distance of two distribution functions, Kolmogorov's and Smirnov's."""
    both = np.concatenate([one, other])
    of_one, of_other = (np.searchsorted(np.sort(x), both, side="right") / len(x) for x in (one, other))
    return float(np.abs(of_one - of_other).max())
