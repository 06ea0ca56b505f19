"""Steps of a user's own, whichever of their stages they show, and however they clip: right ones, and faults."""

import pytest

from tests.support.checks import Checked
from tests.support.small_port import (
    BY_NORM,
    CLIPS_BY_VALUE,
    SHOWS_NOTHING,
    Change,
    own_optimizers,
    step,
    wide,
)

pytestmark = pytest.mark.large
SHOWS = {
    "all": [],
    "nothing": [SHOWS_NOTHING],
    "mean": [(SHOWS_NOTHING[0], '("gradients",)')],
    "local": [(SHOWS_NOTHING[0], '("local_loss", "local_gradients")')],
    "clipped": [(SHOWS_NOTHING[0], '("clipped_gradients",)')],
}
CLIPS: dict[str, list[Change]] = {
    "by norm": [],
    "never": [("clip_grad_norm = 0.05", "clip_grad_norm = 50.0")],
    "by value": CLIPS_BY_VALUE,
    "in the chain": [("clip_grad_norm = 0.05", "torch_clip_grad_norm = 0.05"), (BY_NORM, "share = 1.0")],
    "not": [("clip_grad_norm = 0.05\n", ""), (BY_NORM, "share = 1.0")],
}
IN_PARTS: Change = (
    "(value, buffers), local = jax.value_and_grad(loss, has_aux=True)(state.params, state.buffers, batch)",
    """gradient = jax.value_and_grad(loss, has_aux=True)
    of_micro = [gradient(state.params, state.buffers, jax.tree.map(lambda x: x[a], batch)) for a in range(2)]
    value, buffers = sum(one[0][0] for one in of_micro) / 2, of_micro[-1][0][1]
    local = jax.tree.map(lambda *g: sum(g) / 2, *(one[1] for one in of_micro))""",
)
UNUSED = [
    ("torch.nn.Linear(5, 4)", "torch.nn.Linear(5, 4); self.other = torch.nn.Linear(2, 2)"),
    ("nnx.Linear(5, 4, rngs=rngs)", "nnx.Linear(5, 4, rngs=rngs); self.other = nnx.Linear(2, 2, rngs=rngs)"),
]
MODELS: dict[str, tuple[list[Change], str]] = {
    "small": ([], ""),
    "wide": (wide(400), ""),  # its records hold excerpts
    "unused": (UNUSED, "find_unused_parameters = True\n"),
}
OPTIMIZERS = {
    "sgd": ("SGD(parameters, lr=0.1, momentum=0.9)", "optax.sgd(0.1, 0.9)", ""),
    "adagrad": ("Adagrad(parameters, lr=0.01)", "jaxddp.optim.adagrad(0.01)", ""),
    "scheduled": (
        "SGD(parameters, lr=0.1)",
        "optax.sgd(lambda n: 0.1 / (1 + n))",
        "def torch_scheduler(optimizer):\n"
        "    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))\n",
    ),
}
CLIPPING = "optax.stateless(lambda g, _: jaxddp.optim.clip_by_global_norm(g, 0.05)[0])"
# Every way to show with every way to clip; the rest is dealt out among them.
CASES = [
    (shows, clips, [*MODELS][(one + other) % 3], [*OPTIMIZERS][(one + 2 * other) % 3], 1 + (one + other) // 2 % 2)
    for one, shows in enumerate(SHOWS)
    for other, clips in enumerate(CLIPS)
]


@pytest.mark.parametrize(("shows", "clips", "model", "optimizer", "micro_batches"), CASES)
def test_a_correct_step_is_equal(
    shows: str, clips: str, model: str, optimizer: str, micro_batches: int, checked: Checked
) -> None:
    changes, more = MODELS[model]
    torch, jax, schedule = OPTIMIZERS[optimizer]
    chain = f"optax.chain({CLIPPING}, {jax})" if clips == "in the chain" else jax
    parts = [IN_PARTS] if micro_batches == 2 else []
    more += schedule + f"accumulation_steps = {micro_batches}\nimport jaxddp.optim\n"
    changes = [*changes, own_optimizers(torch, chain)]
    report = checked(*changes, more=more + step(*SHOWS[shows], *CLIPS[clips], *parts))
    assert report.verdict == "equal", report
    assert len(report.stages["update"].residuals) == 3


TWO = "accumulation_steps = 2\nimport jaxddp.optim\n"
NO_MEAN: Change = ("jax.lax.pmean(local, ", "(lambda x, _: x)(local, ")
SUM: Change = ("jax.lax.pmean(local, ", "jax.lax.psum(local, ")
NOT_DIVIDED: Change = ("sum(g) / 2", "sum(g)")


@pytest.mark.parametrize(
    ("changes", "clips", "stage", "name"),
    [
        ([*SHOWS["local"], IN_PARTS, NOT_DIVIDED], "by norm", "local_gradients", "accumulation_not_divided"),
        ([*SHOWS["local"], IN_PARTS, SUM], "by norm", "update", "sum_not_mean"),
        ([IN_PARTS, NO_MEAN], "in the chain", "gradients", "no_sync"),
    ],
    ids=["the update follows", "the local ones are right", "the chain clips"],
)
def test_a_fault_is_named_and_no_other(
    changes: list[Change], clips: str, stage: str, name: str, checked: Checked
) -> None:
    torch, jax, _ = OPTIMIZERS["sgd"]
    optimizers = own_optimizers(torch, f"optax.chain({CLIPPING}, {jax})" if clips == "in the chain" else jax)
    report = checked(optimizers, more=TWO + step(*CLIPS[clips], *changes))
    (found,) = report.differences
    assert (found.stage, found.cause and found.cause.names) == (stage, (name,)), report
