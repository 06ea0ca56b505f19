"""A torch loop, seen through hooks that exist only during a step that is recorded."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from jaxddp.errors import InputError
from jaxddp.parity.projections import by_sizes
from jaxddp.parity.recorder.batches import Entries, entries_of, identified
from jaxddp.parity.recorder.excerpt_grid import grid_of, is_excerpt
from jaxddp.parity.recorder.files import Stages
from jaxddp.parity.recorder.kinks import behind_kinks

Arrays = dict[str, np.ndarray]


def _kept_from_the_user(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep an error of a hook for `take`: it must not end the backward pass or the update that the hook is in."""

    @functools.wraps(hook)
    def guarded(self: "TorchLoop", *args: Any) -> None:
        if self.failure is None:
            try:
                hook(self, *args)
            except Exception as error:
                self.failure = error

    return guarded


class TorchLoop:
    """Values that a step of torch computes.

    Args:
        model: the module, wrapped by DistributedDataParallel or torch.compile or not.
        optimizer: its optimizer.
        limit: see `Recorder`.
        scaler: a `GradScaler` whose scale the gradients have after `backward`; None: there is none.

    Raises:
        InputError: the optimizer is none of torch's, or the scaler has no scale.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, limit: int, scaler: Any = None):
        if not isinstance(optimizer, Optimizer):
            raise InputError(f"Recorder.watch: optimizer: must be torch's, and is {type(optimizer).__name__}")
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise InputError(f"Recorder.watch: scaler: must be torch's GradScaler, and is {type(scaler).__name__}")
        ready = dist.is_available() and dist.is_initialized()
        self.rank, self._world_size = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
        self._model, self._optimizer, self._scaler, self._limit = _unwrapped(model), optimizer, scaler, limit
        self._parameters = dict(self._model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._handles: list[Any] = []
        self._steps_begun = 0
        self.failure: Exception | None = None

    def header(self) -> dict[str, Any]:
        """Describe the run and the model."""
        model, parameters = self._model, {id(p) for p in self._model.parameters()}
        kept = dict(model.named_buffers())
        state = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
        tensors = {n: _described(x, id(x) in parameters) for n, x in state.items() if id(x) in parameters or n in kept}
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first.setdefault(id(parameter), name)
        tied = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if n != first[id(p)]}
        modules = {name: _module(one) for name, one in model.named_modules(remove_duplicate=False)}
        return {
            "side": "torch",
            "version": torch.__version__,
            "world_size": self._world_size,
            "replicas": 1,
            "optimizer": type(self._optimizer).__name__,
            "tensors": tensors,
            "tied": tied,
            "modules": modules,
        }

    def entries(self, batch: Any) -> Entries:
        """Return the arrays of a batch."""
        return entries_of(batch)

    def check(self, values: dict[str, Any]) -> None:
        """Raise `InputError` if a value is given, which torch's side reads from its model and optimizer."""
        if values:
            raise InputError(f"Recorder.step: {', '.join(values)}: not taken for a torch module, which is read itself")

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def arm(self, values: dict[str, Any]) -> None:
        """Put the hooks into place."""
        del values
        self._steps_begun += 1
        self._left = self._values_outside_a_step()
        self._local: Arrays = {}
        self._backwards: dict[str, int] = {}
        self._norms: Arrays = {}
        self._whole: Arrays = {}
        self._gradients: Arrays = {}
        self._clipped: Arrays = {}
        self._before: Arrays = {}
        self._after: Arrays = {}
        self._state: Arrays = {}
        self._outside: dict[str, Arrays] = {}
        self._groups: list[dict[str, Any]] = []
        self._queued, self._updated, self._autocast = False, False, ""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(lambda grad, name=name: self._of_backward(name, grad)))
        self._handles.append(self._optimizer.register_step_pre_hook(self._before_update))
        self._handles.append(self._optimizer.register_step_post_hook(self._after_update))
        self._handles.append(self._model.register_forward_pre_hook(self._note_autocast))

    def take(self, batches: list[Entries], losses: list[Any], values: dict[str, Any]) -> tuple[Stages, dict[str, Any]]:
        """Return the step and remove the hooks; raise what has failed in one of them."""
        del values
        self.stop()
        skipped = not self._updated
        if skipped:  # a loss scaler left the update out
            self._before_update(self._optimizer)
            self._after_update(self._optimizer)
        if self.failure is not None:
            raise self.failure
        loss = float(np.mean([float(one.detach() if isinstance(one, Tensor) else one) for one in losses]))
        stages = {
            "samples": {name: x[None] for name, x in identified(batches).items()},
            "local_loss": {"loss": np.asarray([loss])},
            "local_gradients": {name: x[None] for name, x in self._local.items()} if self._world_size > 1 else {},
            "replica_gradients": {n: x[None] for n, x in self._gradients.items()} if self._world_size > 1 else {},
            "norms": self._norms if self.rank == 0 else {n: x for n, x in self._norms.items() if n.startswith("local")},
        }
        entries = {name: [list(x.shape), str(x.dtype)] for name, x in batches[-1].items()} if batches else {}
        notes = {"loss": loss, "micro_batches": len(batches), "entries": entries}
        if self.rank > 0:
            return stages, notes
        gradients = self._gradients
        same = self._clipped.keys() == gradients.keys() and all(
            np.array_equal(x, gradients[name], equal_nan=True) for name, x in self._clipped.items()
        )
        self._note_outside("after", self._values_outside_a_step())
        update = {name: (self._after[name].astype(float) - x) for name, x in self._before.items()}
        buffers = {name: self._kept("buffers", name, x) for name, x in self._model.named_buffers()}
        stages |= {
            "gradients": gradients,
            "clipped_gradients": {} if same else self._clipped,
            "params": self._before,
            "update": {name: x.astype(self._before[name].dtype) for name, x in update.items()},
            "buffers": buffers,
            "optimizer_state": self._state,
            **self._outside,
            "projections": self._whole,
        }
        notes |= {"groups": self._groups, "skipped": skipped, "autocast": self._autocast, "update": "difference"}
        notes["kinked"] = behind_kinks(losses[-1], self._parameters)
        return {stage: tensors for stage, tensors in stages.items() if tensors}, notes

    @_kept_from_the_user
    def _of_backward(self, name: str, grad: Tensor) -> None:
        """Add a gradient of one backward pass, which DDP has not reduced yet."""
        count = self._backwards[name] = self._backwards.get(name, 0) + 1
        if self._world_size > 1:
            local = self._kept("local_gradients", name, grad, self._current_scale())
            self._local[name] = local if count == 1 else self._local[name] + local
            if count > 1:  # the norm of a sum is not known from the norms
                self._norms.pop(f"local_gradients|{name}", None)
        if not self._queued:
            self._queued = True
            _at_end_of_backward(lambda: _at_end_of_backward(self._after_backward))  # after DDP's own

    @_kept_from_the_user
    def _after_backward(self) -> None:
        """Keep the gradients as DDP has reduced them, before anything clips them."""
        self._queued = False
        if self.rank == 0 or self._world_size > 1:
            self._gradients = self._taken("gradients", self._with_gradients(), self._current_scale())
            self._whole |= self._projected("gradients", self._with_gradients(), self._current_scale())

    @_kept_from_the_user
    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self.rank > 0 or self._before:
            return
        self._before = self._taken("params", self._parameters)
        self._whole |= self._projected("params", self._parameters)
        if self._steps_begun > 1:  # weights may be loaded before the first step
            self._note_outside("before", {"params": self._before, "optimizer_state": self._states()})
        self._clipped = self._taken("clipped_gradients", self._with_gradients())
        self._groups = [_options(group, self._names) for group in optimizer.param_groups]

    @_kept_from_the_user
    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._updated = True
        if self.rank == 0:
            after = self._projected("params", self._parameters)
            self._whole |= {key.replace("params", "update", 1): x - self._whole[key] for key, x in after.items()}
            self._left = self._values_outside_a_step()
            self._after, self._state = self._left["params"], self._left["optimizer_state"]

    def _note_outside(self, when: str, values: Mapping[str, Arrays]) -> None:
        """Note what has changed since the last look although the optimizer made no step.

        Args:
            when: "before" or "after" the optimizer's step.
            values: parameters and optimizer state now.
        """
        for stage, arrays in values.items():
            self._outside[f"{stage}_changes_{when}"] = _changes(self._left[stage], arrays)

    def _values_outside_a_step(self) -> dict[str, Arrays]:
        """Return excerpts of what nothing but the optimizer's step should change; {} on other ranks than the first."""
        if self.rank > 0:
            return {}
        params = {name: self._excerpt(parameter) for name, parameter in self._parameters.items()}
        return {"params": params, "optimizer_state": self._states()}

    def _states(self) -> Arrays:
        return {
            f"{key}:{name}": self._excerpt(value)
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        }

    @_kept_from_the_user
    def _note_autocast(self, *_: Any) -> None:
        kind = next((p.device.type for p in self._parameters.values()), "cpu")
        if torch.is_autocast_enabled(kind):
            self._autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")

    def _with_gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def _current_scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _taken(self, stage: str, tensors: Mapping[str, Tensor], scale: float = 1.0) -> Arrays:
        return {name: self._kept(stage, name, x, scale) for name, x in tensors.items()}

    def _kept(self, stage: str, name: str, tensor: Tensor, scale: float = 1.0) -> np.ndarray:
        """Return the excerpt of a tensor without a loss scaler's scale, and note the norm if it is not all of it."""
        if is_excerpt(tuple(tensor.shape), self._limit):
            norm = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
            self._norms[f"{stage}|{name}"] = norm.cpu().numpy() / scale
        excerpt = self._excerpt(tensor)
        return excerpt if scale == 1.0 else (excerpt / scale).astype(excerpt.dtype)

    def _projected(self, stage: str, tensors: Mapping[str, Tensor], scale: float = 1.0) -> Arrays:
        """Return "stage|name" -> projections of each tensor that is recorded as an excerpt."""
        large = ((name, x.detach()) for name, x in tensors.items() if is_excerpt(tuple(x.shape), self._limit))
        wide = ((name, x.to_dense().double()) for name, x in large if x.is_floating_point())
        return {f"{stage}|{name}": self._whole_of(x) / scale for name, x in wide}

    def _whole_of(self, wide: Tensor) -> np.ndarray:
        whole: Tensor = by_sizes(wide, torch, lambda signs: torch.from_numpy(signs).to(wide))
        return whole.cpu().numpy()

    def _excerpt(self, tensor: Tensor) -> np.ndarray:
        part = tensor.detach()[grid_of(tuple(tensor.shape), self._limit)] if tensor.ndim else tensor.detach()
        if part.is_floating_point() and part.dtype != torch.float64:
            part = part.float()
        return part.clone().cpu().numpy()


