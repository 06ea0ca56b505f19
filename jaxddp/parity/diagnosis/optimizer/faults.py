"""Faults of an optimizer as edits of the reference's program, one mistake each."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller

import numpy as np

from jaxddp.parity.compare.patterns import scaled
from jaxddp.parity.deviation import Statement, Value, number
from jaxddp.parity.diagnosis.optimizer import trace_edits
from jaxddp.parity.diagnosis.optimizer.decay import DECAY, decay_edits, names_of
from jaxddp.parity.diagnosis.optimizer.edit import OptimizerEdit, both, discrete, extent, typical
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.rates_of_tensors import EQUAL, rates_of_tensors
from jaxddp.parity.diagnosis.optimizer.sample import Sample
from jaxddp.parity.diagnosis.optimizer.schedules import schedule_edits
from jaxddp.parity.diagnosis.optimizer.trace_edits import TraceEdit
from jaxddp.parity.diagnosis.optimizer.update_evidence import OptimizerEvidence
from jaxddp.parity.diagnosis.optimizer.warmup import warmup_edits
from jaxddp.parity.diagnosis.search.nonlinear_fit import Unknown, Values
from jaxddp.parity.diagnosis.wrong_clipping import ClippingFault, at_norm, by_value, wrong_clipping

SEEN = "seen_gradients"
LINEAR = ("SGD", "ASGD")  # whose updates are linear in the gradients
OPTION = "optimizer_option"
# Fault of a wrong option; a fault of one optimizer only under "optimizer.option".
OPTIONS = {
    "betas": "betas",
    "momentum": "betas",
    "RMSprop.alpha": "rmsprop_decay",
    "dampening": "dampening",
    "eps": "eps_value",
    "initial_accumulator_value": "adagrad_accumulator",
}
FLAGS = {"nesterov": "nesterov", "amsgrad": "amsgrad", "centered": "rmsprop_centred"}
EPS_STARTS = (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0)
SHARES = ("momentum", "betas", "alpha", "rho")  # options near 1, where 1 - x counts


def edits(program: OptimizerProgram, sample: Sample, evidence: OptimizerEvidence, floor: float) -> list[OptimizerEdit]:
    """Return all edits that apply to this optimizer, in the order in which they are applied.

    Args:
        floor: the largest residual that counts as rounding.
    """
    counts = _counts(evidence.world_size, evidence.accumulation_steps)
    return list(
        itertools.chain(
            decay_edits(program, sample),
            _rate(program, counts),
            schedule_edits(program, counts),
            warmup_edits(program),
            _scale(program, counts, evidence.sizes),
            _hidden(evidence),
            clip_edits(program, sample, evidence.world_size),
            _unused(program, sample),
            _restore(program),
            _resets(program, sample, floor),
            _skips(program, sample),
            rates_of_tensors(program, sample, floor),
            _options(program),
            _flags(program),
            _calls(program),
            _starts(program),
        )
    )


def _counts(replicas: int, micro_batches: int) -> dict[int, str]:
    """Return the counts above 1 that may scale a run, each with what is counted.

    >>> _counts(2, 4)
    {8: 'replicas_times_micro_batches', 4: 'micro_batches', 2: 'replicas'}
    >>> _counts(2, 2)
    {4: 'replicas_times_micro_batches', 2: 'replicas_or_micro_batches'}
    """
    counts = {
        replicas * micro_batches: "replicas_times_micro_batches",
        micro_batches: "micro_batches",
        replicas: "replicas_or_micro_batches" if replicas == micro_batches else "replicas",
    }
    return {count: of for count, of in counts.items() if count > 1}


def _rate(program: OptimizerProgram, counts: dict[int, str]) -> Iterator[OptimizerEdit]:
    factors: dict[float, Statement] = {}
    for is_root in (True, False):
        for count, of in counts.items():
            times = math.sqrt(count) if is_root else float(count)
            what = Statement("rate_by_count", factor=times, of=of, is_root=is_root)
            factors |= {times: what.but(by="times"), 1 / times: what.but(by="divided_by")}
    yield OptimizerEdit(
        "lr_scaled",
        lambda p, v: replace(p, factor=v[0]),
        lambda v: factors.get(v[0]) or Statement("rate_times", factor=_factor(v[0])),
        (Unknown((1.0,), low=1e-6, likely=tuple(factors)),),
        frozenset({"loss_scale"} if program.kind in LINEAR else ()),
        values=lambda v: (Value(_factor(v[0]), "1", key="lr", is_factor=True),),
    )


def _factor(value: float) -> str:
    """Format a factor, one near 1 with all of its digits.

    >>> _factor(0.3), _factor(1.00000003)
    ('0.3', '1.00000003')
    """
    return f"{value:.10g}" if number(value) == "1" else number(value)


def _scale(program: OptimizerProgram, counts: dict[int, str], sizes: Mapping[int, str]) -> Iterator[OptimizerEdit]:
    likely = {2.0**power for power in range(-24, 25)}
    likely |= {factor for n in (*counts, *sizes) for factor in (float(n), 1.0 / n)}
    if program.kind in LINEAR:
        # Another learning rate has the same effect, so only a scale that a programmer would use counts.
        unknown, same = Unknown((1.0,), low=1e-6, digits=0), "lr_scaled"
    else:
        unknown, same = Unknown((1.0, 1e-4, 1e-2, 1e2, 1e4, 1e6), "log", low=1e-12), "eps_value"
    yield OptimizerEdit(
        "loss_scale",
        lambda p, v: replace(p, scale=p.scale * v[0]),
        lambda v: scaled(SEEN, v[0], sizes).what,
        (replace(unknown, likely=tuple(likely)),),
        frozenset({same}),
        values=lambda v: scaled(SEEN, v[0], sizes).values,
    )


def _hidden(evidence: OptimizerEvidence) -> Iterator[OptimizerEdit]:
    """Yield the factors of gradients that the port does not show; a loss scale of that size is one of these."""
    for one, times in evidence.factors:
        change = partial(_scaled, times=times)
        yield discrete(one.kind, one.what, change, *one.values, excludes=frozenset({"loss_scale"}))


def _scaled(program: OptimizerProgram, times: float) -> OptimizerProgram:
    return replace(program, scale=program.scale * times)


def _unused(program: OptimizerProgram, sample: Sample) -> Iterator[OptimizerEdit]:
    """Yield updates of the tensors that have none in the reference: for lack of a gradient, or of an optimizer."""
    left_out = np.logical_and(~program.used.any(axis=0), sample.of_tensors(sample.gradients).any(axis=0))
    if program.used.all():
        return
    fault, what = "unused_parameters", Statement("updated_without_gradient")
    if left_out.any():
        fault, what = "rate_of_some", Statement("updated_alone", names=names_of(program, left_out))
    yield discrete(fault, what, lambda p: replace(p, used=np.ones_like(p.used)))


def _restore(program: OptimizerProgram) -> Iterator[OptimizerEdit]:
    at = program.restored_at
    if at is None or not 0 < at < len(program.index):
        return
    losable = sorted(program.state_keys, key=lambda key: key == "step")  # which is said last
    losable += ["schedule"] * program.scheduled
    for size in range(1, len(losable) + 1):
        for lost in itertools.combinations(losable, size):
            yield discrete(
                "resume_lost_state",
                Statement("restoring_loses", step=at, lost=lost),
                partial(_losing, at=at, lost=frozenset(lost)),
            )


def _resets(program: OptimizerProgram, sample: Sample, floor: float) -> Iterator[OptimizerEdit]:
    """Yield a state that is lost every few steps, from the first step on that differs; every step is no momentum."""
    worst = sample.of_tensors(sample.misfit(program)).max(axis=1)
    period = int(np.argmax(worst > max(EQUAL, floor)))  # 0 too if none differs
    if period > 1 and program.restored_at is None:
        for lost, counts in ((program.state_keys, False), (program.moments, True)):
            what = Statement("state_lost", steps=period, counts=counts)
            yield discrete("state_reset", what, partial(replace, period=period, lost=frozenset(lost)))


def _skips(program: OptimizerProgram, sample: Sample) -> Iterator[OptimizerEdit]:
    """Yield no update at the steps that have none in the port, with and without one of the optimizer's state."""
    skipped = np.array(
        [not update.any() and rates.any() for update, rates in zip(sample.update, program.lr, strict=True)]
    )
    if not skipped.any() or skipped.all():
        return
    what = Statement("updates_skipped", steps=tuple(int(step) + 1 for step in np.flatnonzero(skipped)))
    used = program.used & ~skipped[:, None]
    still = np.where(skipped[:, None], 0.0, program.lr)
    yield discrete("updates_skipped", what.but(state_moves=False), lambda p: replace(p, used=used))
    yield discrete(
        "updates_skipped",
        what.but(state_moves=True),
        lambda p: replace(p, rates=still, index=np.arange(len(still)), factor=1.0),
    )


