"""An operation that changes nothing is named, unless the other framework has it at the same place."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import linen, nnx
from jax import lax
from jax import numpy as jnp
from torch.nn import functional as F

from jaxddp.parity.idle_operations import Watched, without_twin
from jaxddp.parity.jax_side.watched_program import dropouts_shown, watched_program
from jaxddp.parity.operations import are_near, moments
from jaxddp.parity.torch_side.idle_operations import Watch
from jaxddp.parity.user_code.operation_text import operation_text

X = np.arange(1.0, 7.0).reshape(2, 3)
ALL = np.ones((2, 3), bool)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def of_jax(loss: Callable[..., Any], x: np.ndarray = X, mask: np.ndarray = ALL) -> Watched:
    arguments = jnp.asarray(x), jnp.asarray(mask)
    with dropouts_shown():
        program = watched_program(lambda *given: jnp.sum(loss(*given)), arguments, known=())
    calls, numbers = program.watch(arguments, twins=True)
    return Watched(calls, {}, numbers)


def of_torch(loss: Callable[..., Any], x: np.ndarray = X, mask: np.ndarray = ALL) -> Watched:
    with Watch(results=True) as watch:
        loss(torch.tensor(x), torch.tensor(mask)).sum()
    return watch.seen


def described(program: Watched, other: Watched) -> list[tuple[str, str]]:
    idle = without_twin(program.calls, other.calls)
    return [(operation_text(one.called.line, one.called.function, one.called.numbers), one.why) for one in idle]


def plain(x: Any, m: Any) -> Any:
    return x * 3.0 - 2.0


# What only JAX's half has, as a user may write it, and what is said of it.
PLANTED_IN_JAX: list[tuple[Callable[..., Any], str, str]] = [
    (lambda x, m: jnp.clip(3.0 * x, -90, 90) - 2.0, "jnp.clip(..., -90, 90)", "never clips"),
    (lambda x, m: (3.0 * x).clip(max=90) - 2.0, "(...).clip(max=90)", "never clips"),
    (lambda x, m: lax.clamp(-90.0, 3.0 * x, 90.0) - 2.0, "lax.clamp(-90.0, ..., 90.0)", "never clips"),
    (lambda x, m: jnp.nan_to_num(3.0 * x) - 2.0, "jnp.nan_to_num(...)", "replaces nothing"),
    (lambda x, m: jnp.where(x < 99, 3.0 * x, 0.0) - 2.0, "jnp.where(..., ..., 0.0)", "always takes the same branch"),
    (lambda x, m: lax.select(x > 99, x, 3.0 * x) - 2.0, "lax.select(..., x, ...)", "always takes the same branch"),
    (lambda x, m: jnp.maximum(3.0 * x, 1e-3) - 2.0, "jnp.maximum(..., 0.001)", "always returns its first value"),
    (lambda x, m: jnp.minimum(9 * x, 3.0 * x) - 2.0, "jnp.minimum(..., ...)", "always returns its second value"),
    (lambda x, m: jnp.fmin(3.0 * x, 1e3) - 2.0, "jnp.fmin(..., 1000.0)", "always returns its first value"),
    (
        lambda x, m: lax.cond(x.sum() > 0, jnp.negative, jnp.sin, 2.0 - 3.0 * x),
        "lax.cond(..., jnp.negative, jnp.sin, ...)",
        "always takes the same branch",
    ),
    (lambda x, m: lax.switch(jnp.argmin(x[0]), [plain, plain], x, m), "lax.switch(...", "always takes the same branch"),
    (lambda x, m: jax.nn.relu(3.0 * x) - 2.0, "jax.nn.relu(...)", "never changes what it is given"),
    (lambda x, m: jnp.abs(3.0 * x) - 2.0, "jnp.abs(...)", "never changes what it is given"),
    (lambda x, m: jax.nn.relu6(x / 9.0) * 27.0 - 2.0, "jax.nn.relu6(...)", "never clips"),
    (lambda x, m: jax.nn.hard_tanh(x / 9.0) * 27.0 - 2.0, "jax.nn.hard_tanh(...)", "never clips"),
    (lambda x, m: 1.0 * (3.0 * x - 2.0), "1.0 * ...", "multiplies by 1"),
    (lambda x, m: (3.0 * x - 2.0) / 1, "... / 1", "divides by 1"),
    (lambda x, m: 3.0 * x - 2.0 + 0.0, "... + 0.0", "adds 0"),
    (lambda x, m: 3.0 * x - 2.0 + 0.0 * jnp.sin(x), "0.0 * ...", "is always 0"),
    (lambda x, m: nnx.Dropout(0.0)(3.0 * x) - 2.0, "nnx.Dropout(0.0)(...)", "drops nothing"),
    (
        lambda x, m: linen.Dropout(0.4, deterministic=True).apply({}, 3.0 * x) - 2.0,
        ".apply(",
        "drops nothing",
    ),
]


@pytest.mark.parametrize(("loss", "text", "why"), PLANTED_IN_JAX, ids=lambda x: x if isinstance(x, str) else "")
def test_what_only_jax_has_is_named(loss: Any, text: str, why: str) -> None:
    ((says, reason),) = described(of_jax(loss), of_torch(plain))
    assert text in says and reason == why
    assert not described(of_torch(plain), of_jax(loss))


PLANTED_IN_TORCH: list[tuple[Callable[..., Any], str, str]] = [
    (lambda x, m: torch.clamp(3.0 * x, -90, 90) - 2.0, "torch.clamp(..., -90, 90)", "never clips"),
    (lambda x, m: (3.0 * x).clamp_(max=90) - 2.0, "(...).clamp_(max=90)", "never clips"),
    (lambda x, m: torch.where(m, 3.0 * x, 0.0) - 2.0, "torch.where(m, ..., 0.0)", "always takes the same branch"),
    (lambda x, m: (3.0 * x).masked_fill(~m, -1e9) - 2.0, "(...).masked_fill(..., -1000000000.0)", "fills nothing"),
    (lambda x, m: torch.maximum(3.0 * x, x) - 2.0, "torch.maximum(..., x)", "always returns its first value"),
    (lambda x, m: torch.min(3.0 * x, 99 * x) - 2.0, "torch.min(..., ...)", "always returns its first value"),
    (lambda x, m: F.relu(3.0 * x) - 2.0, "F.relu(...)", "never changes what it is given"),
    (lambda x, m: F.relu6(x / 9.0) * 27.0 - 2.0, "F.relu6(...)", "never clips"),
    (lambda x, m: F.hardtanh(x / 9.0) * 27.0 - 2.0, "F.hardtanh(...)", "never clips"),
    (lambda x, m: torch.nan_to_num(3.0 * x) - 2.0, "torch.nan_to_num(...)", "replaces nothing"),
    (lambda x, m: torch.nn.Dropout(0.0)(3.0 * x) - 2.0, "torch.nn.Dropout(0.0)", "drops nothing"),
    (lambda x, m: 3.0 * x - 2.0 + 0.0 * x.sin(), "0.0 * ...", "is always 0"),
    (lambda x, m: (3.0 * x - 2.0).mul(1.0), "(...).mul(1.0)", "multiplies by 1"),
]


@pytest.mark.parametrize(("loss", "text", "why"), PLANTED_IN_TORCH, ids=lambda x: x if isinstance(x, str) else "")
def test_what_only_torch_has_is_named(loss: Any, text: str, why: str) -> None:
    ((says, reason),) = described(of_torch(loss), of_jax(plain))
    assert text in says and reason == why
    assert not described(of_jax(plain), of_torch(loss))


# Right pairs: library functions that choose, and the same choice in the words of both frameworks.
RIGHT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "logsumexp": (lambda x, m: jax.nn.logsumexp(x, -1), lambda x, m: x.logsumexp(-1)),
    "softmax": (lambda x, m: jax.nn.softmax(x) ** 2, lambda x, m: x.softmax(-1) ** 2),
    "index": (lambda x, m: x[0, 1] + x[jnp.array([1, 0])], lambda x, m: x[0, 1] + x[torch.tensor([1, 0])]),
    "max of an axis": (lambda x, m: jnp.max(x, -1), lambda x, m: x.max(-1).values),
    "variance": (lambda x, m: jnp.var(x) + jnp.linalg.norm(x), lambda x, m: x.var(correction=0) + x.norm()),
    "gelu": (lambda x, m: jax.nn.gelu(x), lambda x, m: F.gelu(x, approximate="tanh")),
    "relu as a maximum": (lambda x, m: jnp.maximum(x, 0), lambda x, m: F.relu(x)),
    "relu as a choice": (lambda x, m: jnp.where(x > 0, x, 0.0), lambda x, m: torch.relu(x)),
    "leaky relu as a choice": (lambda x, m: jnp.where(x > 0, x, 0.2 * x), lambda x, m: F.leaky_relu(x, 0.2)),
    "clip": (lambda x, m: jnp.clip(x, -90, 90), lambda x, m: x.clamp(-90, 90)),
    "clip of ends": (lambda x, m: jnp.clip(x, 1e-6, None), lambda x, m: x.clamp_min(1e-6)),
    "clip as a maximum": (lambda x, m: jnp.maximum(x, 1e-6), lambda x, m: torch.clamp(x, min=1e-6)),
    "hard tanh": (lambda x, m: jnp.clip(x / 9, -1, 1), lambda x, m: F.hardtanh(x / 9)),
    "mask": (lambda x, m: jnp.where(m, x, -1e9), lambda x, m: x.masked_fill(~m, -torch.inf)),
    "mask as a factor": (lambda x, m: x * m, lambda x, m: torch.where(m, x, 0.0)),
    "mask as a choice": (lambda x, m: jnp.where(m, x, 0.0), lambda x, m: x * m),
    "dropout": (lambda x, m: nnx.Dropout(0.0)(x), lambda x, m: F.dropout(x, 0.0)),
    "transposed": (lambda x, m: jnp.clip(x.T, -90, 90), lambda x, m: x.clamp(-90, 90)),
    "in a loop": (
        lambda x, m: lax.scan(lambda c, row: (c + row, jnp.clip(row, -90, 90)), x[0], x)[1],
        lambda x, m: torch.stack([row.clamp(-90, 90) for row in x]),
    ),
    "gradients chosen": (lambda x, m: jnp.where(x > 2, x, lax.stop_gradient(x)), lambda x, m: x),
    "a derivative chosen": (
        lambda x, m: jax.grad(lambda x: (jnp.maximum(x, -90.0) ** 2).sum())(x),
        lambda x, m: 2 * x.clamp(min=-90.0),
    ),
    "sums in another order": (lambda x, m: sum([x[1], x[0]]), lambda x, m: sum([x[0], x[1]])),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_pairs_have_no_line(name: str) -> None:
    jax_half, torch_half = RIGHT[name]
    watched = of_jax(jax_half), of_torch(torch_half)
    assert described(*watched) == described(*reversed(watched)) == []


@pytest.mark.parametrize(
    ("jax_half", "torch_half"),
    [
        (lambda x, m: jnp.clip(x, -90, 90), lambda x, m: x.clamp(-70, 70)),
        (lambda x, m: jnp.maximum(x, 1e-6), lambda x, m: torch.clamp(x, min=1e-3)),
        (lambda x, m: jnp.where(x < 50, x, 0.0), lambda x, m: torch.where(x < 60, x, 1.0)),
        (lambda x, m: jnp.clip(3 * x, -90, 90), lambda x, m: 3 * x.clamp(-90, 90)),
    ],
    ids=["other bounds", "another bound", "another value", "another place"],
)
def test_operations_that_differ_are_named_on_both_sides(jax_half: Any, torch_half: Any) -> None:
    watched = of_jax(jax_half), of_torch(torch_half)
    assert len(described(*watched)) == len(described(*reversed(watched))) == 1


def test_one_batch_in_which_it_acts_is_enough() -> None:
    def loss(x: Any, m: Any) -> Any:
        return jnp.clip(x, -9, 9)

    arguments = jnp.asarray(X), jnp.asarray(ALL)
    program = watched_program(lambda *given: jnp.sum(loss(*given)), arguments, known=())
    ((_, before),) = program.watch(arguments, twins=False)[0].items()
    ((_, after),) = program.watch((2 * arguments[0], arguments[1]), twins=False)[0].items()
    assert before.operands == {0} and not after.operands


def test_numbers_whose_change_changes_nothing() -> None:
    def loss(x: Any, m: Any) -> Any:
        chosen = jnp.where(x > 2.5, 4.0 * x, x)  # the threshold may be anything from 2 to 3
        return jax.nn.softmax(chosen + 7.0) ** 2 * 0.5  # and softmax does not see the shift

    stated = of_jax(loss).numbers
    assert {called.numbers[0]: bool(kept.operands) for called, kept in stated.items()} == {
        **{2.5: True, 4.0: False, 7.0: True, 0.5: False}
    }


@jax.jit
def clip(x: Any, much: Any) -> Any:
    return x * much[0, 0] + 1.0


def test_a_function_of_the_user_with_a_known_name_is_no_library_function() -> None:
    assert not described(of_jax(lambda x, m: clip(x, jnp.ones((4, 4)))), of_torch(plain))


def test_the_results_of_the_first_replica_have_twins() -> None:
    def step(x: Any) -> Any:
        return jax.vmap(lambda x: 1.0 * x - lax.psum(x, "replica"), axis_name="replica")(x)

    program = watched_program(step, (jnp.stack([jnp.asarray(X), jnp.asarray(X) + 1]),), replicas=2)
    ((_, kept),) = [pair for pair in program((jnp.stack([X, X + 1]),))[0].items() if pair[0].function == "mul"]
    assert kept.operands == {1} and are_near(kept.results[0], moments(X))
