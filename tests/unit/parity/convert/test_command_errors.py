"""jaxddp convert: one line for every kind of error, and nothing written."""

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load_file, save_file

from jaxddp.parity.convert.command import run as convert
from jaxddp.parity.port import load_port
from tests.support.convert_ports import ARRANGED, PORT, change, fails, weights, write_port

UNTIED = PORT.replace(
    "self.bn = NORM", "self.bn = BatchNorm(4); self.head = nnx.Linear(4, 6, use_bias=False, rngs=rngs)"
)


def test_tensors_that_are_tied_in_torch_must_be_equal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file("torch.safetensors")
    save_file({**tensors, "head.weight": tensors["head.weight"] + 1}, "apart.safetensors")
    apart = "does not fit the model: head.weight differs from embed.weight, which is the same tensor in torch"
    assert fails(capsys, "port.py", "apart.safetensors", "out.safetensors") == f"apart.safetensors: {apart}"

    Path("port.py").write_text(UNTIED.replace("MODEL", "FlaxNet(nnx.Rngs(0))"))
    convert(["port.py", "torch.safetensors", "flax.safetensors"])
    convert(["port.py", "flax.safetensors", "back.safetensors"])
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


def test_all_tensors_that_do_not_fit_are_reported_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(["port.py", "torch.safetensors", "flax.safetensors", "--quiet"])
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
    convert(["port.py", "torch.safetensors", "flax.safetensors"])


SAME_NAMES = """
import numpy as np, torch

def torch_model(): return torch.nn.ParameterDict({"a": torch.zeros(3)})
def jax_model(): return {"a": np.zeros(3)}
def torch_loss(model, batch): return 0
def jax_loss(model, batch): return 0
def batch(step, rank): return {}
optimizer = "sgd"
"""


def test_names_common_to_both_models_need_the_flag(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("port.py").write_text(SAME_NAMES)
    save_file({"a": np.arange(3.0)}, "a.safetensors")
    line = fails(capsys, "port.py", "a.safetensors", "out.safetensors")
    assert line == "a.safetensors: 1 of its names are jax's, and as many are torch's; give --to"
    convert(["port.py", "a.safetensors", "out.safetensors", "--to", "torch"])
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
    convert(["port.py", "torch.safetensors", "out.safetensors", "--force"])
    assert "embed.embedding" in load_file("out.safetensors")
    convert(["port.py", "out.safetensors", "out.safetensors", "--force"])
    assert "embed.weight" in load_file("out.safetensors")


def test_a_failed_write_leaves_no_partial_file(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        os.truncate(descriptor, 10)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    line = fails(capsys, "port.py", "torch.safetensors", "out.safetensors")
    assert line == "out.safetensors: no space left on device: make room"


def test_a_rule_that_does_not_fit_is_reported_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("port.py").write_text(ARRANGED.replace("1, of=2", "1, of=3"))
    safetensors.torch.save_file(weights(load_port("port.py")), "torch.safetensors")
    line = fails(capsys, "port.py", "torch.safetensors", "out.safetensors")
    assert line == (
        'names: "blocks.b": part("layers.{}", 1, of=3): torch\'s layers.0.bias has 8 outputs, which are not 3 parts'
    )


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
        ("port.py torch.safetensors nowhere/out", "OUT nowhere/out: folder nowhere does not exist"),
        ("port.py torch.safetensors out --to flax", "--to flax: unknown; did you mean"),
        ("port.py torch.safetensors out --fource", "--fource: unknown flag; did you mean --force?"),
        ("port.py torch.safetensors", "OUT.safetensors: missing; see --help"),
        ("", "PROGRAM.py, WEIGHTS.safetensors, OUT.safetensors: missing; see --help"),
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
        ("MODEL", "jax_model: must return a flax.nnx or flax.linen module, or a tree of arrays"),
        ("names", "names: jax's bn.scale (4,) has no twin in torch, bn.scale is not there; "),
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
