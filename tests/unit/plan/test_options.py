"""Flags of the plan: what they allow, and the line that refuses the rest."""

import textwrap
from pathlib import Path

import jax
import pytest

from jaxddp import cli
from jaxddp.errors import InputError
from jaxddp.nn.functional import Functional
from jaxddp.plan import topology
from jaxddp.plan.hardware import GPUS
from jaxddp.plan.options import PlanOptions
from jaxddp.plan.presets import GPT2, ResNet50
from jaxddp.plan.sources import workload_of
from jaxddp.plan.workload import nbytes

SCRIPT = """
import numpy as np
import optax
from flax import linen, nnx

def flax_model():
    return MODEL

def flax_loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()

flax_optimizer = optax.adamw(1e-3)
accumulation_steps = 2

def batch(step, rank):
    return {"x": np.ones((6, 8), np.float32), "y": np.ones((6, 4), np.float64)}
"""


def parsed(*argv: str) -> PlanOptions:
    return cli.parse_plain(PlanOptions, argv, "plan", PlanOptions())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--gpu h1000", "--gpu h1000: unknown; did you mean h100?"),
        ("--gpus 9", "--gpus 9: must be 1, 2, 4 or 8"),
        ("--nodes 0", "--nodes 0: must be from 1 to 128"),
        ("--batch-size 0", "--batch-size 0: must be at least 1"),
        ("--model gpt3", "--model gpt3: unknown; did you mean gpt2-124m?"),
        ("--measured -1", "--measured -1.0: must be a number of seconds above 0"),
        ("--measured nan", "--measured nan: must be a number of seconds above 0"),
        ("--picture nowhere/a.png", "nowhere/a.png: folder nowhere does not exist"),
        ("--nesterov", "--nesterov: only for --optimizer sgd, not adam"),
        ("--lr -1", "--lr -1.0: must be"),
        ("a.py --model mlp", "a.py: no such file"),
        ("a.py --model resnet50", "--model resnet50: must not be given with a.py, which has a model"),
        ("--gpus x", "--gpus x: expected INT"),
        ("--global-batch-size 33", "--global-batch-size 33: must be divisible by 8 replicas"),
        ("--batch-size 3 --accumulation-steps 2", "--batch-size 3: must be a multiple of --accumulation-steps 2"),
        ("--shard-optimizer", "--shard-optimizer: cannot be planned yet"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(argv: str, message: str) -> None:
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        workload_of(parsed(*argv.split())).state(8)
    assert str(error.value).startswith(message)


def test_the_trainers_flags_reach_the_step() -> None:
    flags = "--model convnet --optimizer sgd --momentum 0.9 --amp bf16 --clip-grad-norm 1 --accumulation-steps 2"
    options = parsed(*flags.split(), "--batch-size", "6")
    workload = workload_of(options)
    assert workload.replica_step.clip_grad_norm == 1 and workload.batch_size == 6
    assert workload.matmul_precision == "highest"  # as the trainer multiplies
    assert nbytes(workload.state(1).opt_state) >= nbytes(workload.params)


def test_fields_that_differ_between_replicas_get_an_axis() -> None:
    state = workload_of(parsed("--comm-hook", "powerSGD")).state(8)
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(state.comm_state)}
    assert sizes == {8} and state.params["layers.0.kernel"].shape == (64, 128)


@pytest.mark.parametrize(
    ("model", "parameters"),
    # 124,439,808 with a vocabulary of 50,257, and 47 more rows; 25,557,032 as in torchvision.
    [(GPT2, 124_439_808 + 47 * 768), (ResNet50, 25_557_032)],
)
def test_presets_have_as_many_parameters_as_the_models_of_their_names(model: type, parameters: int) -> None:
    shapes = Functional(model()).params
    assert sum(leaf.size for leaf in shapes.values()) == parameters


@pytest.mark.parametrize("model", ["nnx.Linear(8, 4, rngs=nnx.Rngs(0))", "linen.Dense(4)"])
def test_a_script_names_its_parts_as_a_port_file_does(model: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT.replace("MODEL", model))
    workload = workload_of(parsed(str(path)))
    assert (workload.name, workload.batch_size, workload.accumulation_steps) == ("mine.py", 6, 2)
    assert workload.example["x"].shape == (8,) and workload.example["y"].dtype == "float32"
    assert nbytes(workload.params) == 4 * (8 * 4 + 4)
    assert workload_of(parsed(str(path), "--batch-size", "10")).batch_size == 10


def test_a_script_may_have_a_plain_tree_of_arrays(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    script = SCRIPT.replace("MODEL", '{"w": np.zeros((8, 4), np.float32)}')
    path.write_text(script.replace('model(batch["x"])', 'batch["x"] @ model["w"]'))
    assert nbytes(workload_of(parsed(str(path))).params) == 4 * 8 * 4


@pytest.mark.parametrize(
    ("fault", "replacement", "message"),
    [
        ("def batch(", "def batches(", "batch: must be a function, and is NoneType"),
        ("def flax_model(", "def model(", "flax_model: must be a function, and is NoneType"),
        ("return MODEL", "return 3", "flax_model: must return a flax.nnx or flax.linen module, or a tree of arrays"),
        ("return MODEL", "return 1 / 0", "line 7: ZeroDivisionError: division by zero"),
        ("flax_optimizer = optax.adamw(1e-3)", "optimizer = 'adan'", "optimizer adan: unknown; did you mean adam?"),
    ],
)
def test_a_faulty_script_is_one_line(fault: str, replacement: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(SCRIPT).replace(fault, replacement).replace("MODEL", "linen.Dense(4)"))
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        workload_of(parsed(str(path)))
    assert message in str(error.value)


def test_a_missing_plugin_is_one_line_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "PLUGIN", tmp_path / "nowhere")
    monkeypatch.setattr(topology, "_names", list)
    with pytest.raises(InputError, match=r"plugin is missing; .*pip install --no-deps --target .*nowhere") as error:
        topology.gpus(GPUS["h100"], 8, 1)
    assert "\n" not in str(error.value)
