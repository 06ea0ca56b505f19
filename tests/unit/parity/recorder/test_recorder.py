"""The recorder sees each stage of a step on both sides, costs nothing between recorded steps, and refuses misuse."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from flax.training.train_state import TrainState
from jax import numpy as jnp
from safetensors.numpy import load_file
from torch import nn

from jaxddp.errors import InputError
from jaxddp.parity import Recorder
from jaxddp.parity.recorder import files
from jaxddp.parity.recorder.torch_loop import TorchLoop
from jaxddp.parity.recordings.run import Recording
from tests.support.recorded_loops import EXAMPLES, batch_of, torch_model, train_jax, train_torch


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rank0/run.jsonl").read_text().splitlines()]


def test_a_step_of_torch_is_recorded_as_autograd_and_the_optimizer_compute_it(tmp_path: Path) -> None:
    train_torch(tmp_path / "run", steps=2, recorded=[2], clip=0.1)
    model = torch_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in (1, 2):
        batch = {name: torch.from_numpy(x) for name, x in batch_of(step).items()}
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    step_of_run = Recording(tmp_path / "run").steps[2]
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(step_of_run["gradients"][name], gradients[name])
        np.testing.assert_array_equal(step_of_run["clipped_gradients"][name], parameter.grad)
        np.testing.assert_array_equal(step_of_run["params"][name], before[name])
        np.testing.assert_allclose(step_of_run["update"][name], (parameter - before[name]).detach(), atol=1e-8)
        state = optimizer.state[parameter]["exp_avg"]
        np.testing.assert_array_equal(step_of_run["optimizer_state"][f"exp_avg:{name}"], state)
    np.testing.assert_array_equal(step_of_run["buffers"]["1.running_mean"], model[1].running_mean)


def test_micro_batches_are_one_step(tmp_path: Path) -> None:
    train_torch(tmp_path / "run", steps=2, recorded=2, accumulate=3)
    run = Recording(tmp_path / "run")
    assert run.steps[1]["samples"]["x:hash"].shape == (1, 3 * EXAMPLES)
    assert run.steps[1].notes["micro_batches"] == 3


def test_hooks_exist_only_during_recorded_steps(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(tmp_path / "run", steps=[2, 4])
    recorder.watch(model, optimizer)
    hooks, due = [], []
    for _ in range(6):
        hooks.append(len(optimizer._optimizer_step_pre_hooks) + len(model.weight._backward_hooks or {}))
        due.append(recorder.due)
        loss = model(torch.ones(3, 2)).mean()
        loss.backward()
        optimizer.step()
        recorder.step(torch.ones(3, 2), loss)
    assert hooks == [0, 2, 0, 2, 0, 0]
    assert due == [False, True, False, True, False, False]
    assert [line["step"] for line in lines_of(tmp_path / "run")[1:]] == [2, 4]


def test_a_step_that_a_loss_scaler_skips_is_noted(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(tmp_path / "run", steps=1)
    recorder.watch(model, optimizer)
    recorder.step(torch.ones(3, 2), 0.0)
    run = Recording(tmp_path / "run")
    assert run.steps[1].notes["skipped"] and not run.steps[1]["update"]["weight"].any()


def test_the_scale_of_a_loss_scaler_is_taken_out(tmp_path: Path) -> None:
    gradients = []
    for number, scaled in enumerate((False, True)):
        model = torch_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        recorder = Recorder(tmp_path / f"{number}", 1, limit=20)
        recorder.watch(model, optimizer, scaler=scaler if scaled else None)
        batch = {name: torch.from_numpy(x) for name, x in batch_of(1).items()}
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        recorder.step(batch, loss)
        step = Recording(tmp_path / f"{number}").steps[1]
        assert not step["clipped_gradients"]
        gradients.append({**step["gradients"], **step["norms"]})
    assert "gradients|0.weight" in gradients[0]
    for name, x in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], x, rtol=1e-6, atol=1e-9)


def test_nnx_train_state_and_plain_trees_are_recorded_alike(tmp_path: Path) -> None:
    weights = {"kernel": np.arange(6.0, dtype=np.float32).reshape(3, 2), "bias": np.zeros(2, np.float32)}
    batch = {"x": np.ones((4, 3), np.float32)}

    def loss_of(params: Any) -> jax.Array:
        return jnp.square(batch["x"] @ params["kernel"] + params["bias"][None]).mean()

    loss, grads = jax.value_and_grad(loss_of)(weights)
    tx = optax.adam(0.1)
    plain = Recorder(tmp_path / "plain", 1)
    plain.watch(weights)
    updates, opt_state = tx.update(grads, tx.init(weights), weights)
    params = optax.apply_updates(weights, updates)
    plain.step(batch, loss, grads=grads, params=params, opt_state=opt_state)

    state = TrainState.create(apply_fn=lambda: None, params={"fc": weights}, tx=tx)
    of_state = Recorder(tmp_path / "state", 1)
    of_state.watch(state)
    of_state.step(batch, loss, grads={"fc": grads}, state=state.apply_gradients(grads={"fc": grads}))

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    nnx.update(model, nnx.State({name: nnx.Param(jnp.asarray(x)) for name, x in weights.items()}))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    of_nnx = Recorder(tmp_path / "nnx", 1)
    of_nnx.watch(model, optimizer)
    found = nnx.grad(lambda model: jnp.square(model(batch["x"])).mean())(model)
    optimizer.update(model, found)
    of_nnx.step(batch, loss, grads=found)

    files = [load_file(tmp_path / name / "rank0/000001.safetensors") for name in ("plain", "state", "nnx")]
    files[1] = {key.replace("fc.", ""): x for key, x in files[1].items()}
    assert files[0].keys() == files[1].keys() == files[2].keys() >= {"optimizer_state|mu:kernel", "update|bias"}
    for other in files[1:]:
        for key, x in files[0].items():
            np.testing.assert_allclose(other[key], x, rtol=1e-6)


def test_replicas_of_pmap_are_recorded_apart(tmp_path: Path) -> None:
    train_jax(tmp_path / "run", replicas=2, reduce="none", steps=1, recorded=1, local=True)
    run = Recording(tmp_path / "run")
    assert run.world_size == 2
    assert run.steps[1]["samples"]["x:hash"].shape == (2, EXAMPLES)
    assert run.steps[1]["local_loss"]["loss"].shape == (2,)
    apart = run.steps[1]["replica_gradients"]["Dense_0.kernel"]
    np.testing.assert_array_equal(apart, run.steps[1]["local_gradients"]["Dense_0.kernel"])
    np.testing.assert_array_equal(apart[0], run.steps[1]["gradients"]["Dense_0.kernel"])


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda path: Recorder(path, 0), "steps 0: must be a number above 0"),
        (lambda path: Recorder(path, [3, 2]), "increasing"),
        (lambda path: Recorder(path, []), "increasing"),
        (lambda path: Recorder(path, "10"), "steps '10': must be"),
        (lambda path: Recorder(path, 2.5), "steps 2.5: must be"),
        (lambda path: Recorder(path, True), "steps True: must be"),
        (lambda path: Recorder(path, limit="x"), "limit 'x': must be an integer"),
        (lambda path: Recorder(path, limit=0), "limit 0: must be"),
        (lambda path: Recorder(7), "folder 7: must be a path"),
        (lambda path: Recorder(path).micro_batch([], 0.0), "before watch"),
        (lambda path: (path.write_text(""), _after_watch(path)), "run/rank0: cannot be written"),
        (lambda path: (path.write_text(""), _after_watch(path / "a")), "cannot be written"),
        (lambda path: _after_watch(Path("/proc/nowhere")), "/proc/nowhere.*: cannot be written"),
        (lambda path: Recorder(path).watch("model"), "must be a tree of arrays"),
        (lambda path: Recorder(path).watch({"w": np.array(["a"])}), "Recorder.watch"),
        (lambda path: Recorder(path).watch({"w": np.ones(())}, stacked=True), "Recorder.watch: IndexError"),
        (lambda path: Recorder(path).watch({"w": np.ones(2)}, sclaer=3), "Recorder.watch: TypeError.*sclaer"),
        (lambda path: Recorder(path).watch(nn.LazyLinear(1), _sgd(nn.Linear(1, 1))), "Recorder.watch: "),
        (
            lambda path: Recorder(path).watch(nn.Linear(1, 1), _sgd(nn.Linear(1, 1)), scaler=7),
            "scaler: must be torch's",
        ),
        (lambda path: _after_watch(path).watch({"w": np.ones(2)}), "watch was called before"),
        (lambda path: _after_watch(path).step([], np.ones((3, 2))), r"loss: has shape \(3, 2\)"),
        (lambda path: _after_watch(path).step([], 0.0, params={"v": np.ones(2)}), "params: must have the parameters'"),
        (lambda path: Recorder(path).step([], 0.0), "before watch"),
        (lambda path: Recorder(path).watch(nn.Linear(1, 1), "sgd"), "optimizer: must be torch's, and is str"),
        (lambda path: Recorder(path).watch({}), "must be a tree of arrays"),
        (lambda path: _after_watch(path).step([], 0.0, gards={}), "gards: unknown"),
        (lambda path: _after_watch(path).step([], 0.0, grads={"v": np.ones(2)}), "grads: must have the parameters'"),
        (lambda path: _after_watch(path).step([], 0.0, batch_stats={"mean": np.ones(2)}), "buffers: mean: unknown"),
        (lambda path: (_after_watch(path), _after_watch(path)), "has a recording"),
    ],
)
def test_misuse_is_one_line(misuse: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says) as error:
        misuse(tmp_path / "run")
    assert "\n" not in str(error.value)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _after_watch(path: Path) -> Recorder:
    recorder = Recorder(path)
    recorder.watch({"w": np.ones(2)})
    return recorder


def test_a_recording_is_replaced_on_request(tmp_path: Path) -> None:
    for steps in (3, 1):
        train_torch(tmp_path / "run", steps=3, recorded=steps, overwrite=True)
    assert [*Recording(tmp_path / "run").steps] == [1]


class Unreadable:
    """A batch whose arrays cannot be read, as of a device that is lost."""

    shape = (4, 3)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise RuntimeError("device lost\nat address 0")


def full_disk(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "000003.safetensors")

    monkeypatch.setattr(files, "save_file", fails)


def full_disk_within_a_line(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def fails(_: files.RecordingWriter, line: dict[str, Any]) -> None:
        with (folder / "rank0/run.jsonl").open("a") as file:
            file.write(json.dumps(line)[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.RecordingWriter, "_add", fails)


def no_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "rank0").rename(folder / "moved")


FAILURES = {
    "full disk": (full_disk, "no space left on device"),
    "full disk within a line": (full_disk_within_a_line, "no space left on device"),
    "removed folder": (no_folder, "No such file"),
}


@pytest.mark.parametrize("side", ["torch", "jax"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_recording_that_fails_ends_in_a_line_and_its_whole_steps_are_readable(
    failure: str,
    side: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail, says = FAILURES[failure]
    folder = tmp_path / "run"
    step = Recorder.step

    def step_that_fails(self: Recorder, *arguments: Any, **values: Any) -> None:
        if self._count == 2:
            fail(monkeypatch, folder)
        step(self, *arguments, **values)

    monkeypatch.setattr(Recorder, "step", step_that_fails)
    {"torch": train_torch, "jax": train_jax}[side](folder, steps=5, recorded=4)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{folder}: recording stops at step 3: " in error and says in error
    assert "steps up to 2 are whole" in error
    monkeypatch.undo()
    if failure == "removed folder":
        (folder / "moved").rename(folder / "rank0")
    run = Recording(folder)
    assert [*run.steps] == [1, 2] and run.steps[2]["local_loss"]
    assert run.unfinished == (3 if failure == "full disk within a line" else None)


def test_an_object_that_cannot_be_read_ends_the_recording_and_not_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = _after_watch(tmp_path / "run")
    for batch in (np.ones((4, 3)), Unreadable(), np.ones((4, 3))):
        recorder.step(batch, 0.0)
    error = capsys.readouterr().err
    assert "recording stops at step 2: RuntimeError: device lost; steps up to 1 are whole\n" in error
    assert error.count("\n") == 1 and not recorder.due
    assert [*Recording(tmp_path / "run").steps] == [1]


def test_a_wrong_argument_after_the_first_step_ends_the_recording_and_not_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = _after_watch(tmp_path / "run")
    for grads in ({"w": np.ones(2)}, {"v": np.ones(2)}):
        recorder.step([], 0.0, grads=grads)
    assert "recording stops at step 2: Recorder.step: grads: must have the parameters'" in capsys.readouterr().err


def test_an_unknown_value_is_told_at_the_first_step_even_if_a_later_one_is_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", [1000])
    recorder.watch({"w": np.ones(2)})
    with pytest.raises(InputError, match="gards: unknown"):
        recorder.step([], 0.0, gards={})


def test_a_hook_that_fails_ends_the_recording_and_not_the_backward_pass_or_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = nn.Linear(2, 1)
    optimizer = _sgd(model)
    recorder = Recorder(tmp_path / "run")
    recorder.watch(model, optimizer)
    monkeypatch.setattr(TorchLoop, "_kept", out_of_memory)
    monkeypatch.setattr(TorchLoop, "_excerpt", out_of_memory)
    before = model.weight.detach().clone()
    for _ in range(3):
        loss = model(torch.ones(3, 2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.step(torch.ones(3, 2), loss)
    torch.testing.assert_close(model.weight, before - 0.3)
    error = capsys.readouterr().err
    assert "recording stops at step 1: OutOfMemoryError: CUDA out of memory; no step is recorded\n" in error
    assert error.count("\n") == 1
    assert not optimizer._optimizer_step_pre_hooks and not model.weight._backward_hooks


def test_a_recording_of_fewer_processes_replaces_all_of_an_earlier_one(tmp_path: Path) -> None:
    for rank, world_size in ((0, 2), (1, 2), (0, 1)):
        writer = files.RecordingWriter(tmp_path, rank, overwrite=True)
        writer.begin({"world_size": world_size})
    assert [path.name for path in tmp_path.iterdir()] == ["rank0"]
