"""Draws of a port's weights on both sides, from its file: keys of all kinds, trees, and what no key reaches."""

from pathlib import Path

import numpy as np
import pytest

from jaxddp.parity.cases import PortCase
from jaxddp.parity.compare.initialisation import is_one_sample, varies
from jaxddp.parity.coverage import Aspect
from jaxddp.parity.initial_draws import DrawnTensor
from jaxddp.parity.initialisation import compared
from jaxddp.parity.jax_side.initial_weights import JaxInitialWeights
from jaxddp.parity.port import PortFile
from jaxddp.parity.torch_side.initial_weights import TorchInitialWeights
from tests.support.small_port import LINEN, Change, replaced, write

Sides = tuple[dict[str, DrawnTensor], dict[str, DrawnTensor], tuple[str, ...]]

# Two layers of torch, all of whose weights are normal.
NORMAL = """
import numpy as np, torch

def torch_model():
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 30))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model

def batch(step, rank): return {"x": np.ones((4, 30))}
def torch_loss(model, batch): return model(batch["x"]).mean()
optimizer = "sgd"
SHAPES = {"0": {"weight": (40, 30), "bias": (40,)}, "1": {"weight": (30, 40), "bias": (30,)}}
def jax_loss(model, batch):
    x = batch["x"]
    for layer in model.values(): x = x @ layer["weight"].T + layer["bias"]
    return x.mean()
"""
TREE = """
import jax
def tree(key):
    keys = iter(jax.random.split(key, 4))
    return {n: {k: 0.3 * jax.random.normal(next(keys), s) for k, s in l.items()} for n, l in SHAPES.items()}
"""
OF_NUMPY = """
def tree(rng):
    return {n: {k: rng.normal(0, 0.3, s) for k, s in l.items()} for n, l in SHAPES.items()}
"""
STATE = "rng = np.random.RandomState(3)\n"
SET = "np.random.seed(3)\nrng = np.random\n"
OF_TORCH = "{n: {k: dict(torch_model().named_parameters())[f'{n}.{k}'].detach().numpy() for k in l} for n, l in "
RIGHT = {
    "nnx.Rngs": f"{TREE}from flax import nnx\ndef jax_model(): return tree(nnx.Rngs(0)())\n",
    "PRNGKey": f"{TREE}def jax_model(): return tree(jax.random.PRNGKey(0))\n",
    "a held key": f"from jax.random import key\n{TREE}MADE = key(0)\ndef jax_model(): return tree(MADE)\n",
    "a held tree": f"{TREE}MADE = tree(jax.random.key(0))\ndef jax_model(): return MADE\n",
    "jit": f"{TREE}def jax_model(): return jax.jit(lambda: tree(jax.random.key(0)))()\n",
    "jit of a key": f"{TREE}made = jax.jit(tree)\ndef jax_model(): return made(jax.random.key(0))\n",
    "default_rng": f"{OF_NUMPY}def jax_model(): return tree(np.random.default_rng(0))\n",
    "np.random.seed": f"{OF_NUMPY}{SET}def jax_model(): return tree(rng)\n",
    "RandomState": f"{OF_NUMPY}{STATE}MADE = tree(rng)\ndef jax_model(): return MADE\n",
    "torch": f"def jax_model():\n    torch.manual_seed(0)\n    return {OF_TORCH}SHAPES.items()}}\n",
}


def drawn(path: Path) -> Sides:
    """Return the draws of both sides, and the names of the parameters."""
    source = PortFile(str(path))
    of_torch, parameters = TorchInitialWeights(source, 8).run(None, lambda where: None)  # type: ignore[arg-type]
    return of_torch, JaxInitialWeights(PortCase(source, 1), source, 8).run(lambda where: None), parameters


def aspect(folder: Path, text: str, *changes: Change) -> Aspect:
    """Return the comparison of a port."""
    return compared(*drawn(write(folder, *changes, text=text)))


COMPILES = "jit"  # anew for each draw, which takes long


@pytest.mark.parametrize("way", [pytest.param(x, marks=[pytest.mark.large] * (x == COMPILES)) for x in RIGHT])
def test_other_keys_and_seeds_reach_the_weights(way: str, tmp_path: Path) -> None:
    torch, jax, parameters = drawn(write(tmp_path, text=NORMAL + RIGHT[way]))
    assert all(len(np.unique(x.values[:, 0])) == 8 for x in (*torch.values(), *jax.values()))
    assert compared(torch, jax, parameters) == Aspect("equal")


