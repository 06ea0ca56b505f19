"""A program's `torch_step`: a step of several losses, models or optimizers.

Nothing wraps the modules, so that a step may call any of their methods: hooks average the gradients like DDP.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jaxddp.data.batches import from_arrays
from jaxddp.errors import InputError
from jaxddp.program.losses import named_losses
from torch_ref.ddp_methods import ddp_methods, reduce_by
from torch_ref.distributed import World
from torch_ref.losses import Batch, Sums


class ProgramStep:
    """A rank's step of a program with a `torch_step`.

    Args:
        step: (module, optimizers, batch) -> losses by name, or one.
        module: the module, not wrapped.
        made: what `configure_optimizers` returned for it.
        world: the ranks that train together.
    """

    def __init__(self, step: Callable[..., Any], module: nn.Module, made: Any, world: World):
        self._step, self._module, self._made, self._world = step, module, made, world
        AveragedGradients(module, world, lambda parameters: None)

    def __call__(self, batch: Batch) -> Sums:
        """Take a step; return this rank's losses as sums, "loss" being the sum of several."""
        for buffer in self._module.buffers():  # like DDP before a forward pass
            self._world.broadcast(buffer)
        losses = named_losses("torch_step", self._step(self._module, self._made, from_arrays(batch)))
        shown = {name: torch.as_tensor(value).detach().reshape(()).double() for name, value in losses.items()}
        if "loss" not in shown:
            shown = {"loss": torch.stack([*shown.values()]).sum(), **shown}
        return {"count": torch.ones_like(shown["loss"]), **shown}


class AveragedGradients:
    """Hooks that average gradients over the ranks at the end of every backward pass, like DDP.

    With W ranks, `.grad` holds (1 / W) sum_r g_r, where rank r has accumulated g_r. A parameter that a rank's loss does
    not reach counts as 0 on this rank; one that no rank reaches keeps its gradient. The model gets DDP's methods, see
    `torch_ref.ddp_methods`: a pass within `no_sync` averages nothing.

    Args:
        model: its parameters' gradients are averaged.
        world: the ranks; all average equally often.
        then: called after each average with the parameters that a loss reached.
    """

    def __init__(self, model: nn.Module, world: World, then: Callable[[Sequence[nn.Parameter]], None]):
        self._parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
        self._world, self._then = world, then
        self._wrappers = ddp_methods(model)
        holding = [{id(p) for p in wrapper.module.parameters()} for wrapper in self._wrappers]
        self._of = [
            [w for w, ids in zip(self._wrappers, holding, strict=True) if id(p) in ids] for p in self._parameters
        ]
        self._reached: set[int] = set()
        for number, parameter in enumerate(self._parameters):
            learns = parameter.requires_grad
            parameter.requires_grad_(True)  # torch adds hooks to no other; a step may unfreeze it later
            parameter.register_post_accumulate_grad_hook(partial(self._reach, number))
            parameter.requires_grad_(learns)

    def _reach(self, number: int, _: Tensor) -> None:
        if not self._reached:
            Variable._execution_engine.queue_callback(self._average)
        self._reached.add(number)

    def _average(self) -> None:
        mine = sorted(number for number in self._reached if all(wrapper.averages for wrapper in self._of[number]))
        self._reached = set()
        for wrapper in self._wrappers:
            wrapper.end()
        if not mine:
            return
        reached = torch.zeros(len(self._parameters), device=self._world.device)
        reached[mine] = 1.0
        of_any_rank = [int(i) for i in self._world.all_reduce(reached, "max").nonzero()]
        for parameter in map(self._parameters.__getitem__, of_any_rank):
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self._reduce(of_any_rank)
        self._then([self._parameters[number] for number in of_any_rank])

    def _reduce(self, numbers: Sequence[int]) -> None:
        """Reduce the gradients of these parameters by the hook of a wrapper, or by their mean without one."""
        hooks = [next((wrapper.hook for wrapper in reversed(self._of[n]) if wrapper.hook), None) for n in numbers]
        for hook in {id(hook): hook for hook in hooks}.values():
            parameters = [self._parameters[n] for n, of_it in zip(numbers, hooks, strict=True) if of_it is hook]
            if hook is not None:
                reduce_by(hook, parameters)
                continue
            for parameter in parameters:
                assert parameter.grad is not None, "zeros at least"
                parameter.grad = self._world.all_reduce(parameter.grad.div_(self._world.world_size))


