"""Ports whose JAX half is a function of a tree of arrays, as in Equinox and Haiku, from end to end."""

import pytest

from tests.support.checks import Checked
from tests.support.small_port import PORT, Change, own_optimizers, replaced, step

MODEL = PORT[PORT.index("def jax_model") : PORT.index("def torch_loss")]
LOSS = PORT[PORT.index("def jax_loss") : PORT.index("def batch")]

# A registered dataclass: the arrays are leaves beside a function, a number and a static field.
EQUINOX = """
import dataclasses, jax
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    weight: jax.Array
    bias: jax.Array
    size: int = dataclasses.field(metadata={"static": True})
    def __call__(self, x):
        return self.weight @ x + self.bias

@jax.tree_util.register_dataclass
@dataclasses.dataclass
class FlaxNet:
    fc1: Linear
    fc2: Linear
    act: object
    scale: float = 1.0
    def __call__(self, x):
        return self.fc2(self.act(self.fc1(x))) * self.scale

def jax_model():
    zeros = jax.numpy.zeros
    return FlaxNet(Linear(zeros((5, 3)), zeros(5), 3), Linear(zeros((4, 5)), zeros(4), 5), jax.numpy.tanh)

def jax_loss(model, batch):
    return cross_entropy(jax.vmap(model)(batch["x"]), batch["y"]).mean()

"""
HAIKU = """
import jax
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

def jax_model():
    zeros = jax.numpy.zeros
    of_sizes = {"net/~/linear_1": (3, 5), "net/~/linear": (5, 4)}
    return {name: {"w": zeros(shape), "b": zeros(shape[1])} for name, shape in of_sizes.items()}

def jax_loss(params, batch):
    one, two = params["net/~/linear_1"], params["net/~/linear"]
    return cross_entropy(jax.numpy.tanh(batch["x"] @ one["w"] + one["b"]) @ two["w"] + two["b"], batch["y"]).mean()

"""
NAMES = 'names = {"net.linear_1": "fc1", "net.linear": "fc2"}\n'
# A state that is carried: running statistics, and a counter that says whether there are any yet.
STATE = """
import jax
from jax import numpy as jnp
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

def jax_model():
    fc1, fc2 = ({"w": jnp.zeros(shape), "b": jnp.zeros(shape[1])} for shape in ((3, 5), (5, 4)))
    bn = {"scale": jnp.ones(5), "offset": jnp.zeros(5)}
    return {"fc1": fc1, "bn": bn, "fc2": fc2}, {"bn": {"mean": jnp.zeros(5), "var": jnp.ones(5), "steps": jnp.int32(0)}}

def jax_loss(params, state, batch):
    fc1, bn, fc2 = params["fc1"], params["bn"], params["fc2"]
    x = batch["x"] @ fc1["w"] + fc1["b"]
    mean, var = x.mean(0), x.var(0)
    old = state["bn"]
    state = {"bn": {
        "mean": 0.9 * old["mean"] + 0.1 * mean,
        "var": 0.9 * old["var"] + 0.1 * var * len(x) / (len(x) - 1),
        "steps": old["steps"] + 1,
    }}
    x = (x - mean) / jnp.sqrt(var + 1e-5) * bn["scale"] + bn["offset"]
    return cross_entropy(jnp.tanh(x) @ fc2["w"] + fc2["b"], batch["y"]).mean(), state

"""
BATCH_NORM = [
    ("torch.nn.Linear(3, 5)", "torch.nn.Linear(3, 5)\n        self.bn = torch.nn.BatchNorm1d(5)"),
    ("torch.tanh(self.fc1(x))", "torch.tanh(self.bn(self.fc1(x)))"),
]


def program(text: str, *changes: Change) -> list[Change]:
    """Return the changes that make a program the port's JAX half, with pieces of it replaced."""
    return [(MODEL, ""), (LOSS, replaced(text, *changes))]


