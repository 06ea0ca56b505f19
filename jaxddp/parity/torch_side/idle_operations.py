"""Watch the calls of a torch loss that may return one of their operands, over the batches of a run. Imports no jax."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.idle_operations import (
    EXTREMES,
    KNOWN,
    NUMBER,
    RECTIFIERS,
    SYNONYMS,
    Called,
    Kept,
    Watched,
    merged_sides,
    numbers_of,
)
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.operations import SourceLine, is_of_package, is_of_user, moments
from jaxddp.parity.port.draws import calling
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import Records, full
from jaxddp.parity.torch_side.multi_loss_loop import MultiLossLoop
from jaxddp.parity.torch_side.rank import rank_folder
from jaxddp.parity.torch_side.side import Source, TorchSide, load_state, make_side
from jaxddp.parity.user_code.uncalled import calls_noted
from torch_ref.distributed import World

REFLECTED = {f"{prefix}{name}": name for name in ("mul", "div", "truediv", "add", "sub") for prefix in "ri"}
UNKNOWN = SourceLine("", 0)
WITH_OPERANDS = KNOWN | {"gt", "ge", "lt", "le", "pow", "rpow"}  # functions whose integers are operands, not axes
CLIP_NORM, CLIP_GRAD = "clip_grad_norm_", "/torch/nn/utils/clip_grad.py"
HARDTANH = (-1.0, 1.0)  # default bounds
# torch's modules between a user's line and the call of a function that it makes, or that a layer makes which it calls.
PLUMBING = tuple(
    f"/torch/{name}"
    for name in ("overrides.py", "_tensor.py", "utils/_contextlib.py", "nn/functional.py", "nn/modules/module.py")
    + ("nn/modules/container.py", "nn/modules/dropout.py", "nn/modules/activation.py")
)


@dataclass(frozen=True)
class WatchTorch:
    """A job that tells which operands the calls of a torch loss have always returned.

    Attributes:
        source: model or port.
        start: initial weights of the reference.
        reference: folder of the reference's records, from whose weights each step is taken.
        steps: number of steps.
        world_size: number of ranks; each computes its own losses.
    """

    source: Source
    start: Arrays
    reference: Path
    steps: int
    world_size: int

    def run(self, world: World, tell: Tell) -> Watched:
        """Compute the loss of this rank's micro-batches, and return the calls at the user's lines."""
        tell("operations without effect")
        with calls_noted(self.source.name) as called:
            watched = self._watched(world, tell)
        return watched._replace(functions=frozenset(called))

    def _watched(self, world: World, tell: Tell) -> Watched:
        side = make_side(self.source, self.steps, "float64")
        side = side._replace(model=side.model.to(world.device))
        reference = Trajectory(self.start, Records([rank_folder(self.reference, 0)]))
        loop = None if side.torch_step is None else MultiLossLoop(side, world, False, tell)
        return merged_sides(self._of_batches(side, world, reference, loop))

    def _of_batches(
        self, side: TorchSide, world: World, reference: Trajectory, loop: MultiLossLoop | None
    ) -> Iterator[Watched]:
        first = world.rank == 0
        for step, micro_batches in enumerate(islice(side.batches(world.rank, world.world_size), self.steps)):
            load_state(side.model, reference.before(step), strict=False)
            batches = [{name: x.to(world.device) for name, x in one.items()} for one in micro_batches]
            if loop is not None:
                with Watch(first) as watch:
                    loop.take(batches, step, full(reference.records[step], "clipped_gradients"))
                yield watch.seen
            for batch in batches if loop is None else []:
                with Watch(first) as watch:
                    side.loss_fn(side.model, batch)
                yield watch.seen
                first = False
            first = False


class Watch(TorchFunctionMode):
    """Context manager that notes the calls which may return one of their operands.

    Args:
        results: whether to note the moments of their results.

    Attributes:
        seen: what was seen so far.
    """

    def __init__(self, results: bool):
        super().__init__()
        self.seen = Watched({}, {}, {})
        self._results = results

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        self._note_numbers((*args, *kwargs.values()), float if name not in WITH_OPERANDS else int | float)
        of_sum = name == "add" and any(type(x) is int and x == 0 for x in args)  # Python's begins with 0 + x
        if name not in KNOWN or kwargs.get("alpha", 1) != 1 or of_sum:
            return func(*args, **kwargs)
        args_before = [x.detach().clone() if isinstance(x, Tensor) else x for x in args]
        given, mask = operands_of(name, args_before, kwargs), mask_of(name, args_before, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and given and result.layout == torch.strided and not result.is_complex():
            line, clips_to = _line_of_call()
            if line is not None and clips_to is not None:
                self._note_clipping(clips_to, bool(result == 1.0), line)
            elif line is not None:
                kept = _taken(mask) if mask is not None else [_is_returned(x, result.detach()) for x in given]
                self._note(name, given, kept, result.detach(), line)
        return result

    def _note_numbers(self, arguments: Iterable[Any], kind: Any) -> None:
        for x in arguments:
            if isinstance(x, kind) and not isinstance(x, bool):
                self.seen.numbers[Called(NUMBER, numbers_of(NUMBER, [x]), UNKNOWN)] = Kept(frozenset())

    def _note_clipping(self, max_norm: float, is_idle: bool, line: SourceLine) -> None:
        called = Called(CLIP_NORM, numbers_of(CLIP_NORM, [max_norm]), line)
        operands = frozenset({0} if is_idle else ())
        self.seen.members[called] = Kept(self.seen.members.get(called, Kept(operands)).operands & operands)

    def _note(
        self, name: str, operands: Sequence[Any], returned: Sequence[bool], result: Tensor, line: SourceLine
    ) -> None:
        numbers = numbers_of(name, (float(x) for x in operands if isinstance(x, int | float)))
        called = Called(name, numbers, line)
        kept = Kept(
            frozenset(k for k, is_returned in enumerate(returned) if is_returned),
            (moments(result.cpu().double().numpy()),) if self._results else (),
        )
        before = self.seen.calls.get(called, Kept(kept.operands))
        self.seen.calls[called] = Kept(before.operands & kept.operands, before.results + kept.results)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a torch function as `KNOWN` has it, without the underscores of methods that work in place.

    >>> name_of(Tensor.clamp_), name_of(Tensor.__mul__)
    ('clamp', 'mul')
    """
    name = function.__name__.strip("_")
    name = REFLECTED.get(name, name)
    return SYNONYMS.get(name, name)