def _losing(program: OptimizerProgram, at: int, lost: frozenset[str]) -> OptimizerProgram:
    index = program.index.copy()
    if "schedule" in lost:
        index[at:] -= at
    return replace(program, index=index, lost=lost - {"schedule"})


def _options(program: OptimizerProgram) -> Iterator[OptimizerEdit]:
    """Yield other values of each option, those of a tuple together."""
    together: dict[str, list[str]] = defaultdict(list)
    for name in program.options:
        together[name.partition("[")[0]].append(name)
    for option, names in together.items():
        if option == DECAY:
            continue
        yield _option(OPTIONS.get(f"{program.kind}.{option}") or OPTIONS.get(option) or OPTION, program, names)
    if "eps" in program.options:
        none = Statement("options", optimizer=program.kind, each=(("eps", 0.0, extent(program.options["eps"])),))
        values = both(0.0, program.options["eps"], program.kind, "eps")
        yield discrete("eps_value", none, partial(OptimizerProgram.with_options, eps=0.0), *values, removes=True)


def _option(fault: str, program: OptimizerProgram, names: Sequence[str]) -> OptimizerEdit:
    """Return an edit with other values for some options.

    Args:
        fault: a name of `catalogue.FAULTS`.
        program: the reference's.
        names: the options.
    """
    references = [program.options[name] for name in names]

    def differing(fitted: Values) -> list[tuple[str, float, np.ndarray]]:
        of_each = zip(names, fitted, references, strict=True)
        return [one for one in of_each if not np.allclose(one[2], one[1], rtol=1e-9, atol=1e-14)]

    def what(fitted: Values) -> Statement:
        each = tuple((name, value, extent(reference)) for name, value, reference in differing(fitted))
        return Statement("options", optimizer=program.kind, each=each)

    return OptimizerEdit(
        fault,
        lambda p, v: p.with_options(**dict(zip(names, v, strict=True))),
        what,
        tuple(_unknown(name, typical(reference)) for name, reference in zip(names, references, strict=True)),
        frozenset({"loss_scale"} if fault == "eps_value" else ()),
        values=lambda v: tuple(
            x for name, fitted, reference in differing(v) for x in both(fitted, reference, program.kind, name)
        ),
    )


