"""Ports with large tensors, of which the records hold excerpts: right ones are equal, faults are named."""

from pathlib import Path

import pytest

from jaxddp.parity.checking import check
from jaxddp.parity.excerpts import distance
from jaxddp.parity.port import PortFile
from tests.support.checks import Checked
from tests.support.small_port import SHOWS_NOTHING, Change, own_optimizers, step, wide

pytestmark = pytest.mark.large
WIDE, LARGER = 400, 3000  # a layer of LARGER has 9 million parameters, more than `records.LARGE_MODEL`
ADAMW = own_optimizers("AdamW(parameters, lr=0.01, weight_decay=0.1)", "optax.adamw(0.01, weight_decay=0.1)")
CLIPS = own_optimizers(
    "SGD(parameters, lr=0.1)",
    "optax.chain(optax.stateless(lambda g, _: jaxddp.optim.clip_by_global_norm(g, 0.05)[0]), optax.sgd(0.1))",
)
CLIPS_MORE: Change = ("clip_by_global_norm(g, 0.05)", "clip_by_global_norm(g, 0.02)")
CLIPS_EARLIER: Change = ("minimum(1, clip_grad_norm /", "minimum(1, 0.02 /")
KEEPS_LOCAL: Change = ("jax.lax.pmean(local, ", "(lambda x, _: x)(local, ")
SHOWS_CLIPPED: Change = (SHOWS_NOTHING[0], '("clipped_gradients",)')
NO_MEAN: tuple[str, set[str]] = ("update", {"no_sync"})
TORCH_CLIPS = "torch_clip_grad_norm = 0.05\n"


SGD: Change = ("sgd", "sgd")
RIGHT = {
    "clipped": (WIDE, SGD, "clip_grad_norm = 0.05\n"),
    "own step": (WIDE, SGD, step()),
    "adamw": (WIDE, ADAMW, ""),
    "clips by itself": (WIDE, CLIPS, TORCH_CLIPS),
    "large": (LARGER, ADAMW, ""),
    "large, own step": (LARGER, ADAMW, step()),
}
OTHER_EPSILON: Change = ("epsilon=1e-5", "epsilon=1e-6")
OTHER_DECAY: Change = ("optax.adamw(0.01, weight_decay=0.1)", "optax.adamw(0.01)")
# Width, changes, more of the port; the stage that differs, and the names of the fault that the run cannot tell apart.
WRONG = {
    "epsilon": (WIDE, [OTHER_EPSILON], "", "local_loss", {"norm_epsilon"}),
    "decay": (WIDE, [ADAMW, OTHER_DECAY], "", "update", {"decay_value"}),
    # Always active, so that a learning rate does the same.
    "clipping": (WIDE, [CLIPS, CLIPS_MORE], TORCH_CLIPS, "update", {"clip_norm", "lr_scaled"}),
    "sum": (WIDE, [], step(("pmean", "psum")), "gradients", {"sum_not_mean", "check_vma"}),
    "clipping, shown": (WIDE, [], step(CLIPS_EARLIER), "clipped_gradients", {"clip_norm"}),
    "no mean": (WIDE, [], step(KEEPS_LOCAL), "gradients", {"no_sync"}),
    "no mean, hidden": (WIDE, [], step(KEEPS_LOCAL, SHOWS_NOTHING), *NO_MEAN),
    "no mean, clipped": (WIDE, [], step(KEEPS_LOCAL, SHOWS_CLIPPED), "clipped_gradients", {"no_sync"}),
    "large, epsilon": (LARGER, [ADAMW, OTHER_EPSILON], "", "local_loss", {"norm_epsilon"}),
    "large, decay": (LARGER, [ADAMW, OTHER_DECAY], "", "update", {"decay_value"}),
}


@pytest.mark.parametrize(("width", "optimizer", "more"), RIGHT.values(), ids=RIGHT)
def test_right_ports_are_equal(width: int, optimizer: Change, more: str, checked: Checked) -> None:
    report = checked(*wide(width), optimizer, more=more, numerics=True)
    assert report.verdict == "equal", report
    assert report.stages["update"].tensors["wide.weight"][0] == (width, width)
    assert report.free_running["params"].residuals[-1] > 0  # it moved


@pytest.mark.parametrize(("width", "changes", "more", "stage", "names"), WRONG.values(), ids=WRONG)
def test_faults_are_named(
    width: int, changes: list[Change], more: str, stage: str, names: set[str], checked: Checked
) -> None:
    (found,) = checked(*wide(width), *changes, more=more).differences
    assert found.stage == stage and found.cause is not None and set(found.cause.names) == names, found


def test_a_gradient_that_differs_outside_of_the_excerpt_is_found(checked: Checked) -> None:
    assert WIDE % distance((WIDE, WIDE))  # so that the excerpt has no element [1, 0] of torch's weight
    wrong = (
        "    import jax\n"
        "    element = model.wide.kernel[...][0, 1]\n"
        "    return 0.01 * (element - jax.lax.stop_gradient(element)) + cross_entropy"
    )
    report = checked(*wide(WIDE), ("    return cross_entropy", wrong))
    (found,) = report.differences
    assert (found.stage, found.tensor) == ("local_gradients", "wide.weight")


PARAMETERS = 2000
MANY = f"""
import jax.numpy as jnp, numpy as np, torch

class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.ParameterList([torch.randn(3) for _ in range({PARAMETERS})])

    def forward(self, x):
        return (torch.stack([*self.w]).sum(0) * x).sum(-1)

torch_model = Sum
torch_loss = lambda model, batch: (model(batch["x"]) ** 2).mean()
jax_model = lambda: {{"w": {{str(i): np.zeros(3) for i in range({PARAMETERS})}}}}
optimizer, lr = "sgd", 1e-4
batch = lambda step, rank: {{"x": np.random.default_rng((step, rank)).normal(size=(8, 3))}}

def jax_loss(params, batch):
    weights = jnp.stack([params["w"][str(i)] for i in range({PARAMETERS})])
    return ((weights.sum(0) * batch["x"]).sum(-1) ** 2).SCALED.mean()
"""


@pytest.mark.parametrize(("scale", "verdict"), [("__mul__(1)", "equal"), ("__mul__(1 + 1e-6)", "different")])
def test_a_check_of_many_small_parameters_ends(scale: str, verdict: str, tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(MANY.replace("SCALED", scale))
    report = check(PortFile(str(tmp_path / "port.py")), steps=2, numerics=False)
    assert report.verdict == verdict and not report.problems
    assert len(report.stages["update"].tensors) == PARAMETERS
