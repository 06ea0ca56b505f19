"""DDP's methods on a bare module: gradients are averaged when, and as, DistributedDataParallel averages them."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from jaxddp.errors import InputError
from torch_ref.ddp_methods import ddp_methods
from torch_ref.distributed import World, process_group
from torch_ref.program_step import AveragedGradients

CPU = torch.device("cpu")


class Idle(World):
    """Two ranks, of which the other has gradients of 0, so that an average halves those of this one."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return tensor


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    with process_group(0, 1, CPU, dist.FileStore(str(tmp_path / "store"), 1)):
        yield


def averaged(model: nn.Module) -> list[bool]:
    """Return a list that grows with each backward pass that averages."""
    calls: list[bool] = []
    AveragedGradients(model, World(), lambda parameters: calls.append(True))
    return calls


def by_ddp(model: nn.Module) -> tuple[nn.Module, list[bool]]:
    calls: list[bool] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(True)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, hook)
    return wrapped, calls


# Whether each pass, (f)orward or (b)ackward, is within no_sync; upper case: it is not.
@pytest.mark.parametrize("passes", ["FB", "fb", "fB", "Fb", "ffB", "fFB", "Ffb", "fbFB", "FBfb", "fbfbFB"])
def test_the_passes_that_average_are_those_of_ddp(passes: str, alone: None) -> None:
    bare, wrapped = nn.Linear(3, 1), by_ddp(nn.Linear(3, 1))
    counts, models = (averaged(bare), wrapped[1]), (bare, wrapped[0])
    for model in models:
        losses: list[Tensor] = []
        for one in passes:
            with contextlib.nullcontext() if one.isupper() else model.no_sync():
                if one in "fF":
                    losses.append(model(torch.ones(1, 3)).sum())
                else:
                    torch.stack(losses).sum().backward()
                    losses.clear()
    assert len(counts[0]) == len(counts[1]), passes


def test_without_a_forward_pass_of_the_module_the_backward_pass_decides() -> None:
    model = nn.Sequential(nn.Linear(3, 1))
    calls = averaged(model)
    with model.no_sync():
        model[0](torch.ones(1, 3)).sum().backward()
    assert not calls
    model[0](torch.ones(1, 3)).sum().backward()
    assert calls


def test_local_gradients_accumulate_until_they_are_averaged() -> None:
    model = nn.Linear(1, 1, bias=False)
    AveragedGradients(model, Idle(world_size=2), lambda parameters: None)
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.item() == 1.0
    model.require_backward_grad_sync = True
    model.module(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.item() == 1.0  # half of both
    model.require_backward_grad_sync = False
    model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.item() == 2.0


def test_each_module_of_a_dictionary_has_its_own_no_sync() -> None:
    models = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("d", "g")})
    AveragedGradients(models, Idle(world_size=2), lambda parameters: None)
    with models["d"].no_sync():
        models["d"](models["g"](torch.ones(1, 1))).sum().backward()
    gradients = [(name, abs(models[name].weight.grad / models[of].weight).item()) for name, of in ("dg", "gd")]
    assert gradients == [("d", pytest.approx(1.0)), ("g", pytest.approx(0.5))]


def test_a_hook_reduces_the_gradients_as_in_ddp(alone: None) -> None:
    models = [nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    wrapped = DistributedDataParallel(models[0])
    wrapped.register_comm_hook(None, fp16_compress_hook)
    AveragedGradients(models[1], World(), lambda parameters: None)
    models[1].register_comm_hook(None, fp16_compress_hook)
    x = torch.rand(4, 3)
    for model in (wrapped, models[1]):
        (model(x) ** 3).sum().backward()
    ddp, ours = ([p.grad for p in model.parameters()] for model in models)
    assert all(map(torch.equal, ddp, ours))
    exact = torch.autograd.grad((models[1](x) ** 3).sum(), [*models[1].parameters()])
    assert not any(map(torch.equal, ours, exact))  # rounded to 16 bits


@pytest.mark.parametrize("name", ["join", "will_sync_module_buffers", "scatter"])
def test_other_methods_of_ddp_are_refused_by_name(name: str) -> None:
    model = nn.Linear(1, 1)
    ddp_methods(model)
    with pytest.raises(InputError, match=f"^torch_step: calls {name} of DistributedDataParallel; must call no others"):
        getattr(model, name)()


def test_attributes_of_the_module_stay_its_own() -> None:
    class Net(nn.Linear):
        def join(self, words: Sequence[str]) -> str:
            return ", ".join(words)

    model = Net(1, 1)
    before = [*model.named_modules(), *model.state_dict()]
    ddp_methods(model)
    assert model.join(["a", "b"]) == "a, b"
    assert [*model.named_modules(), *model.state_dict()] == before
    target = copy.deepcopy(model)
    with model.no_sync():
        assert target.require_backward_grad_sync and target.module is target
