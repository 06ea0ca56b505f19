"""Methods of DistributedDataParallel on a bare module, for a `torch_step` that calls them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jaxddp.errors import InputError

Hook = Callable[[Any, Any], Any]
KEY = "_ddp_methods"  # of the module's `__dict__`
GIVEN = ("module", "no_sync", "register_comm_hook", "require_backward_grad_sync")
REFUSED = sorted(name for name in dir(DistributedDataParallel) if name[0] != "_" and not hasattr(nn.Module, name))


class DdpMethods:
    """Methods that a module is given besides its own, and their state; see `ddp_methods`.

    As in DistributedDataParallel, whether a backward pass averages gradients is decided by the forward passes before
    it: one outside of `no_sync` is enough. Without a forward pass, as when a step calls other methods of the module,
    the place of the backward pass decides.

    Args:
        module: gets the methods, except where it has an attribute of this name.

    Attributes:
        module: as above.
        hook: the registered communication hook with its state; None: there is none.

    >>> module = nn.Linear(2, 1)
    >>> (methods,) = ddp_methods(module)
    >>> with module.no_sync():
    ...     _ = module(torch.ones(1, 2))
    >>> module.module is module, methods.averages
    (True, False)
    >>> methods.end()
    >>> methods.averages
    True
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self._decided: bool | None = None
        self.hook: tuple[Any, Hook] | None = None
        attributes: dict[str, Any] = {name: partial(_refuse, name) for name in REFUSED}
        attributes |= dict(zip(GIVEN, (module, self.no_sync, self.register_comm_hook, True), strict=True))
        missing = {name: x for name, x in attributes.items() if not hasattr(module, name)}
        module.__dict__.update(missing)  # `setattr` would make the module a part of itself
        module.register_forward_pre_hook(self._begin)

    @property
    def averages(self) -> bool:
        """Return whether a backward pass that ends now averages gradients."""
        return self._syncs if self._decided is None else self._decided

    @property
    def _syncs(self) -> bool:
        return bool(self.module.require_backward_grad_sync)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate locally, for forward and backward passes in this context."""
        before = self._syncs
        self.module.__dict__["require_backward_grad_sync"] = False
        try:
            yield
        finally:
            self.module.__dict__["require_backward_grad_sync"] = before

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let `hook(state, bucket)` average the gradients; `bucket` has the methods of torch's GradBucket."""
        self.hook = state, hook

    def end(self) -> None:
        """Forget the forward passes, after a backward pass."""
        self._decided = None

    def _begin(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._decided = bool(self._decided) or self._syncs


def ddp_methods(model: nn.Module) -> list[DdpMethods]:
    """Give a module DDP's methods unless it has them; for a ModuleDict or a ModuleList, its modules too.

    >>> ddp_methods(nn.Linear(2, 1))[0].module.join()
    Traceback (most recent call last):
    jaxddp.errors.InputError: torch_step: calls join of DistributedDataParallel; must call no others than module, ...
    """
    modules = [model, *(model.children() if isinstance(model, nn.ModuleDict | nn.ModuleList) else ())]
    for module in modules:
        if KEY not in module.__dict__:
            module.__dict__[KEY] = DdpMethods(module)
    return [module.__dict__[KEY] for module in modules]


class Bucket:
    """Gradients of one backward pass, with the methods of torch's GradBucket."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = [*parameters]
        self._buffer = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    def buffer(self) -> Tensor:
        """All gradients in one row."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the gradients."""
        self._buffer = tensor

    def parameters(self) -> list[nn.Parameter]:
        """The parameters."""
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """Views of the gradients."""
        parts = self._buffer.split([p.numel() for p in self._parameters])
        return [part.view_as(p) for part, p in zip(parts, self._parameters, strict=True)]

    def index(self) -> int:
        """Number of the bucket; there is one."""
        return 0

    def is_last(self) -> bool:
        """Return whether no bucket follows."""
        return True


def reduce_by(hook: tuple[Any, Hook], parameters: Sequence[nn.Parameter]) -> None:
    """Replace the gradients of parameters by what a communication hook makes of them."""
    state, function = hook
    bucket = Bucket(parameters)
    result = function(state, bucket).wait()
    bucket.set_buffer(result[0] if isinstance(result, list | tuple) else result)
    for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
        parameter.grad = gradient.clone()


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise InputError(
        f"torch_step: calls {name} of DistributedDataParallel; must call no others than {', '.join(GIVEN)}"
    )