@pytest.mark.parametrize("way", ["nnx.Rngs", "a held tree", "RandomState"])
def test_a_deviation_that_is_a_fifth_larger_is_found(way: str, tmp_path: Path) -> None:
    text = replaced(
        NORMAL + RIGHT[way], ("0.3 *", "0.36 *") if "0.3 *" in RIGHT[way] else ("(0, 0.3, s)", "(0, 0.36, s)")
    )
    found = aspect(tmp_path, text)
    assert found.verdict == "differs" and found.residual > found.allowed == 7
    assert "torch normal(0.3); jax normal(0.36); normal(0.3) would do" in found.says[1]


def test_a_key_that_no_seed_makes_is_judged_by_one_sample(tmp_path: Path) -> None:
    raw = f"{TREE}import jax.numpy as jnp\ndef jax_model(): return tree(jnp.array([7, 9], dtype=jnp.uint32))\n"
    right = aspect(tmp_path, NORMAL + raw)
    assert right.verdict == "equal" and right.says[0].startswith("jax: one sample of 4 tensors was judged")
    wrong = aspect(tmp_path, NORMAL + raw, ("0.3 *", "0.6 *"))
    assert wrong.verdict == "differs" and "one sample of 4 tensors" in wrong.says[-1]


def test_a_generator_of_torch_with_a_constant_seed_is_one_sample(tmp_path: Path) -> None:
    generator = "made = torch.Generator().manual_seed(3)"
    change = [("std=0.3)", "std=0.3, generator=made)"), ("    for parameter", f"    {generator}\n    for parameter")]
    found = aspect(tmp_path, NORMAL + RIGHT["PRNGKey"], *change)
    assert found.verdict == "equal" and found.says[0].startswith("torch: one sample of 4 tensors")


def test_a_tree_of_zeros_has_no_initialisation(tmp_path: Path) -> None:
    found = aspect(
        tmp_path, f"{NORMAL}{TREE}def jax_model(): return jax.tree.map(lambda x: 0 * x, tree(jax.random.key(0)))\n"
    )
    assert found.verdict == "not compared" and "no initialisation" in found.says[0]


IMPORTS = ("flax import nnx", "flax import linen, nnx")
OF_LINEN = 'linen.Dense(4, name="fc2")(nnx.tanh(linen.Dense(50, name="fc1")(x)))'


@pytest.mark.parametrize("changes", [(), LINEN], ids=["nnx", "linen"])
def test_flax_layers_differ_from_those_of_torch_until_they_are_given_its_initialisers(
    changes: list[Change], tmp_path: Path
) -> None:
    text = write(tmp_path, *changes).read_text()
    for change in (("(3, 5", "(30, 50"), ("(5, 4", "(50, 4"), ("(12, 3)", "(12, 30)"), IMPORTS):
        text = text.replace(*change)
    text = text.replace("self.fc2(nnx.tanh(self.fc1(x)))", OF_LINEN) if changes else text
    found = aspect(tmp_path, text)
    assert found.says[0] == "From the same weights: 4 tensors are initialised otherwise." and len(found.says) == 3
    assert found.says[1].startswith("fc1.weight and 1 other: torch kaiming_uniform(a=sqrt(5)), deviation 0.10")
    assert "jax lecun_normal, deviation 0.18" in found.says[1]
    assert found.says[1].endswith('; variance_scaling(1/3, "fan_in", "uniform") would do.')
    assert found.says[2].startswith("fc1.bias and 1 other: torch uniform within 1/sqrt(fan_in), deviation ")
    given = """
    from jax.nn.initializers import variance_scaling
    import jax
    def uniform(fan): return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -(fan**-0.5), fan**-0.5)
    def given(fan): return {"kernel_init": variance_scaling(1 / 3, "fan_in", "uniform"), "bias_init": uniform(fan)}
"""
    text = text.replace("def jax_model():\n", f"def jax_model():{given}")
    calls = {"30, 50, rngs=rngs": 30, "50, 4, rngs=rngs": 50, '50, name="fc1"': 30, '4, name="fc2"': 50}
    for layer, fan in calls.items():
        text = text.replace(f"({layer})", f"({layer}, **given({fan}))")
    assert aspect(tmp_path, text) == Aspect("equal")


