"""python -m jaxddp.parity.convert: both ways, nothing lost, and one line for every kind of error."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load_file, save_file

from jaxddp.nn.functional import Functional
from jaxddp.parity.convert.__main__ import main
from jaxddp.parity.port import Port, load_port

PORT = """
import numpy as np, optax, torch
from flax import linen, nnx
from jaxddp.nn.layers import BatchNorm

class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, x):
        x = self.embed(x)
        return self.head(self.norm(self.attention(x, x, x)[0].sum(1)))

class FlaxNet(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(6, 4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.bn = NORM
    def __call__(self, x):
        return self.embed.attend(self.bn(self.attention(self.embed(x)).sum(1)))

class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        embed = linen.Embed(6, 4, name="embed")
        x = linen.MultiHeadDotProductAttention(2, name="attention")(embed(x))
        return embed.attend(linen.BatchNorm(False, name="bn")(x.sum(1)))

def torch_model(): return TorchNet()
def flax_model(): return MODEL
def torch_loss(model, batch): return model(batch["x"]).sum()
def flax_loss(model, batch): return model(batch["x"]).sum()
def batch(step, rank): return {"x": np.ones((2, 3), np.int32)}
optimizer = "sgd"
names = {"bn": "norm"}
"""
MODELS = {
    "nnx": {"MODEL": "FlaxNet(nnx.Rngs(0))", "NORM": "BatchNorm(4)"},
    "nnx, no counter": {"MODEL": "FlaxNet(nnx.Rngs(0))", "NORM": "nnx.BatchNorm(4, rngs=rngs)"},
    "linen": {"MODEL": "LinenNet()"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change into a folder with a port and its torch model's weights."""
    monkeypatch.chdir(tmp_path)
    port = write_port()
    safetensors.torch.save_file(weights(port), "torch.safetensors")
    return tmp_path


def write_port(model: str = "nnx") -> Port:
    text = PORT
    for word, code in MODELS[model].items():
        text = text.replace(word, code)
    Path("port.py").write_text(text)
    return load_port("port.py")


def weights(port: Port, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Make a state_dict of distinct values whose tensors share no memory."""
    module = port.torch_model().to(dtype)
    for number, tensor in enumerate(module.state_dict().values(), start=1):
        values = torch.arange(tensor.numel()).reshape(tensor.shape) + 100 * number
        tensor.copy_(values / 512 if tensor.is_floating_point() else values)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run the command, which must fail and write nothing, and return its one line of error."""
    before = sorted(path.name for path in Path().iterdir())
    with pytest.raises(SystemExit) as stop:
        main(argv)
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    assert sorted(path.name for path in Path().iterdir()) == before
    (line,) = captured.err.splitlines()
    return line.removeprefix("error: ")


@pytest.mark.one_in(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_round_trip_restores_the_file(model: str, dtype: torch.dtype, folder: Path) -> None:
    before = weights(write_port(model), dtype)
    safetensors.torch.save_file(before, "torch.safetensors")
    main(["port.py", "torch.safetensors", "flax.safetensors"])
    main(["port.py", "flax.safetensors", "back.safetensors"])
    after = safetensors.torch.load_file("back.safetensors")
    if model != "nnx":
        before["norm.num_batches_tracked"] = torch.tensor(0)  # flax has no counter, so it restarts at 0
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
    write_port().torch_model().load_state_dict(after, strict=True)


def test_the_flax_model_computes_the_same_with_the_converted_file(folder: Path) -> None:
    main(["port.py", "torch.safetensors", "flax.safetensors", "--to", "flax"])
    port, arrays = load_port("port.py"), load_file("flax.safetensors")
    functional = Functional(port.flax_model())
    wanted = functional.params | functional.buffers
    assert {name: (x.shape, x.dtype) for name, x in arrays.items()} == {
        name: (x.shape, x.dtype) for name, x in wanted.items()
    }
    params, buffers = ({name: arrays[name] for name in of} for of in (functional.params, functional.buffers))
    x = np.array([[0, 1, 5], [4, 2, 2]])
    module = port.torch_model()
    module.load_state_dict(safetensors.torch.load_file("torch.safetensors"))
    with torch.no_grad(), jax.default_matmul_precision("highest"):
        expected = module.train()(torch.from_numpy(x)).numpy()
        actual = functional.module(params, buffers)(x)
    assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max()  # float32; measured: 1.3e-5


def test_every_tensor_has_a_line_of_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["port.py", "torch.safetensors", "flax.safetensors"])
    lines = capsys.readouterr().out.splitlines()
    assert "embed.embedding (6, 4)  <-  embed.weight (6, 4)" in lines
    assert "attention.key.kernel (4, 2, 2)  <-  attention.in_proj_weight[4:8] (4, 4)" in lines
    assert "bn.mean (4,)  <-  norm.running_mean (4,)" in lines
    assert lines[-1] == "flax.safetensors: 14 arrays for flax, from 11 of torch.safetensors"
    assert len(lines) == 15
    main(["port.py", "flax.safetensors", "back.safetensors", "--quiet"])
    assert capsys.readouterr().out == "back.safetensors: 11 arrays for torch, from 14 of flax.safetensors\n"


def test_tied_tensors_may_have_one_name_in_the_file(folder: Path) -> None:
    tensors = load_file("torch.safetensors")
    main(["port.py", "torch.safetensors", "both.safetensors"])
    for name in ("embed.weight", "head.weight"):
        save_file({key: value for key, value in tensors.items() if key != name}, "one.safetensors")
        main(["port.py", "one.safetensors", f"without {name}.safetensors"])
        assert Path(f"without {name}.safetensors").read_bytes() == Path("both.safetensors").read_bytes()


UNTIED = PORT.replace(
    "self.bn = NORM", "self.bn = BatchNorm(4); self.head = nnx.Linear(4, 6, use_bias=False, rngs=rngs)"
)


def test_tensors_that_are_tied_in_torch_must_be_equal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file("torch.safetensors")
    save_file({**tensors, "head.weight": tensors["head.weight"] + 1}, "apart.safetensors")
    apart = "does not fit the model: head.weight differs from embed.weight, which is the same tensor in torch"
    assert fails(capsys, "port.py", "apart.safetensors", "out.safetensors") == f"apart.safetensors: {apart}"

    Path("port.py").write_text(UNTIED.replace("MODEL", "FlaxNet(nnx.Rngs(0))"))
    main(["port.py", "torch.safetensors", "flax.safetensors"])
    main(["port.py", "flax.safetensors", "back.safetensors"])
    arrays = load_file("flax.safetensors")
    save_file({**arrays, "head.kernel": arrays["head.kernel"] + 1}, "apart.safetensors")
    capsys.readouterr()
    assert fails(capsys, "port.py", "apart.safetensors", "out.safetensors") == f"apart.safetensors: {apart}"


CHANGES: list[tuple[str, Any, str]] = [
    ("norm.bias", None, "missing norm.bias"),
    ("norm.extra", np.zeros(2), "left over norm.extra"),
    ("norm.bias", np.zeros(5, np.float32), "norm.bias has shape (5,) and not (4,)"),
    ("norm.bias", np.zeros(4, np.int8), "norm.bias is int8 and not torch.float32"),
]


@pytest.mark.parametrize(("name", "value", "message"), CHANGES, ids=[message for *_, message in CHANGES])
def test_a_tensor_that_does_not_fit_is_reported(
    name: str, value: Any, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change("torch.safetensors", name, value)
    line = fails(capsys, "port.py", "torch.safetensors", "out.safetensors")
    assert line == f"torch.safetensors: does not fit the model: {message}"


def change(path: str, name: str, value: Any) -> None:
    tensors = load_file(path)
    changed = {**tensors, name: value}
    save_file({name: x for name, x in changed.items() if x is not None}, path)


def test_all_tensors_that_do_not_fit_are_reported_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["port.py", "torch.safetensors", "flax.safetensors", "--quiet"])
    capsys.readouterr()
    change("flax.safetensors", "bn.scale", None)
    change("flax.safetensors", "bn.bias", np.zeros((2, 2), np.float32))
    change("flax.safetensors", "cn.scale", np.zeros(2, np.float32))
    assert fails(capsys, "port.py", "flax.safetensors", "out.safetensors") == (
        "flax.safetensors: does not fit the model: bn.bias has shape (2, 2) and not (4,); left over cn.scale; "
        "missing bn.scale"
    )


def test_the_batch_counter_is_required_only_if_flax_has_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change("torch.safetensors", "norm.num_batches_tracked", None)
    line = fails(capsys, "port.py", "torch.safetensors", "out.safetensors")
    assert line.endswith(": missing norm.num_batches_tracked")
    write_port("linen")
    main(["port.py", "torch.safetensors", "flax.safetensors"])


SAME_NAMES = """
import numpy as np, torch
from flax import nnx

class FlaxNet(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(np.zeros(3))

def torch_model():
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.zeros(3))
    return module
def flax_model(): return FlaxNet()
def torch_loss(model, batch): return 0
def flax_loss(model, batch): return 0
def batch(step, rank): return {}
optimizer = "sgd"
"""


def test_names_common_to_both_models_need_the_flag(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("port.py").write_text(SAME_NAMES)
    save_file({"a": np.arange(3.0)}, "a.safetensors")
    line = fails(capsys, "port.py", "a.safetensors", "out.safetensors")
    assert line == "a.safetensors: 1 of its names are flax's, and as many are torch's; give --to"
    main(["port.py", "a.safetensors", "out.safetensors", "--to", "torch"])
    assert load_file("out.safetensors")["a"].tolist() == [0, 1, 2]


def test_names_of_neither_model_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"model.a": np.zeros(1), "model.b": np.zeros(1)}, "other.safetensors")
    line = fails(capsys, "port.py", "other.safetensors", "out.safetensors")
    assert line == "other.safetensors: has names of neither model (model.a; model.b)"


def test_an_existing_file_is_replaced_only_with_force(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out.safetensors").write_text("mine")
    line = fails(capsys, "port.py", "torch.safetensors", "out.safetensors")
    assert line == "out.safetensors: exists; --force replaces it"
    assert Path("out.safetensors").read_text() == "mine"
    main(["port.py", "torch.safetensors", "out.safetensors", "--force"])
    assert "embed.embedding" in load_file("out.safetensors")
    main(["port.py", "out.safetensors", "out.safetensors", "--force"])
    assert "embed.weight" in load_file("out.safetensors")


def test_a_failed_write_leaves_no_partial_file(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    line = fails(capsys, "port.py", "torch.safetensors", "out.safetensors")
    assert line == "out.safetensors.tmp: no space left on device"


ARRANGED = """
import numpy as np, torch
from flax import linen
from jaxddp.parity import flattened, part

class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 8) for _ in range(2)])
        self.fc = torch.nn.Linear(6, 2)

class Block(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return linen.Dense(4, name="a")(x) + linen.Dense(4, name="b")(x), None

class FlaxNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        scan = linen.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return scan(name="blocks")(x, None)[0], linen.Dense(2, name="fc")(x[:, :1].repeat(6, 1))

def torch_model(): return TorchNet()
def flax_model(): return FlaxNet()
def torch_loss(model, batch): return 0
def flax_loss(model, batch): return model(batch["x"])[0].sum()
def batch(step, rank): return {"x": np.ones((2, 4), np.float32)}
optimizer = "sgd"
names = {
    "blocks.a": part("layers.{}", 0, of=2),
    "blocks.b": part("layers.{}", 1, of=2),
    "fc": flattened("fc", (3, 2)),
}
"""


def test_stacks_parts_and_flattened_images_convert_both_ways(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("port.py").write_text(ARRANGED)
    before = weights(load_port("port.py"))
    safetensors.torch.save_file(before, "torch.safetensors")
    main(["port.py", "torch.safetensors", "flax.safetensors"])
    lines = capsys.readouterr().out.splitlines()
    assert "blocks.b.kernel[1] (4, 4)  <-  layers.1.weight[4:8] (4, 4)" in lines
    assert lines[-1] == "flax.safetensors: 6 arrays for flax, from 6 of torch.safetensors"
    arrays = load_file("flax.safetensors")
    np.testing.assert_array_equal(arrays["blocks.b.kernel"][1], before["layers.1.weight"][4:].T)
    np.testing.assert_array_equal(arrays["fc.kernel"][:, 1], before["fc.weight"][1].reshape(3, 2).T.ravel())
    main(["port.py", "flax.safetensors", "back.safetensors"])
    after = safetensors.torch.load_file("back.safetensors")
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_a_rule_that_does_not_fit_is_reported_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("port.py").write_text(ARRANGED.replace("1, of=2", "1, of=3"))
    safetensors.torch.save_file(weights(load_port("port.py")), "torch.safetensors")
    line = fails(capsys, "port.py", "torch.safetensors", "out.safetensors")
    assert line == (
        'names: "blocks.b": part("layers.{}", 1, of=3): torch\'s layers.0.bias has 8 outputs, which are not 3 parts'
    )
    Path("port.py").write_text(ARRANGED.replace('flattened("fc", (3, 2))', "3"))
    line = fails(capsys, "port.py", "torch.safetensors", "out.safetensors")
    assert line.startswith("port.py: names: 'fc': must be a name in torch, or fused, part, transposed, flattened; is 3")


class Runs:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (exec, ("from pathlib import Path; Path('ran').touch()",))


def test_code_in_a_weights_file_never_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("pickled.safetensors").write_bytes(pickle.dumps(Runs()))
    torch.save({"embed.weight": Runs()}, "torch.pt")
    for name in ("pickled.safetensors", "torch.pt", "none.safetensors"):
        line = fails(capsys, "port.py", name, "out.safetensors")
        assert line.startswith(f"{name}: not a readable safetensors file (")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("none.py torch.safetensors out", "none.py: no such file"),
        ("port.py torch.safetensors nowhere/out", "nowhere/out: folder nowhere does not exist"),
        ("port.py torch.safetensors out --to jax", "--to jax: unknown; did you mean"),
        ("port.py torch.safetensors out --fource", "--fource: unknown flag; did you mean --force?"),
        ("port.py torch.safetensors", "OUT.safetensors: missing; see --help"),
        ("", "PORT.py, WEIGHTS.safetensors, OUT.safetensors: missing; see --help"),
        ("a b c d", "d: unexpected argument; see --help"),
    ],
)
def test_a_bad_command_is_reported_in_one_line(
    argv: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails(capsys, *argv.split()).startswith(message)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("MODEL", "flax_model: must return a flax.nnx or flax.linen module, or a tree of arrays"),
        ("names", "names: flax's bn.scale (4,) has no twin in torch, bn.scale is not there; "),
        ("TorchNet()", "port.py: line 33: ZeroDivisionError: division by zero"),
    ],
)
def test_a_bad_port_is_reported_in_one_line(
    wrong: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PORT.replace("NORM", "BatchNorm(4)")
    text = {
        "MODEL": text.replace("MODEL", "3"),
        "names": text.replace("MODEL", "FlaxNet(nnx.Rngs(0))").replace('{"bn": "norm"}', "{}"),
        "TorchNet()": text.replace("MODEL", "FlaxNet(nnx.Rngs(0))").replace("return TorchNet()", "return 1 / 0"),
    }[wrong]
    Path("port.py").write_text(text)
    assert fails(capsys, "port.py", "torch.safetensors", "out.safetensors").startswith(message)


@pytest.mark.large
def test_the_command_runs_as_a_program(folder: Path) -> None:
    command = [sys.executable, "-m", "jaxddp.parity.convert", "port.py", "torch.safetensors", "flax.safetensors"]
    first, again = (subprocess.run(command, capture_output=True, text=True, timeout=60) for _ in range(2))
    assert (first.returncode, first.stderr, len(first.stdout.splitlines())) == (0, "", 15)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "error: flax.safetensors: exists; --force replaces it\n"
    assert load_file("flax.safetensors")["embed.embedding"].dtype != ml_dtypes.bfloat16
