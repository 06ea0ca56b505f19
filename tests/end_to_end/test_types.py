"""Types of parameters, buffers, moments and losses that a port's two halves hold as written."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxddp.parity.checking import check
from jaxddp.parity.report.report import Report
from jaxddp.parity.report.sentences import sentences
from jaxddp.parity.workers import Workers

# A tree of arrays, and a loss and a state beside it.
PLAIN = """
import jax, numpy as np, optax, torch
from jax import numpy as jnp

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((3, 4), (4,)))
        self.register_buffer("scale", torch.full((4,), 2.0))
def torch_model(): return Net()
def torch_loss(m, b): return ((b["x"] @ m.w + m.b) * m.scale - 1).square().mean()
def jax_model():
    params = {"w": jnp.zeros((3, 4)), "b": jnp.zeros(4)}
    return params, {"scale": jnp.full(4, 2.0)}
def jax_loss(params, state, b):
    return jnp.square((b["x"] @ params["w"] + params["b"]) * state["scale"] - 1).mean(), state
torch_optimizer = lambda p: torch.optim.Adam(p, lr=1e-2)
jax_optimizer = optax.adam(1e-2)
def batch(step, rank): return {"x": np.random.default_rng((step, rank)).normal(size=(6, 3))}
"""
LAYERS = """
import jax, numpy as np, optax, torch
from flax import nnx
from jax import numpy as jnp
names = {"layers": ""}
def torch_model(): return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
def torch_loss(m, b):
    return m(b["x"]).square().mean()
def jax_model():
    rngs = nnx.Rngs(0)
    first = nnx.Linear(3, 4, rngs=rngs)
    second = nnx.Linear(4, 2, rngs=rngs)
    return nnx.Sequential(first, second)
def jax_loss(m, b): return jnp.square(m(b["x"])).mean()
torch_optimizer = lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)
jax_optimizer = optax.sgd(1e-2, momentum=0.9)
def batch(step, rank): return {"x": np.random.default_rng((step, rank)).normal(size=(6, 3))}
"""
WITH_ORDER = """
def with_order(module):
    module[1].register_buffer("order", torch.arange(3))
    return module
torch.nn.Sequential.with_order = with_order
"""
SECOND = "nnx.Linear(4, 2, rngs=rngs)"


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Yield processes that all tests share, in the order of this file, so that a port's settings may leak."""
    with Workers(1, "cpu") as workers:
        yield workers


def report_on(folder: Path, workers: Workers, text: str, *edits: tuple[str, str]) -> Report:
    """Check a port with some of its text replaced."""
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    (folder / "port.py").write_text(text)
    return check(folder / "port.py", world_size=1, steps=1, numerics=False, causes=False, quick=True, workers=workers)


def says(report: Report) -> list[str]:
    return [sentences(cause)[0] for difference in report.differences if (cause := difference.cause)]