# A cumulative mean, which depends on the state's counter.
CUMULATIVE = (
    program(STATE, ("0.9 * old", "(1 - 1.0 / (old['steps'] + 1)) * old"), ("0.1 * ", "1.0 / (old['steps'] + 1) * ")),
    [(old, new.replace("BatchNorm1d(5)", "BatchNorm1d(5, momentum=None)")) for old, new in BATCH_NORM],
)
# The rule reads the tree as the program's own optimizer sees it.
MATRICES_DECAY = own_optimizers(
    "SGD([{'params': [p], 'weight_decay': 0.1 * (p.ndim > 1)} for p in parameters], lr=0.1, momentum=0.9)",
    """optax.chain(
    optax.add_decayed_weights(0.1, lambda params: jax.tree.map(lambda x: x.ndim > 1, RULE)),
    optax.sgd(0.1, momentum=0.9),
)""",
)
OF_RANK_0 = (
    "params, buffers, opt_state)",
    'params, jax.tree.map(lambda x: jax.lax.all_gather(x, "replica")[0], buffers), opt_state)',
)


def decaying(rule: str) -> Change:
    old, new = MATRICES_DECAY
    return old, new.replace("RULE", rule)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ([*program(EQUINOX), decaying("params")], ""),
        (program(HAIKU), NAMES),
        ([*program(STATE), *BATCH_NORM], ""),
        ([*program(HAIKU), decaying("{**params}")], NAMES + step()),
        ([*program(STATE), *BATCH_NORM], step(OF_RANK_0)),
        ([*CUMULATIVE[0], *CUMULATIVE[1]], ""),
    ],
    ids=["equinox", "haiku", "state", "own step", "state and own step", "state with a counter"],
)
def test_right_programs_are_equal(changes: list[Change], more: str, checked: Checked) -> None:
    report = checked(*changes, more=more)
    assert report.verdict == "equal", report
    assert {"local_loss", "local_gradients", "gradients", "update"} <= report.stages.keys()
    assert ("buffers" in report.stages) == any("BatchNorm1d" in new for _, new in changes)


# Program, more of the port, stage that differs; the fault's name.
WRONG = {
    "equinox": (program(EQUINOX, ("jax.numpy.tanh)", "jax.nn.gelu)")), "", "local_loss", "gelu_approximation"),
    "haiku": (program(HAIKU, (".mean()\n", ".sum()\n")), NAMES, "local_loss", "loss_scale"),
    "state": ([*program(STATE, (" * len(x) / (len(x) - 1)", "")), *BATCH_NORM], "", "buffers", "biased_variance"),
    "state and own step": ([*program(STATE), *BATCH_NORM], step(), "buffers", "buffers_local"),
    "psum": (program(EQUINOX), step(("jax.lax.pmean", "jax.lax.psum")), "gradients", "sum_not_mean"),
}
GELU = ("torch.tanh(", "F.gelu(")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("changes", "more", "stage", "name"), [pytest.param(*wrong, id=name) for name, wrong in WRONG.items()]
)
def test_a_fault_in_a_program_is_named(
    changes: list[Change], more: str, stage: str, name: str, checked: Checked
) -> None:
    report = checked(*changes, *([GELU] if "gelu" in name else []), more=more)
    assert report.verdict == "different" and not report.problems
    (found,) = report.differences
    assert found.stage == stage and found.cause is not None and name in found.cause.names, report


def test_names_of_a_program_are_proposed_in_the_order_of_use(failing: Checked) -> None:
    """jax sorts the keys of dictionaries, which puts "linear" before "linear_1"; both layers have as many elements."""
    same = [("(3, 5)", "(4, 4)"), ("(5, 4)", "(4, 4)"), ("(12, 3)", "(12, 4)")]
    torch = [("torch.nn.Linear(3, 5)", "torch.nn.Linear(4, 4)"), ("torch.nn.Linear(5, 4)", "torch.nn.Linear(4, 4)")]
    report = failing(*program(HAIKU, *same[:2]), *torch, same[2])
    assert report.names == {"net.linear_1": "fc1", "net.linear": "fc2"}
    (problem,) = report.problems
    assert "jax's net.linear.w (4, 4) has no twin in torch, net.linear.weight is not there" in problem.message


