"""Sentences of faults of an optimizer and its schedule."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxddp.parity.deviation import first_names, number

Names = tuple[str, ...]
Numbers = tuple[float, ...]
MOST_STEPS = 6  # whose numbers are said
STATE = {
    **dict.fromkeys(("exp_avg", "grad_avg"), "means of gradients"),
    **dict.fromkeys(("exp_avg_sq", "square_avg", "sum"), "means of squares"),
    **{"momentum_buffer": "momentum", "max_exp_avg_sq": "largest squares", "step": "count"},
    "schedule": "position in the schedule",
}
OPTIONS = {"betas[0]": "beta1", "betas[1]": "beta2", "initial_accumulator_value": "the accumulator's start"}
OPTIONS |= {"RMSprop.alpha": "RMSprop's decay of squares"}
SOURCES = {"update": "is that of {}", "result": "makes it {}", "before": "is that of the step before", "": ""}
ENDS = {1: "ends a step later", -1: "ends a step earlier"}
UNLIKE = "unlike in the reference"
# Words for the keys in the parts of statements.
WORDS: Mapping[str, Mapping[Any, str]] = {
    "counts": {
        "replicas_times_micro_batches": "replicas times micro-batches",
        "micro_batches": "the number of micro-batches",
        "replicas": "the number of replicas",
        "replicas_or_micro_batches": "the number of replicas, or of micro-batches",
    },
    "divided": {"divided_by": "divided by"},
    "flag": {"nesterov": "Nesterov momentum", "amsgrad": "AMSGrad", "centered": "a centred RMSprop"},
    "half": {"torch": "the reference", "jax": "the port"},
    "inside": {True: "too, and not only outside", False: "the reference has it outside"},
    "optax": {
        "optax.nadam": "torch's momentum grows from step to step",
        "optax.radam": "torch adds eps before it corrects the bias, and rectifies in double precision",
        "optax.rprop": "torch uses each step size in the step that changes it",
    },
    "reach": {
        "all": "on all tensors",
        "matrices": "on tensors with two or more dimensions",
        "all_but_biases": "on all but biases",
        "all_but_norms": "on all but norms",
        "all_but_other_biases": "on all but biases of other layers than norms",
        "all_but_embeddings": "on all but embeddings",
        "all_but_biases_and_norms": "on all but biases and norms",
        "all_but_biases_norms_and_embeddings": "on all but biases, norms and embeddings",
        "vectors": "on tensors of one dimension only",
    },
    "decay": {True: "as an L2 penalty", False: "decoupled"},
    "decays": {
        True: "an L2 penalty, in the reference it is decoupled",
        False: "decoupled, in the reference it is an L2 penalty",
    },
    "shift": {1: "ahead", -1: "behind"},
    "rest": {
        "later": "and the rest of the schedule is as much later",
        "ends_alike": "and the schedule ends at the same step",
    },
}


def extent(values: Numbers) -> str:
    """Write the reference's values, which may differ between tensors or steps.

    >>> extent((0.9,)), extent((0.0, 0.01)), extent((0.85, 0.9, 0.95))
    ('0.9', '0 and 0.01', '0.85 to 0.95')
    """
    return " and ".join(map(number, values)) if len(values) < 3 else f"{number(values[0])} to {number(values[-1])}"


def _skipped(steps: tuple[int, ...], state_moves: bool) -> str:
    numbers = f"{', '.join(map(str, steps[:MOST_STEPS]))}{' and more' * (len(steps) > MOST_STEPS)}"
    state = "while the optimizer's state does" if state_moves else "nor does the optimizer's state"
    return f"no parameter moves at step{'s' * (len(steps) > 1)} {numbers}, {state}"


def _options(optimizer: str, each: tuple[tuple[str, float, Numbers], ...]) -> str:
    names = {name: OPTIONS.get(f"{optimizer}.{name}") or OPTIONS.get(name, name) for name, _, _ in each}
    return " and ".join(f"{names[name]} {number(jax)}, the reference has {extent(torch)}" for name, jax, torch in each)


def _decay_mask(reach: str, also: Names, lacking: Names) -> str:
    changes = {"also acts on": also, "does not act on": lacking}
    it = " and ".join(f"{what} {first_names(names)}" for what, names in changes.items() if names)
    acts = f"acts {WORDS['reach'][reach]}, {UNLIKE}: it {it}" if reach else f"{it}, {UNLIKE}"
    return f"weight decay {acts}"


def _warmup(starts: Numbers, later: int, shifts_rest: bool) -> str:
    rest = ", and so does the rest of the schedule" * shifts_rest
    if not starts:
        return f"the learning rate's warm-up {ENDS[later]} than the reference's{rest}"
    text = f"the learning rate's warm-up starts at {number(starts[0])}, the reference's at {number(starts[1])}"
    return f"{text}, and {ENDS[later]}{rest}" if later else text


def _warmup_line(jax: Numbers, torch: Numbers) -> str:
    of_jax, of_torch = (f"{number(start)}, rising by {number(by)} a step" for start, by in (jax, torch))
    return f"the learning rate's warm-up starts at {of_jax}, the reference's at {of_torch}"


def _of_rates(each: Sequence[tuple[Names, float]], alone: Names) -> Iterator[str]:
    yield from (f"of {first_names(names)} times {number(factor)}" for names, factor in each)
    if alone:
        yield f"of {first_names(alone)} other than 0, the reference's"


def _rate_differs(of: str, tensor: str, step: int, torch: float, jax: float) -> str:
    digits = next((n for n in (4, 6, 9) if f"{torch:.{n}g}" != f"{jax:.{n}g}"), 17)
    values = f"{torch:.{digits}g} in torch, {jax:.{digits}g} in jax"
    return f"the {of}{f' of {tensor}' if tensor else ''} differs first at step {step:,}: {values}"


SENTENCES: Mapping[str, str | Callable[..., str]] = {
    "updated_without_gradient": "parameters without a gradient are updated as if it were 0",
    "restoring_loses": lambda step, lost: (
        f"restoring after step {step} loses {', '.join(STATE.get(part, part) for part in lost)}"
    ),
    "restoring_changes": "restoring after step {step} changes {changed:listed}",
    "state_lost": "the optimizer's state<{counts:?} without the count> is lost every {steps} steps",
    "updates_skipped": _skipped,
    "options": _options,
    "flag": "{name:flag} in {of:half} only",
    "eps_in_root": "eps is added inside the root, {too:inside}",
    "no_bias_correction": "{optimizer} without bias correction",
    "state_in_float32": "torch keeps {of:and} of its state in float32, and the port does not",
    "corrected_squares": "AMSGrad's largest of the corrected squares, as optax has it",
    "momentum_of_updates": (
        "momentum sums updates, each at the learning rate of its step, where the reference sums gradients"
    ),
    "dampening_at_first": "dampening {jax:number} from the first gradient on, the reference has {torch:extent}",
    "squares_start": "RMSprop's squares start from {jax:number}, in the reference from 0",
    "decay": "weight decay {jax:number}, the reference has {torch:extent}",
    "decay_only_in_port": "weight decay {jax:number}, {is_coupled:decay}, {reach:reach}, where the reference has none",
    "kind_of_decay": "weight decay is {is_coupled:decays}",
    "decay_rounded": "the factor 1 - lr x decay is rounded to float32",
    "decay_without_rate": (
        "weight decay is not multiplied by the learning rate<{is_added:?}, and is added to the weights>"
    ),
    "decay_after_update": (
        "weight decay is applied after the update, to the updated weights, in the reference before it"
    ),
    "decay_mask": _decay_mask,
    "optax_rule": "{function}'s rule: {function:optax}",
    "updates_of_others": lambda each: "; ".join(
        f"the update of {name} {SOURCES[source].format(other)}" for name, source, other in each
    ),
    "gradients_applied": (
        "the parameters move by their gradients times {factor:number}<{by_rate:?} and the rate>, "
        "in {optimizer} by its updates"
    ),
    "sum_moved_once": (
        "torch moves {names:listed} by an update each<{clips:?}, and clips by a norm that counts each>, "
        "jax their sum by one"
    ),
    # Rates.
    "rate_by_count": "learning rate {by:divided} {factor:number}, <{is_root:?}the root of >{of:counts}",
    "rate_times": "learning rate times {factor}",
    "rates_of_tensors": lambda each, alone: f"learning rate {', '.join(_of_rates(each, alone))}",
    "not_updated": "not updated in the port: {names:first_names}",
    "updated_alone": "updated in the port alone: {names:first_names}",
    "rate_rounded": "the learning rate is off by {by:.0e} of the largest, as where a part of it is computed in float32",
    "other_rate_at": (
        "the learning rate is {jax:number} at step {step}, the reference's {torch:number}; "
        "it differs at {differing} of {steps} steps"
    ),
    "schedule_number": "{of}'s {key} {jax}, the reference has {torch}",
    "rate_differs_at": _rate_differs,
    "update_differs_at": (
        "the update< of {tensor}> differs first at step {step:,}, by no factor: a number of the optimizer other than "
        "its learning rate follows a schedule on only one side"
    ),
    "schedule_shifted": "the schedule is one step {by:shift}",
    "schedule_too_fast": "the schedule advances {times} times per step, {of:counts}",
    "rate_held": "the learning rate changes only every {steps} steps",
    "schedule_slowed": "the schedule advances only every {steps} steps",
    "schedule_repeated": "the schedule starts again every {steps} steps",
    "rate_stays": "the learning rate stays at {jax:number}, the reference's changes",
    "rate_changes_every": "the learning rate changes every {jax} steps, the reference's every {torch}",
    "falls_by": lambda jax, torch, steps: (
        f"the learning rate falls by the factor {number(jax)} {f'every {steps} steps' if steps > 1 else 'at each step'}"
        f", the reference's by {number(torch)}"
    ),
    "falls_as_far": "the learning rate falls {times:number} times as far from its peak as the reference's",
    "falls_to": "the learning rate falls to {jax:number}, the reference's to {torch:number}",
    "rate_to_power": "the learning rate's share of its peak is the reference's to the power {power:number}",
    "schedule_stretched": "the schedule is stretched: a step of it takes {steps:number} steps",
    "no_warmup": "the learning rate has no warm-up, the reference's starts at {torch:number}",
    "warmup": _warmup,
    "warmup_length": "the learning rate's warm-up takes {jax} steps, the reference's {torch}<, {rest:rest}>",
    "warmup_line": _warmup_line,
}