def test_a_stack_whose_members_come_from_one_key_is_found(tmp_path: Path) -> None:
    stacked = """
import numpy as np, torch, jax
def torch_model():
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(3))
    return torch.nn.ModuleDict({"layers": layers})
def torch_loss(model, batch):
    x = batch["x"]
    for layer in model["layers"]: x = torch.tanh(layer(x))
    return x.mean()
def batch(step, rank): return {"x": np.ones((4, 8))}
optimizer = "sgd"
names = {"layers": "layers.{}"}
def of(key): return jax.random.uniform(key, (8, 8), minval=-8**-0.5, maxval=8**-0.5)
def jax_model(): return {"layers": {"kernel": jax.vmap(of)(jax.random.split(jax.random.key(0), 3))}}
def jax_loss(model, batch):
    return jax.lax.scan(lambda x, w: (jax.numpy.tanh(x @ w), None), batch["x"], model["layers"]["kernel"])[0].mean()
"""
    assert aspect(tmp_path, stacked) == Aspect("equal")
    split = "jax.random.split(jax.random.key(0), 3)"
    alike = aspect(tmp_path, stacked, (split, "jax.numpy.stack([jax.random.key(0)] * 3)"))
    assert (
        alike.says[1] == "layers.0.weight: starts equal to layers.1.weight, layers.2.weight in jax, and not in torch."
    )
    odd = aspect(tmp_path, stacked, (f"jax.vmap(of)({split})", f"jax.vmap(of)({split}).at[1].multiply(1.5)"))
    assert odd.tensor == "layers.1.weight" and odd.says[0].startswith("From the same weights: 1 tensor is")


TIED = """
import numpy as np, torch, jax
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 10, padding_idx=2)
        self.head = torch.nn.Linear(10, 20, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, x): return self.head(self.embed(x))
def torch_model(): return Net()
def torch_loss(model, batch): return model(batch["x"]).mean()
def batch(step, rank): return {"x": np.arange(4)}
optimizer = "sgd"
def jax_model(): return {"embed": {"embedding": jax.random.normal(jax.random.key(0), (20, 10)).at[2].set(0.0)}}
def jax_loss(model, batch):
    table = model["embed"]["embedding"]
    return (table[batch["x"]] @ table.T).mean()
"""


def test_tied_weights_are_compared_once_and_a_padding_row_counts(tmp_path: Path) -> None:
    assert aspect(tmp_path, TIED) == Aspect("equal")
    found = aspect(tmp_path, TIED, (".at[2].set(0.0)", ""))
    assert found.says[1:] == ("embed.weight: row 2 is a constant only in torch.",)


def test_a_weight_that_a_file_loads_is_one_sample_and_a_table_a_constant(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.random.default_rng(1).normal(0, 0.3, (40, 30)))
    loads = f"MADE = np.load({str(tmp_path / 'w.npy')!r})\n"
    first = "{'0': tree(jax.random.key(5))['0'] | {'weight': MADE}}"
    right = f"{TREE}def jax_model(): return tree(jax.random.PRNGKey(0)) | {first}\n"
    torch, jax, parameters = drawn(write(tmp_path, text=NORMAL + loads + right))
    assert is_one_sample(jax["0.weight"]) and varies(jax["1.weight"])
    assert compared(torch, jax, parameters).verdict == "equal"


def test_a_table_that_differs_is_a_difference_and_no_sample(tmp_path: Path) -> None:
    text = """
import numpy as np, torch, jax
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.sin(torch.arange(4.0)))
    def forward(self, x): return x * self.scale + self.table
def torch_model(): return Net()
def torch_loss(model, batch): return model(batch["x"]).mean()
def batch(step, rank): return {"x": np.ones((3, 4))}
optimizer = "sgd"
def jax_model(): return {"scale": np.ones(4)}, {"table": np.sin(np.arange(4.0))}
def jax_loss(params, state, batch): return (batch["x"] * params["scale"] + state["table"]).mean(), state
"""
    assert aspect(tmp_path, text) == Aspect("equal")
    found = aspect(tmp_path, text, ("np.sin(np.arange(4.0))", "np.cos(np.arange(4.0))"))
    assert found.says == ("From the same weights: 1 tensor is initialised otherwise.", "table: the tables differ.")
