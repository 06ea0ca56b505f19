"""Twins of a port's arrays and of its random numbers, found before anything runs.

Where names do not map, shapes, order of use and a trial propose a table.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
from jax import numpy as jnp

from jaxddp.data.batches import are_equal
from jaxddp.errors import InputError, complex_error, listed
from jaxddp.nn.any_model import AnyFunctional, functional_of
from jaxddp.nn.losses import Batch
from jaxddp.nn.plain import PlainFunctional
from jaxddp.parity.case_interface import AnyPortCase
from jaxddp.parity.convert import Converter, NamesError, RuleError
from jaxddp.parity.convert.lines import folded
from jaxddp.parity.held_types import HeldTypes
from jaxddp.parity.jax_side.draws import draws_of
from jaxddp.parity.jax_side.held_types import held_types, lines_of_arrays, noted_arrays
from jaxddp.parity.jax_side.layers import record_calls
from jaxddp.parity.jax_side.multi_loss_step import losses_alone, multi_loss_step
from jaxddp.parity.jax_side.names_trial import NamesTrial
from jaxddp.parity.port import Names, Port, errors_located
from jaxddp.parity.port.draws import Draw
from jaxddp.parity.processes import Tell
from jaxddp.parity.sums import Summand
from jaxddp.parity.torch_side.layers import LayerCalls
from jaxddp.parity.torch_side.probe import Probe, may_flatten, probe
from jaxddp.parity.torch_side.side import check_real


@dataclass(frozen=True)
class FoundTwins:
    """Result of `FindTwins`.

    Attributes:
        without_twin: what has no twin, in a line; "" if every array has one.
        names: a table of names that may help.
        no_twin: constants of the port, and others that may be constants; (): no others.
        draws: the draws of the jax loss, or why it cannot be computed.
        summands: elements of torch's vectors that jax's arrays add to others.
        types: types that the jax half holds as written; None: an array has no twin.
    """

    without_twin: str = ""
    names: dict[str, str] = field(default_factory=dict)
    no_twin: tuple[str, ...] = ()
    draws: tuple[Draw, ...] | InputError | None = None
    summands: tuple[Summand, ...] = ()
    types: HeldTypes | None = field(default=None, compare=False)


@dataclass(frozen=True)
class FindTwins:
    """A job that finds the torch tensor of each jax array, and the draws of the loss.

    Attributes:
        case: a port.
    """

    case: AnyPortCase

    def run(self, tell: Tell) -> FoundTwins:
        """Map the arrays and trace the loss.

        Raises:
            InputError: `jax_batch` returns other values at its second call, or a model has a complex array.
        """
        port = self.case.port
        if port.jax_batch is not None:
            tell("jax_batch(0, 0)")
            _check_repeats(port)
        tell("jax_model or jax_loss")
        with noted_arrays() as made:
            model = port.jax_model()
            functional = functional_of(model, port.jax_loss, partial(port.first_batch, "jax"), port.no_twin)
        made_at = lines_of_arrays(model, made)
        module = port.torch_model()
        _check_real(functional, module, port.no_twin)
        try:
            converter = Converter(module, functional.shapes, port.names, port.transpose_kernel, port.no_twin)
        except RuleError as error:
            return FoundTwins(str(error), draws=_draws(self.case))
        except NamesError as error:
            return replace(_proposal(port, error, model, functional, module, tell), draws=_draws(self.case))
        names: dict[str, str] = {}
        if may_flatten(module) or any(piece.other_axes for piece in converter.pieces):
            tell("jax_loss and torch_loss, to see the order of flattened images and of axes")
            trial = NamesTrial(port, model, functional, module, _probe(port), tell)
            lines = trial.lines(port.names)
            settled, _ = trial.settle(lines)
            changed = {name: twin for name, twin in settled.items() if lines[name] != twin}
            names = _as_text({**port.names, **changed}) if changed else {}
        summands = tuple(piece.summand for piece in converter.pieces if piece.summand)
        types = HeldTypes()
        draws = _draws(self.case, types)
        tell("jax_optimizer")
        types = held_types(port, model, functional, converter, made_at, types)
        return FoundTwins(names=names, draws=draws, summands=summands, types=types)


@dataclass(frozen=True)
class FindDraws:
    """A job that finds the draws of the jax loss.

    Attributes:
        case: a port.
    """

    case: AnyPortCase

    def run(self, tell: Tell) -> tuple[Draw, ...] | InputError:
        """Return the draws, or why the loss cannot be computed."""
        tell("jax_loss")
        return _draws(self.case)


def _draws(case: AnyPortCase, types: HeldTypes | None = None) -> tuple[Draw, ...] | InputError:
    try:
        with errors_located(case.name):
            return draws_of(case.port, types)
    except InputError as error:  # the run of the port reports it
        return error


@dataclass(frozen=True)
class FindCrossedNames:
    """A job that looks for two lines of `names` whose swap makes the forward pass equal.

    Attributes:
        case: a port whose loss differs.
    """

    case: AnyPortCase

    def run(self, tell: Tell) -> tuple[dict[str, str], str]:
        """Return the table with the two swapped, and what was found in words; ({}, ""): nothing."""
        port, module = self.case.port, self.case.port.torch_model()
        model = port.jax_model()
        functional = functional_of(model, port.jax_loss, partial(port.first_batch, "jax"), port.no_twin)
        trial = NamesTrial(port, model, functional, module, _probe(port), tell)
        table, says = trial.crossed(port.names) or ({}, "")
        return _as_text(table), says


def _check_real(functional: AnyFunctional, module: Any, constants: Collection[str]) -> None:
    """Raise if either model has a complex array that is compared; the names of its two parts would not map."""
    check_real(module)
    for name, value in {**functional.params, **functional.buffers}.items():
        if name not in constants and jnp.issubdtype(value.dtype, jnp.complexfloating):
            raise complex_error("jax_model", name, value.dtype)


def _check_repeats(port: Port) -> None:
    """Raise if a `jax_batch` depends on more than step and rank; torch's, and a shared one, are checked by torch."""
    batches = []
    with contextlib.suppress(Exception):  # the run reports an error
        batches = [port.first_batch("jax") for _ in range(2)]
    if batches and not are_equal(*batches):
        raise InputError("jax_batch(0, 0): returns other values at its second call; must depend only on step and rank")