SAME = {
    "as written": (PLAIN,),
    "layers": (LAYERS,),
    "NumPy's float64 in a tree": (PLAIN, ('"w": jnp.zeros((3, 4))', '"w": np.zeros((3, 4))')),
    "NumPy's float64 in torch's loss": (
        PLAIN,
        ("* m.scale - 1)", "* m.scale - torch.tensor(np.ones(4)))"),
    ),
    "integers of another width": (
        LAYERS,
        ("torch.nn.Linear(4, 2))", "torch.nn.Linear(4, 2)).with_order()"),
        ("def torch_model", f"{WITH_ORDER}def torch_model"),
        (f"second = {SECOND}", f"second = {SECOND}\n    second.order = nnx.Variable(jnp.arange(3))"),
    ),
    "64 bits on both sides": (
        PLAIN,
        ("class Net", 'jax.config.update("jax_enable_x64", True)\ntorch.set_default_dtype(torch.float64)\nclass Net'),
    ),
    "16 bits on both sides": (
        PLAIN.replace('b["x"]', 'b["x"].astype(jnp.bfloat16)'),
        ("torch.randn(*shape)", "torch.randn(*shape).bfloat16()"),
        ("torch.full((4,), 2.0)", "torch.full((4,), 2.0).bfloat16()"),
        ('((b["x"].astype(jnp.bfloat16) @ m.w', '((b["x"].to(m.w.dtype) @ m.w'),
        ("jnp.zeros((3, 4))", "jnp.zeros((3, 4), jnp.bfloat16)"),
        ("jnp.zeros(4)", "jnp.zeros(4, jnp.bfloat16)"),
        ("jnp.full(4, 2.0)", "jnp.full(4, 2.0, jnp.bfloat16)"),
    ),
}
OTHERS = {
    "one bias": (
        [LAYERS, (f"second = {SECOND}", f"second = {SECOND}\n    second.bias = nnx.Param(jnp.zeros(2, jnp.bfloat16))")],
        "1.bias: bfloat16 in jax, float32 in torch",
        "second.bias =",
    ),
    "a layer": (
        [LAYERS, (SECOND, "nnx.Linear(4, 2, rngs=rngs, param_dtype=jnp.float16)")],
        "1.weight and 1 other: float16 in jax, float32 in torch",
        "second = nnx",
    ),
    "the first moment": (
        [PLAIN, ("optax.adam(1e-2)", "optax.chain(optax.adam(1e-2, mu_dtype=jnp.bfloat16))")],
        "w (exp_avg) and 1 other: bfloat16 in jax, float32 in torch",
        "jax_optimizer =",
    ),
    "the momentum": (
        [LAYERS, ("momentum=0.9)\ndef", 'momentum=0.9, accumulator_dtype="float16")\ndef')],
        "0.weight (momentum_buffer) and 3 others: float16 in jax, float32 in torch",
        "jax_optimizer =",
    ),
    "a buffer": (
        [PLAIN, ("jnp.full(4, 2.0)", "jnp.full(4, 2.0, jnp.bfloat16)")],
        "scale: bfloat16 in jax, float32 in torch",
        "def jax_model",
    ),
    "the loss": (
        [PLAIN, ("- 1).mean(), state", "- 1).mean().astype(jnp.bfloat16), state")],
        "loss: bfloat16 in jax, float32 in torch",
        "def jax_loss",
    ),
    "64 bits in jax": (
        [PLAIN, ("class Net", 'jax.config.update("jax_enable_x64", True)\nclass Net')],
        "b and 1 other: float64 in jax, float32 in torch",
        "def jax_model",
    ),
    "64 bits in torch": (
        [PLAIN, ("class Net", "torch.set_default_dtype(torch.float64)\nclass Net")],
        "b and 1 other: float32 in jax, float64 in torch",
        "def jax_model",
    ),
    "64 bits in torch's loss": (
        [PLAIN, ("* m.scale - 1)", "* m.scale - 1).double()")],
        "loss: float32 in jax, float64 in torch",
        "def jax_loss",
    ),
    "64 bits in a layer of torch": (
        [
            LAYERS,
            ("torch.nn.Linear(4, 2)", "torch.nn.Linear(4, 2).double()"),
            ('m(b["x"]).s', 'm(b["x"].to(m[0].weight)).s'),
        ],
        "1.weight and 1 other: float32 in jax, float64 in torch",
        "second = nnx",
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_types_are_equal(name: str, tmp_path: Path, workers: Workers) -> None:
    report = report_on(tmp_path, workers, *SAME[name])
    assert report.aspects["types"].verdict == "equal", str(report)
    assert not [difference for difference in report.differences if difference.stage == "types"]


@pytest.mark.parametrize("name", OTHERS)
def test_another_type_is_a_difference_at_its_line(name: str, tmp_path: Path, workers: Workers) -> None:
    edits, words, code = OTHERS[name]
    report = report_on(tmp_path, workers, *edits)
    assert report.exit_code() == 1 and report.aspects["types"].verdict == "differs"
    assert says(report)[0] == words
    cause = report.differences[0].cause
    assert cause is not None and cause.jax is not None and cause.jax.itself.startswith(code)


def test_what_a_port_sets_for_all_of_jax_and_torch_does_not_reach_the_next(tmp_path: Path, workers: Workers) -> None:
    sets = 'jax.config.update("jax_enable_x64", True)\ntorch.set_default_dtype(torch.float64)\n'
    verdicts = []
    for place, text in enumerate([PLAIN, f"import jax, torch\n{sets}{LAYERS}", PLAIN]):
        folder = tmp_path / str(place)
        folder.mkdir()
        verdicts.append(report_on(folder, workers, text).verdict)
    # nnx.Linear is in float32 also with 64 bits
    assert verdicts == ["equal", "different", "equal"]


def test_a_module_beside_the_port_may_set_64_bits_for_a_second_check_too(tmp_path: Path, workers: Workers) -> None:
    (tmp_path / "settings.py").write_text('import jax\njax.config.update("jax_enable_x64", True)\n')
    first = report_on(tmp_path, workers, f"import settings\n{PLAIN}")
    second = check(
        tmp_path / "port.py", world_size=1, steps=1, numerics=False, causes=False, quick=True, workers=workers
    )
    assert says(first)[0] == says(second)[0] == "b and 1 other: float64 in jax, float32 in torch"


def test_what_acts_on_gpus_only_is_said(tmp_path: Path, workers: Workers) -> None:
    report = report_on(
        tmp_path,
        workers,
        LAYERS,
        ("names =", "torch.set_float32_matmul_precision('high')\nnames ="),
        ('return m(b["x"]).s', 'with torch.autocast("cuda", torch.bfloat16):\n        return m(b["x"]).s'),
    )
    assert report.verdict == "equal"
    assert "products of float32 matrices on GPUs: TensorFloat32 in torch, nothing in jax" in " ".join(report.idle)
    assert "under autocast to bfloat16" in " ".join(report.idle)
    assert "products of float32" not in str(report_on(tmp_path, workers, LAYERS))


def test_a_parameter_that_a_loss_of_nnx_sets_is_said(tmp_path: Path, workers: Workers) -> None:
    normed = (
        'return m(b["x"])',
        'return torch.func.functional_call(m, {"0.weight": m[0].weight / m[0].weight.norm()}, b["x"])',
    )
    writes = (
        'jax_loss(m, b): return jnp.square(m(b["x"])).mean()\n',
        """jax_loss(m, b):
    m.layers[0].kernel[...] = m.layers[0].kernel / jnp.linalg.norm(m.layers[0].kernel)
    return jnp.square(m(b["x"])).mean()
""",
    )
    report = report_on(tmp_path, workers, LAYERS, normed, writes)
    assert report.verdict == "equal", str(report)
    assert "jax's loss sets the parameter layers.0.kernel. A loop of flax.nnx keeps" in " ".join(report.idle)
    for jax_loss in ('m(b["x"])', 'nnx.remat(lambda m, x: m(x))(m, b["x"])', 'nnx.jit(lambda m, x: m(x))(m, b["x"])'):
        right = report_on(tmp_path, workers, LAYERS, ('jnp.square(m(b["x"]))', f"jnp.square({jax_loss})"))
        assert right.verdict == "equal" and "jax's loss sets" not in str(right)