class Optimizers:
    """All optimizers of a program, with the interface of one.

    Args:
        made: what `configure_optimizers` returned: optimizers, and schedulers, in lists, tuples and dictionaries.
        model: the module whose parameters they hold.

    Attributes:
        each: the optimizers.
        schedulers: the schedulers.
        param_groups: the groups of all optimizers.
        kind: their class name, or names if they differ.

    Raises:
        InputError: there is no optimizer, or one holds a tensor that is not a parameter of the module.
    """

    def __init__(self, made: Any, model: nn.Module):
        leaves = [*_leaves(made)]
        self.each = [leaf for leaf in leaves if isinstance(leaf, Optimizer)]
        self.schedulers = [leaf for leaf in leaves if isinstance(leaf, LRScheduler)]
        if not self.each:
            kind = type(made).__name__
            raise InputError(f"configure_optimizers: must return the optimizers of the torch_step, and returns {kind}")
        known = {id(parameter) for parameter in model.parameters()}
        if odd := [tuple(p.shape) for group in self.param_groups for p in group["params"] if id(p) not in known]:
            raise InputError(
                f"configure_optimizers: an optimizer holds a tensor {odd[0]} that torch_model's module does not; make "
                "it a torch.nn.Parameter of the module"
            )
        self.kind = ", ".join(dict.fromkeys(type(one).__name__ for one in self.each))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of all optimizers, which have new ones after a load."""
        return [group for one in self.each for group in one.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:
        """Return the states of all optimizers by parameter."""
        return {parameter: state for one in self.each for parameter, state in one.state.items()}

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for optimizer in self.each:
            optimizer.zero_grad()

    def step(self) -> None:
        """Take a step of each optimizer."""
        for optimizer in self.each:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers, with the parameters of all of them numbered in one row."""
        joined: dict[str, Any] = {"state": {}, "param_groups": []}
        for first, optimizer in zip(self.firsts, self.each, strict=True):
            saved = optimizer.state_dict()
            joined["state"] |= {first + number: state for number, state in saved["state"].items()}
            groups = [{**group, "params": [first + n for n in group["params"]]} for group in saved["param_groups"]]
            joined["param_groups"] += groups
        return joined

    def load_state_dict(self, joined: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for first, optimizer in zip(self.firsts, self.each, strict=True):
            own = optimizer.state_dict()["param_groups"]
            numbers = {number for group in own for number in group["params"]}
            state = {n: joined["state"][first + n] for n in numbers if first + n in joined["state"]}
            optimizer.load_state_dict({"state": state, "param_groups": own})

    def schedule(self) -> dict[str, Any]:
        """Return the groups' hyperparameters and the schedulers' states, which follow from what the step has done."""
        groups = [{name: x for name, x in group.items() if name != "params"} for group in self.param_groups]
        return {"groups": groups, "schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_schedule(self, saved: Mapping[str, Any]) -> None:
        """Load what `schedule` returned."""
        for group, values in zip(self.param_groups, saved["groups"], strict=True):
            group.update(values)
        for scheduler, state in zip(self.schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)

    @property
    def firsts(self) -> list[int]:
        """Number of each optimizer's first parameter."""
        sizes = [sum(len(group["params"]) for group in one.param_groups) for one in self.each]
        return [0, *itertools.accumulate(sizes)][:-1]


def _leaves(made: Any) -> Iterator[Any]:
    if isinstance(made, Mapping | list | tuple):
        for item in made.values() if isinstance(made, Mapping) else made:
            yield from _leaves(item)
    else:
        yield made