def _proposal(
    port: Port, error: NamesError, model: Any, functional: AnyFunctional, module: Any, tell: Tell
) -> FoundTwins:
    """Return what may help: a table of names, constants of either side, and why there is nothing else."""
    tell("jax_loss and torch_loss, to see the order of the layers")
    of_torch = _probe(port)
    orders = _order_of_jax(port, model, functional), [*of_torch.calls.used]
    constants, proposal = list[str](), error.propose(*orders)
    if not (proposal.is_complete or proposal.alone):
        constants = [name for name in error.unpaired.torch if name in of_torch.constants]
        proposal = error.propose(*orders, constants) if constants else proposal
    buffers = {*functional.buffers, *dict(module.named_buffers())}
    if statistics := [name for name in proposal.alone if name in buffers]:
        constants += statistics
        proposal = error.propose(*orders, constants)
    port = replace(port, no_twin=[*port.no_twin, *constants])
    table, why = proposal.certain(port.names), proposal.why
    if proposal.is_complete:
        trial = NamesTrial(port, model, functional, module, of_torch, tell)
        lines = trial.lines({**port.names, **proposal.lines})
        lines, doubtful = trial.settle(lines, proposal.orders, proposal.by_order, orders[0])
        table = folded(lines, doubtful)
        if doubtful:
            names = listed(sorted(doubtful), joint=", ")
            nearer = "no run of both models is clearly nearer in one of them"
            run = nearer if of_torch.tensors else "the loss cannot be run"
            why = f"ambiguous: {names} may be in several places in torch, and {run}"
    says = "; ".join(filter(None, [error.says, why]))
    return FoundTwins(says, _as_text(table) if table != port.names else {}, tuple(port.no_twin) if constants else ())


def _as_text(table: Names) -> dict[str, str]:
    return {name: str(twin) for name, twin in table.items()}


def _probe(port: Port) -> Probe:
    """Run torch's loss or step; return nothing seen if it cannot be computed."""
    try:
        return probe(port)
    except Exception:  # the run of the port reports it
        return Probe()


def _order_of_jax(port: Port, model: Any, functional: AnyFunctional) -> Sequence[str]:
    """Return the jax layers in the order in which their calls return; () if the loss cannot be computed."""
    calls = LayerCalls()
    try:
        batch = jax.tree.map(jnp.asarray, port.first_batch("jax"))
        if port.torch_step is not None and port.jax_step is not None:
            step = multi_loss_step(functional, port.jax_step, port.jax_optimizer)
            return _order_of_use(partial(losses_alone, step), functional, batch)
        if isinstance(functional, PlainFunctional):
            return _order_of_use(functional.local_loss(port.jax_loss), functional, batch)
        record_calls(port, model, functional, (functional.params, functional.buffers), batch, calls)
    except Exception:  # the run of the port reports it
        return ()
    return [*calls.used]


def _order_of_use(loss: Callable[..., Any], functional: AnyFunctional, batch: Batch) -> list[str]:
    """Return named arrays in the order in which the loss first uses them."""
    names = list(functional.params)
    with jax.disable_jit():
        of_values = jax.make_jaxpr(
            lambda *values: loss(dict(zip(names, values, strict=True)), functional.buffers, batch)
        )
        program = of_values(*functional.params.values()).jaxpr
    arrays = {id(x): name for x, name in zip(program.invars, names, strict=True)}
    used = (id(x) for equation in program.eqns for x in equation.invars)
    return list(dict.fromkeys(arrays[x] for x in used if x in arrays))
