"""What had no effect in any step of an equal check is named, by line, if only one side has it."""

from pathlib import Path

import pytest

from jaxddp.parity.checking import check
from jaxddp.parity.report.coverage_words import without_effect_line
from jaxddp.parity.workers import Workers

# Plain functions on dictionaries of arrays, beside a torch model that is a list of parameters.
PORT = """
import numpy as np
import torch

LIMIT = 50.0

class Rows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(7, 4))
        self.mix = torch.nn.Parameter(torch.randn(4, 4))
        self.drop = torch.nn.Dropout(0.0)

def torch_model():
    return Rows()

def jax_model():
    return {"table": np.zeros((7, 4)), "mix": np.zeros((4, 4))}

def torch_loss(model, batch):
    rows = torch.tanh(model.table[batch["ids"]].masked_fill(~batch["known"][..., None], 0.0) @ model.mix)
    return (rows.sum(1) - batch["goal"]).clamp(-90, 90).square().mean()

def jax_loss(params, batch):
    import jax
    from jax import numpy as jnp

    rows = jnp.where(batch["known"][..., None], params["table"][batch["ids"]], 0.0)
    rows = jnp.tanh(rows @ params["mix"])
    error = jnp.clip(rows.sum(1) - batch["goal"], -90, 90)
    return (error**2).mean()

def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    known = np.ones((6, 5), bool)
    return {"ids": rng.integers(0, 7, (6, 5)), "known": known, "goal": rng.normal(size=(6, 4))}

torch_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)

import optax
jax_optimizer = optax.sgd(0.1)
"""


@pytest.fixture(scope="module")
def workers() -> Workers:
    with Workers(2, "cpu") as workers:
        yield workers


def lines(folder: Path, workers: Workers, *changes: tuple[str, str], verdict: str = "equal") -> list[str]:
    text = PORT
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "port.py").write_text(text)
    report = check(folder / "port.py", steps=2, workers=workers, numerics=False)
    assert report.verdict == verdict and not report.problems, str(report)
    for idle in report.without_effect:
        assert without_effect_line(idle)[:60] in str(report)
    return [f"{idle.operation} ({idle.side}) {idle.why}: {idle.line.itself}" for idle in report.without_effect]


def test_a_right_port_has_no_line_for_what_both_sides_have(tmp_path: Path, workers: Workers) -> None:
    assert lines(tmp_path, workers) == []


def test_what_one_side_alone_has_is_named_at_its_line(tmp_path: Path, workers: Workers) -> None:
    found = lines(
        tmp_path,
        workers,
        ("rows = jnp.tanh(rows @ params", "rows = jnp.tanh(jnp.minimum(rows, LIMIT) @ params"),
        ('- batch["goal"], -90, 90)', '- batch["goal"], -80, 80)'),
        ("return (error**2).mean()", 'return (error**2).mean() + 0.0 * jnp.abs(params["mix"]).sum()'),
        ("@ model.mix)", "@ model.drop(model.mix))"),
        ("jax_optimizer = optax.sgd(0.1)", "jax_optimizer = optax.chain(optax.clip(1e3), optax.sgd(0.1))"),
        verdict="beyond",
    )
    assert [line.partition(": ")[0] for line in found] == [
        "jnp.minimum(rows, LIMIT) (jax) always returns its first value",
        "jnp.clip(..., -80, 80) (jax) never clips",
        "0.0 * ... (jax) is always 0",
        "optax.clip(1000.0) (jax) never changes the updates",
        "model.drop(model.mix) (torch) drops nothing",
        "(...).clamp(-90, 90) (torch) never clips",
    ]
    assert all(line.partition("(")[0].split(".")[-1] in line.partition(": ")[2] for line in found)


def test_what_acts_in_a_later_step_on_one_replica_has_an_effect(tmp_path: Path, workers: Workers) -> None:
    clips = ('- batch["goal"], -90, 90)', '- batch["goal"], -80, 80)')
    of_torch = ('batch["goal"]).clamp(-90, 90)', 'batch["goal"]).clamp(-80, 80)')
    one = ("known = np.ones((6, 5), bool)", "known = np.ones((6, 5), bool); known[0, 0] = (step, rank) != (1, 1)")
    kept = ("0.0)\n    rows = jnp.tanh", "1e-9 * 0.0)\n    rows = jnp.tanh")
    assert lines(tmp_path, workers, clips, of_torch, one, kept) == []


def test_functions_that_nothing_calls_are_named(tmp_path: Path, workers: Workers) -> None:
    defined = """
def halved(x):
    return x / 2

def dumped(params):
    return loaded(params)

def loaded(params):
    return params

if __name__ == "__main__":
    print(dumped(jax_model()))

def jax_loss(params, batch):
    if len(batch) > 90:
        return capped(batch)
"""
    found = lines(tmp_path, workers, ("\ndef jax_loss(params, batch):\n", f"def capped(x):\n    return x\n{defined}"))
    assert found == [
        "capped() () is never called: def capped(x):",
        "halved() () is never called: def halved(x):",
    ]