def operands_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the operands that a call may return, tensors and numbers; [] for another use of a function.

    >>> x = torch.ones(2)
    >>> operands_of("clamp", [x], {"max": 3}), operands_of("max", [x, 0], {})
    ([tensor([1., 1.]), 3], [])
    """
    named = [x for option, x in kwargs.items() if option not in ("inplace", "training", "p", "out", "alpha")]
    operands = [x for x in (*args, *named) if isinstance(x, Tensor | int | float) and not isinstance(x, bool)]
    if name in EXTREMES and not (len(operands) == 2 and all(isinstance(x, Tensor) for x in operands)):
        return []
    if name == "where":
        return [x for x in operands if not is_mask(x)] if len(operands) == 3 else []
    if name == "masked_fill":
        return [x for x in operands if not is_mask(x)]
    if name == "hardtanh":
        return [*operands, *HARDTANH[len(operands) - 1 :]]
    return operands[:1] if name in (*RECTIFIERS, "nan_to_num", "dropout", "relu6") else operands


def is_mask(x: Any) -> bool:
    """Return whether an operand is a tensor of bools."""
    return isinstance(x, Tensor) and x.dtype == torch.bool


def mask_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return where a call takes its first operand, if a mask says so; two branches of one value may have two gradients.

    >>> mask_of("masked_fill", [torch.ones(2), torch.tensor([True, False]), 0.0], {})
    tensor([False,  True])
    """
    if name == "where":
        return args[0] if args else kwargs["condition"]
    if name == "masked_fill":
        return ~(args[1] if len(args) > 1 else kwargs["mask"])
    return None


def _taken(mask: Tensor) -> list[bool]:
    return [bool(mask.all()), not bool(mask.any())]


def _is_returned(operand: Any, result: Tensor) -> bool:
    """Return whether a result equals an operand; NaN equals NaN."""
    given = operand if isinstance(operand, Tensor) else torch.as_tensor(operand, dtype=result.dtype)
    if given.ndim > result.ndim or torch.broadcast_shapes(given.shape, result.shape) != result.shape:
        return False
    return bool(((result == given) | ((result != result) & (given != given))).all())


def _line_of_call() -> tuple[SourceLine | None, float | None]:
    """Return the user's line that makes the call, or that calls the layer which makes it; None: a library makes it.

    Also return the norm to which it clips, if torch's `clip_grad_norm_` makes the call.
    """
    clips_to = None
    for frame in calling():
        path = frame.f_code.co_filename
        if is_of_user(path):
            return SourceLine(path, frame.f_lineno), clips_to
        if path.endswith(CLIP_GRAD):
            clips_to = frame.f_locals.get("max_norm", clips_to)
        elif not any(module in path for module in PLUMBING) and not is_of_package(path):
            return None, None
    return None, None
