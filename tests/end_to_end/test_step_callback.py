"""`on_step_end` is called every `callback_every` steps by both trainers, with the same numbers, and may end the run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxddp.errors import InputError
from jaxddp.program import load_program
from jaxddp.program.config import default_config
from tests.support.run_files import LINE, assert_same, in_jax, in_torch, start, write
from torch_ref.config import TorchTrainerConfig
from torch_ref.distributed import World
from torch_ref.train import build

TOLERANCE = 1e-12  # absolute, of weights of about 1; measured: 4e-16
CALLBACK = """
callback_every = 3
calls = []


def on_step_end(epoch, step, metrics, weights):
    np.savez(f"{epoch} {step}.npz", **weights)
    with Path("calls.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": epoch, "step": step, **metrics}) + chr(10))
    return "stop" if step == STOP else None
"""


def calls_of(side: Any, folder: Path, stop: int, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> Path:
    monkeypatch.chdir(folder)
    imports = ("import jax\n", "import json\nfrom pathlib import Path\n\nimport jax\n")
    path = write(folder, imports, more=CALLBACK.replace("STOP", str(stop)))
    (folder / side.__name__).mkdir()
    monkeypatch.chdir(folder / side.__name__)
    side(path, folder / side.__name__ / "run", weights=start(folder), epochs=3, **flags)
    return folder / side.__name__


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) | {"kind": "step"} for line in (folder / "calls.jsonl").read_text().splitlines()]


def test_both_trainers_call_it_with_the_same_metrics_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (calls_of(side, tmp_path, 12, monkeypatch, log_every=100) for side in (in_jax, in_torch))
    assert [(call["epoch"], call["step"]) for call in read(one)] == [(1, 3), (2, 6), (2, 9), (3, 12)]
    assert {"loss", "grad_norm", "lr"} < read(one)[0].keys()
    assert_same(read(one), read(other))
    for call in read(one):
        weights, others = (np.load(folder / f"{call['epoch']} {call['step']}.npz") for folder in (one, other))
        assert sorted(weights.files) == sorted(others.files)
        for name in weights.files:
            np.testing.assert_allclose(weights[name], others[name], rtol=0, atol=TOLERANCE, err_msg=name)
    assert capsys.readouterr().out.count("stopped by on_step_end") == 2


def test_a_given_number_of_steps_per_dispatch_makes_it_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = calls_of(in_jax, tmp_path, 0, monkeypatch, steps_per_dispatch=2, log_every=100)
    calls = read(folder)
    assert [call["step"] for call in calls] == [4, 7, 9, 12, 15]  # dispatches end after 2, 4, 5 steps of an epoch
    assert all(call["grad_norm"] > 0 for call in calls)


def test_torchs_join_takes_no_callback(tmp_path: Path) -> None:
    path = write(tmp_path, (LINE, LINE + "\njoin = True"), more=CALLBACK.replace("STOP", "0"))
    with pytest.raises(InputError, match=r"^--join: ranks without examples take no part in .*run\.py's on_step_end"):
        build(World(), default_config(load_program(path), TorchTrainerConfig))