def _unknown(option: str, reference: float) -> Unknown:
    """Return how a value of an option is searched for."""
    if option == "eps":
        return Unknown((reference or 1e-8, *EPS_STARTS), "log")
    if option.startswith(SHARES):
        return Unknown((reference, 0.9), "complement", high=1.0)
    if option == "dampening":
        return Unknown((reference, 0.5), high=1.0)
    if reference and not 1e-2 <= reference <= 1e2:
        return Unknown((reference, reference / 100, reference * 100), "log")
    return Unknown((reference, 1e-3, 0.1, 1.0), unit=reference or 0.1)


def _flags(program: OptimizerProgram) -> Iterator[OptimizerEdit]:
    for name, value in program.flags.items():
        if isinstance(value, bool) and name != "decoupled_weight_decay":
            what = Statement("flag", name=name, of="torch" if value else "jax")
            yield discrete(FLAGS.get(name, OPTION), what, partial(_flipped, name=name), removes=value)


def _flipped(program: OptimizerProgram, name: str) -> OptimizerProgram:
    return program.with_flags(**{name: not program.flags[name]})


def _calls(program: OptimizerProgram) -> Iterator[OptimizerEdit]:
    """Yield changes of the step's calls."""
    nesterov = Statement("flag", name="nesterov", of="jax")
    changes: list[tuple[str, Statement, TraceEdit]] = []
    if program.kind in ("Adam", "AdamW"):  # before the bias correction goes, in which it finds beta1 and the step
        changes.append(("nesterov", nesterov, trace_edits.ahead_in_adam))
    changes += [
        ("eps_in_root", Statement("eps_in_root", too=also), trace_edits.eps_inside(also_outside=also))
        for also in (False, True)
    ]
    uncorrected = Statement("no_bias_correction", optimizer=program.kind)
    changes.append(("no_bias_correction", uncorrected, trace_edits.NO_BIAS_CORRECTION))
    if numbers := trace_edits.numbers_of_state(program.trace):
        changes.append(("rate_rounded", Statement("state_in_float32", of=tuple(numbers)), trace_edits.in_float64))
    yield from (_change(*change) for change in changes if change[2](program.trace) != program.trace)
    if program.kind == "RMSprop":
        yield _change("nesterov", nesterov, trace_edits.ahead_in_rmsprop)
    if "amsgrad" in program.flags:
        corrected = trace_edits.largest_corrected
        yield discrete(
            "amsgrad", Statement("corrected_squares"), lambda p: p.with_flags(amsgrad=True).with_edit(corrected)
        )
    if program.kind == "SGD" and program.scheduled and program.options["momentum"].any():
        yield _change("lr_in_momentum", Statement("momentum_of_updates"), trace_edits.rate_first)


