"""Evaluate a port's jax model like jaxddp's trainer."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from jaxddp.data.batches import from_arrays
from jaxddp.data.run_data import PADDING
from jaxddp.nn.any_model import AnyFunctional
from jaxddp.nn.functional import Functional, LocalLoss, set_modes
from jaxddp.nn.linen import LinenFunctional
from jaxddp.nn.losses import Batch, Losses, Sums, num_examples, returns_mean, sums_of
from jaxddp.nn.program_losses import metrics_of
from jaxddp.parity.case_interface import AnyPortCase, Trajectory
from jaxddp.parity.jax_side.checked_step import side_of
from jaxddp.parity.jax_side.draws import DRAWING, constant_draws
from jaxddp.parity.jax_side.excerpt_program import QUICKLY
from jaxddp.parity.jax_side.widened import in_float64, within
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.port import Port
from jaxddp.parity.port.evaluation import (
    Evaluated,
    EvaluationBatch,
    NotComparableError,
    evaluation_batches,
    noted,
    output_arrays,
    real,
)
from jaxddp.parity.processes import Tell
from jaxddp.parity.torch_side.pool import torch_records
from jaxddp.program import Program, asks_for
from jaxddp.program.losses import named_metrics
from jaxddp.state import Buffers, Params
from jaxddp.step.loops import primitives

Results = tuple[dict[str, Any], Sums]  # outputs of `predict` by name, and sums of losses and metrics

CASTS = ("float32", "float16", "bfloat16")  # which torch's half does not make in float64 either


@dataclass(frozen=True)
class EvaluateJax:
    """A job that evaluates the model with the weights after torch's run.

    Attributes:
        case: a port.
        start: torch's initial weights.
        reference: folder of torch's run.
        train: leave a module of flax.nnx in the mode in which the run trains it, only for `predict`.
    """

    case: AnyPortCase
    start: Arrays
    reference: Path
    train: bool = False

    def run(self, tell: Tell) -> list[Evaluated]:
        """Evaluate every batch."""
        tell("test_data")
        with jax.enable_x64(True):
            side = side_of(self.case)
            assert side.functional is not None, "the side of a port has it"
            trajectory = Trajectory(self.start, torch_records(self.reference, self.case.world_size))
            weights = side.from_torch(trajectory.last())
            port = self.case.port_as_made
            evaluation = _Evaluation(port, side.functional, self.case.name, weights, self.train)
            evaluated = []
            for number, batch in enumerate(evaluation_batches(port, "jax", self.case.steps), start=1):
                tell(f"predict, batch {number}")
                evaluated.append(evaluation.of_batch(batch))
            return evaluated


class _Evaluation:
    """An evaluation of a model, which is compiled once for each shape of a batch."""

    def __init__(
        self, port: Port, functional: AnyFunctional, name: str, weights: tuple[Params, Buffers], train: bool
    ) -> None:
        self._port, self._functional, self._name = port, functional, name
        self._weights, self._train = weights, train
        self._programs: dict[Any, Any] = {}

    def of_batch(self, batch: EvaluationBatch) -> Evaluated:
        """Evaluate a batch, and once more as the trainer fills it up, unless a mean keeps it from that."""
        evaluated, depends = Evaluated(batch.test_set, batch.size, batch.digest), True
        valid = np.ones(batch.size) if batch.filled and batch.has_losses else None
        function = self._of_trainer if batch.has_losses else self._of_metrics
        with noted(evaluated.errors, "metrics", self._name):
            depends = self._run(self._outputs if self._train else function, batch.arrays, valid, evaluated)
            if valid is not None and batch.filled > batch.size and not self._is_mean(batch.arrays, valid):
                filled = Evaluated(batch.test_set, batch.filled)
                self._run(function, *_filled(batch), filled)
                evaluated.padded.update(filled.sums)
        if evaluated.errors and not evaluated.outputs and self._port.predict is not None:
            with noted(evaluated.errors, "predict", self._name):
                depends = self._run(self._outputs, batch.arrays, valid, evaluated)
        return replace(evaluated, depends=depends)

    def _run(self, function: Any, arrays: Arrays, valid: Any, evaluated: Evaluated) -> bool:
        """Add to `evaluated` what a function computes of a batch; return whether the outputs depend on parameters."""
        arguments = *self._weights, _in_float64(arrays), valid
        key = function.__name__, *((x.shape, x.dtype) for x in jax.tree.leaves(arguments))
        if key not in self._programs:
            self._programs[key] = _compiled(function, arguments)
        program, depends = self._programs[key]
        outputs, sums = jax.device_get(program(*arguments))
        evaluated.outputs.update({name: real(np.asarray(x)) for name, x in outputs.items()})
        evaluated.sums.update({name: float(x) for name, x in sums.items()})
        return depends

    def _is_mean(self, arrays: Arrays, valid: Any) -> bool:
        return returns_mean(self._of_trainer, *self._weights, _in_float64(arrays), valid)

    def _of_trainer(self, params: Params, buffers: Buffers, batch: Batch, valid: Any) -> Results:
        """Compute the sums of losses and metrics like `jaxddp.step.evaluate`, and keep the outputs."""
        kept: list[Any] = []

        def predict(*arguments: Any) -> Any:
            assert self._port.predict is not None, "the program has it only if the port does"
            kept.append(self._port.predict(*arguments))
            return kept[-1]

        self._check_modes(batch, valid)
        functions = {"predict": self._port.predict and predict, "metrics": self._port.metrics}
        metrics = metrics_of(Program("", {**functions, "jax_metrics": self._port.jax_metrics}))
        with constant_draws():
            loss: LocalLoss = self._functional.local_loss(self._port.jax_loss, train=False, metrics=metrics)
            sums = loss(params, buffers, batch if valid is None else {**batch, PADDING: valid})[0]
        return output_arrays(kept[0]) if kept else self._outputs(params, buffers, batch, valid)[0], sums

    def _check_modes(self, batch: Batch, valid: Any) -> None:
        """Raise `NotComparableError` for a loss that no trainer puts into evaluation mode, and that has no mode."""
        if valid is None and PADDING in batch:
            raise NotComparableError(f"has an entry {PADDING} in its batch, which is the name of padding")
        has_mode = isinstance(self._functional, Functional) or asks_for(self._port.jax_loss, "train")
        if valid is None and not has_mode:
            raise NotComparableError("has a jax_loss that does not ask for `train`")

    def _of_metrics(self, params: Params, buffers: Buffers, batch: Batch, valid: None) -> Results:
        """Compute the outputs, and the sums of the metrics, of a port that no trainer evaluates by its losses."""
        measure, nested, size = self._port.jax_metrics or self._port.metrics, from_arrays(batch), num_examples(batch)
        with constant_draws():
            outputs = self._port.predict and self._port.predict(*self._arguments(params, buffers), nested)
            returned = measure(outputs, nested) if measure else {}
        metrics = named_metrics("metrics", returned, size, jnp.asarray)
        sums = sums_of(Losses(jnp.zeros(size)), None, False, metrics, batch)
        return output_arrays(outputs), {name: x for name, x in sums.items() if name not in ("loss", "count")}

    def _outputs(self, params: Params, buffers: Buffers, batch: Batch, valid: Any) -> Results:
        if self._port.predict is None:
            return {}, {}
        with constant_draws():
            return output_arrays(self._port.predict(*self._arguments(params, buffers), from_arrays(batch))), {}

    def _arguments(self, params: Params, buffers: Buffers) -> tuple[Any, ...]:
        """Return what a function of the port gets before the batch."""
        if isinstance(self._functional, Functional):
            model = self._functional.module(params, buffers)
            set_modes(model, None if self._train else False)
            return (model,)
        if isinstance(self._functional, LinenFunctional):
            return (self._functional.bound(params, buffers),)
        return self._functional.arguments(params, buffers)


def _in_float64(arrays: Arrays) -> Batch:
    return {name: jnp.asarray(x, "float64" if x.dtype.kind == "f" else x.dtype) for name, x in arrays.items()}


def _compiled(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, bool]:
    """Compile a function; return it, and whether its outputs depend on the parameters."""
    traced = _traced(function, arguments)
    jaxpr, outputs = traced.jaxpr.jaxpr, len(traced.out_info[0])
    if any(name in DRAWING for name, _ in primitives(jaxpr)):
        raise NotComparableError("draws random numbers, which cannot be the same on both sides")
    used = dce_jaxpr(jaxpr, [index < outputs for index in range(len(jaxpr.outvars))])[1]
    depends = not outputs or any(used[: len(arguments[0])])
    return traced.lower().compile(QUICKLY if jax.default_backend() == "cpu" else None), depends


def _traced(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Trace a function in float64, as far as jax can: with some casts lifted, it may refuse mixed dtypes."""
    for lifting in (partial(in_float64, CASTS), partial(in_float64, CASTS, False)):
        with suppress(Exception):
            return jax.jit(within(lifting, function)).trace(*arguments)
    return jax.jit(lambda *arguments: function(*arguments)).trace(*arguments)


def _filled(batch: EvaluationBatch) -> tuple[Arrays, np.ndarray]:
    """Fill up a batch with its first example, which `valid` leaves out."""
    more = batch.filled - batch.size
    arrays = {name: np.concatenate([x, np.repeat(x[:1], more, axis=0)]) for name, x in batch.arrays.items()}
    return arrays, np.repeat([1.0, 0.0], [batch.size, more])
