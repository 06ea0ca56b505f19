"""Flags of the plan: what they allow, and the line that refuses the rest."""

import textwrap
from pathlib import Path

import jax
import pytest

from jaxddp.config.hardware import GPUS
from jaxddp.errors import InputError
from jaxddp.nn.functional import Functional
from jaxddp.plan import topology
from jaxddp.plan.options import parse
from jaxddp.plan.presets import GPT2, ResNet50
from jaxddp.plan.sources import workload_of
from jaxddp.plan.workload import Workload, nbytes
from jaxddp.step.program_step import ProgramStep

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPT = """
import numpy as np
import optax
from flax import linen, nnx

def jax_model():
    return MODEL

def jax_loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()

jax_optimizer = optax.adamw(1e-3)
accumulation_steps = 2

def batch(step, rank):
    return {"x": np.ones((6, 8), np.float32), "y": np.ones((6, 4), np.float64)}
"""


def workload(*argv: str) -> Workload:
    return workload_of(*parse(argv, "plan"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--gpu h1000", "--gpu h1000: unknown; did you mean h100?"),
        ("--devices 9", "--devices 9: must be 1, 2, 4 or 8, or a multiple of 8"),
        ("--devices 6 --nodes 2", "--devices 6: must be 2, 4, 8, 16 on 2 nodes"),
        ("--devices 2048", "--devices 2048: must be at most 1024"),
        ("--nodes 0", "--nodes 0: must be from 1 to 128"),
        ("--batch-size 0", "--batch-size 0: must be at least 1"),
        ("--model gpt3", "--model gpt3: unknown; did you mean gpt2-124m?"),
        ("--measured -1", "--measured -1.0: must be a number of seconds above 0"),
        ("--measured nan", "--measured nan: must be a number of seconds above 0"),
        ("--picture nowhere/a.png", "--picture nowhere/a.png: folder nowhere does not exist"),
        ("--nesterov", "--nesterov: only for --optimizer sgd, not adam"),
        ("--lr -1", "--lr -1.0: must be"),
        ("a.py --model mlp", "a.py: no such file"),
        ("--devices x", "--devices x: expected INT"),
        ("--global-batch-size 33", "--global-batch-size 33: must be divisible by 8 replicas"),
        ("--batch-size 3 --accumulation-steps 2", "--batch-size 3: must be a multiple of --accumulation-steps 2"),
        ("--shard-optimizer", "--shard-optimizer: cannot be planned yet"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(argv: str, message: str) -> None:
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        workload(*argv.split()).state(8)
    assert str(error.value).startswith(message)


def test_the_trainers_flags_reach_the_step() -> None:
    flags = "--model convnet --optimizer sgd --momentum 0.9 --amp bf16 --clip-grad-norm 1 --accumulation-steps 2"
    planned = workload(*flags.split(), "--batch-size", "6")
    assert planned.replica_step.clip_grad_norm == 1 and planned.batch_size == 6
    assert planned.matmul_precision == "highest"  # as the trainer multiplies
    assert nbytes(planned.state(1).opt_state) >= nbytes(planned.params)


def test_fields_that_differ_between_replicas_get_an_axis() -> None:
    state = workload("--comm-hook", "powerSGD").state(8)
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
    planned = workload(str(path))
    assert (planned.name, planned.batch_size, planned.accumulation_steps) == ("mine.py", 6, 2)
    assert planned.example["x"].shape == (8,) and planned.example["y"].dtype == "float32"
    assert nbytes(planned.params) == 4 * (8 * 4 + 4)
    assert workload(str(path), "--batch-size", "10").batch_size == 10


def test_a_files_batch_is_rounded_up_for_more_gpus_than_it_has_examples() -> None:
    planned = workload(str(EXAMPLES / "mine.py"), "--devices", "64", "--accumulation-steps", "2")
    assert (planned.name, planned.batch_size) == ("mine.py  ·  global batch 128 in place of 32", 2)
    assert workload(str(EXAMPLES / "mine.py")).name == "mine.py"  # 4 on each of 8


def test_a_program_with_a_step_of_its_own_is_planned_by_it() -> None:
    planned = workload(str(EXAMPLES / "dqn.py"), "--transitions", "8", "--width", "2", "--global-batch-size", "16")
    assert isinstance(planned.replica_step, ProgramStep) and planned.batch_size == 2
    moments = [leaf for leaf in jax.tree.leaves(planned.state(1).opt_state) if leaf.shape == (64, 2)]
    assert len(moments) == 2  # Adam's, of the online network alone


def test_a_script_may_have_a_plain_tree_of_arrays(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    script = SCRIPT.replace("MODEL", '{"w": np.zeros((8, 4), np.float32)}')
    path.write_text(script.replace('model(batch["x"])', 'batch["x"] @ model["w"]'))
    assert nbytes(workload(str(path)).params) == 4 * 8 * 4


@pytest.mark.parametrize(
    ("fault", "replacement", "message"),
    [
        ("def batch(", "def batches(", "mine.py: has no train_data"),
        ("def jax_model(", "def model(", "mine.py: has no jax_model"),
        ("return MODEL", "return 3", "jax_model: must return a flax.nnx or flax.linen module, or a tree of arrays"),
        ("return MODEL", "return 1 / 0", "line 7: ZeroDivisionError: division by zero"),
        ("jax_optimizer = optax.adamw(1e-3)", "optimizer = 'adan'", "optimizer adan: unknown; did you mean adam?"),
    ],
)
def test_a_faulty_script_is_one_line(fault: str, replacement: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(SCRIPT).replace(fault, replacement).replace("MODEL", "linen.Dense(4)"))
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        workload(str(path))
    assert message in str(error.value)


def test_a_missing_plugin_is_one_line_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "PLUGIN", tmp_path / "nowhere")
    monkeypatch.setattr(topology, "_names", list)
    with pytest.raises(InputError, match=r"plugin is missing; .*pip install --no-deps --target .*nowhere") as error:
        topology.gpus(GPUS["h100"], 8, 1)
    assert "\n" not in str(error.value)