def _changes(earlier: Arrays, later: Arrays) -> Arrays:
    """Return what was added to the arrays that changed; an array that is missing counts as zeros."""
    pairs = {name: (earlier.get(name, 0.0), later.get(name, 0.0)) for name in {**earlier, **later}}
    changed = {name: pair for name, pair in pairs.items() if not np.array_equal(*pair, equal_nan=True)}
    return {name: np.asarray(new - old) for name, (old, new) in changed.items() if np.any(new != old)}


def _at_end_of_backward(function: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of DistributedDataParallel, DataParallel or torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _described(tensor: Tensor, is_parameter: bool) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [list(tensor.shape), dtype, "parameter" if is_parameter else "buffer"]


def _module(module: nn.Module) -> list[Any]:
    """Return the name of a module's class in torch.nn, its sizes, which a weight's layout depends on, and momentum."""
    kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__name__ == "Conv1D" or _is_torchs(kind)]
    sizes = {name: x for name, x in vars(module).items() if type(x) is int and not name.startswith("_")}
    momentum = getattr(module, "momentum", None)
    return [kinds[0], sizes | ({"momentum": momentum} if type(momentum) is float else {})]


def _is_torchs(kind: type) -> bool:
    return getattr(nn, kind.__name__, None) is kind


def _options(group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Return a parameter group as JSON can hold it: the names of its parameters and its numbers and flags."""
    parameters: Iterable[nn.Parameter] = group["params"]
    options = {name: _number(value) for name, value in group.items() if name != "params"}
    if isinstance(eps := group.get("eps"), tuple) and None in eps:  # Adafactor's, which is the dtype's
        precision = torch.finfo(next(iter(parameters)).dtype).eps
        options["eps"] = [precision if value is None else value for value in eps]
    known = {name: value for name, value in options.items() if value is not None}
    return {"names": [names[id(p)] for p in parameters if id(p) in names], **known}


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list) and all(isinstance(x, int | float) for x in value):
        return list(value)
    return value if isinstance(value, int | float) else None