def _change(fault: str, what: Statement, edit: TraceEdit) -> OptimizerEdit:
    return discrete(fault, what, lambda p: p.with_edit(edit), removes=edit is trace_edits.NO_BIAS_CORRECTION)


def _starts(program: OptimizerProgram) -> Iterator[OptimizerEdit]:
    """Yield other initial values of the state."""
    if program.kind == "SGD":
        reference = program.options["dampening"]
        yield OptimizerEdit(
            "dampening",
            lambda p, v: replace(p.with_options(dampening=v[0]), begin={"momentum_buffer": 0.0}),
            lambda v: Statement("dampening_at_first", jax=v[0], torch=extent(reference)),
            (Unknown((float(reference.max()), 0.5), high=1.0),),
            values=lambda v: both(v[0], reference, program.kind, "dampening"),
        )
    if program.kind == "RMSprop":
        starting = trace_edits.starting("square_avg", "start")  # one for all values: each edit is compiled
        yield OptimizerEdit(
            "rmsprop_centred",
            lambda p, v: p.with_edit(starting, start=v[0]),
            lambda v: Statement("squares_start", jax=v[0]),
            (Unknown((1e-3, 0.1, 1.0), unit=0.1),),  # searched linearly, because the value may be 0
            values=lambda v: both(v[0], 0.0),
        )


NORMS = (0.1, 0.5, 1.0, 5.0)  # starts of the search for a norm
VALUES = (0.01, 0.1, 1.0)


def clip_edits(program: OptimizerProgram, sample: Sample, world_size: int) -> Iterator[OptimizerEdit]:
    """Yield alternative clipping rules: another max norm, by value, and, if the reference clips, none.

    Args:
        program: the reference's program.
        sample: sample of the gradients.
        world_size: number of replicas.
    """
    reference = program.clipping
    start = reference.max_norm or float(np.median(program.norms))
    for epsilon in (reference.epsilon, 0.0) if reference.max_norm is None else (reference.epsilon,):  # 0 as in optax
        # A norm that is never reached clips nothing.
        norms = Unknown((start, *NORMS), "log", low=1e-12, high=program.norms.max())
        at = partial(at_norm, epsilon=epsilon, reference=reference)
        yield _fitted(at, norms, "clip_missing", "clip_norm_local")
    for one, fields in wrong_clipping(reference, world_size):
        never_clips = np.all(replace(reference, **fields).factor(program.norms) == 1.0)
        if one.kind != "clip_norm_local" or not never_clips:
            clipped = methodcaller("with_clipping", **fields)
            yield discrete(one.kind, one.what, clipped, *one.values, removes=one.kind == "clip_missing")
    sizes = np.abs(sample.gradients / program.clipped[: len(sample.gradients), None])
    starts = tuple(float(x) for x in np.quantile(sizes, (0.5, 0.9, 0.99)) if x > 0)
    values = Unknown((*VALUES, *starts), "log", low=1e-12, high=float(sizes.max()))
    others = "clip_norm", "clip_missing", "clip_norm_local", "clip_epsilon"
    yield _fitted(partial(by_value, reference=reference), values, *others)


def _fitted(wrong: Callable[[float], ClippingFault], unknown: Unknown, *excludes: str) -> OptimizerEdit:
    return OptimizerEdit(
        wrong(1.0)[0].kind,
        lambda program, v: program.with_clipping(**wrong(v[0])[1]),
        lambda v: wrong(v[0])[0].what,
        (unknown,),
        frozenset(excludes),
        values=lambda v: wrong(v[0])[0].values,
    )