# Optimizers as programs have them: of the model on torch's side, of nnx on jax's.
ADAMW = """
def configure_optimizers(model):
    decays = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

def jax_optimizer(model):
    import optax
    from flax import nnx
    rate = optax.exponential_decay(0.01, 1, 0.5)
    kernels = lambda params: __import__("jax").tree.map(lambda x: x.ndim > 1, params)
    return nnx.Optimizer(model, optax.adamw(rate, weight_decay=0.1, mask=kernels), wrt=nnx.Param)
"""


def optimizers(*changes: Change) -> Change:
    (_, text) = program(ADAMW, *changes)[1]
    return 'optimizer = "sgd"\n', text


def test_optimizers_of_the_model_are_compared(checked: Checked) -> None:
    assert checked(optimizers()).verdict == "equal"
    report = checked(optimizers(("weight_decay=0.1, mask", "weight_decay=0.01, mask")))
    (found,) = report.differences
    assert found.stage == "update" and found.cause is not None and "decay_value" in found.cause.names, report


@pytest.mark.parametrize(
    ("change", "side", "message"),
    [
        (("wrt=nnx.Param", "wrt=nnx.Variable"), "jax", "jax_optimizer: its wrt is Variable; must be nnx.Param"),
        (
            ("def configure_optimizers(model)", "def torch_optimizer(model)"),
            "torch",
            "torch_optimizer: is given the list of parameters, which has no parameters; for a function of the model",
        ),
    ],
)
def test_a_mistaken_optimizer_is_told_in_a_line(change: Change, side: str, message: str, failing: Checked) -> None:
    report = failing(optimizers(change))
    (problem,) = report.problems
    assert problem.side == side and problem.message.startswith(message)


BATCH = 'return {"x": rng.normal(1, 1, (12, 3)), "y": rng.integers(0, 4, 12)}'
LOSSES = (
    'return F.cross_entropy(model(batch["x"]), batch["y"])',
    'return cross_entropy(model(batch["x"]), batch["y"]).mean()',
)


def batches(batch: str, x: str, y: str) -> list[Change]:
    """Return the changes to a batch of another form, whose inputs and labels are these expressions of it."""
    of_losses = [(loss, loss.replace('batch["x"]', x).replace('batch["y"]', y)) for loss in LOSSES]
    return [(BATCH, f"return {batch}"), *of_losses]


NESTED = batches(
    '{"text": ["a"] * 12, "mask": None, "inputs": {"x": torch.from_numpy(rng.normal(1, 1, (12, 3)))}, '
    '"labels": {"y": rng.integers(0, 4, 12).tolist()}}',
    'batch["inputs"]["x" if batch["mask"] is None else ""]',
    'batch["labels"]["y"]',
)
# Sums of pixels wrap around at 256 on both sides.
IMAGES = batches(
    '{"x": rng.integers(0, 256, (12, 3, 2)).astype("uint8"), "y": rng.integers(0, 4, 12).astype("uint8")}',
    '(batch["x"][..., 0] + batch["x"][..., 1]) / 255',
    'batch["y"]',
)
# Rows of bytes are integers on both sides, whose sums do not wrap around.
BYTES = batches(
    '{"x": rng.integers(0, 256, (12, 6)).astype("uint8"), "y": rng.integers(0, 4, 12)}',
    '(batch["x"][:, :3] + batch["x"][:, 3:]) / 255',
    'batch["y"]',
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("changes", [NESTED, IMAGES, BYTES], ids=["nested", "images of uint8", "rows of uint8"])
def test_batches_of_other_forms_are_given_to_both_losses(changes: list[Change], checked: Checked) -> None:
    assert checked(*changes, more="accumulation_steps = 2\n").verdict == "equal"
    (old, new) = changes[2]
    report = checked(*changes[:2], (old, new.replace(".mean()", ".sum()")), more="accumulation_steps = 2\n")
    (found,) = report.differences
    assert found.cause is not None and found.cause.names == ("loss_scale",), report
