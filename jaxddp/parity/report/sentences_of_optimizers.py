"""Sentences of faults of an optimizer and its schedule."""

from collections.abc import Callable, Mapping

from jaxddp.errors import listed
from jaxddp.parity.deviation import named, number

Names = tuple[str, ...]
Numbers = tuple[float, ...]
MOST_STEPS = 6  # whose numbers are said
COUNTS = {
    "replicas_times_micro_batches": "replicas times micro-batches",
    "micro_batches": "the number of micro-batches",
    "replicas": "the number of replicas",
    "replicas_or_micro_batches": "the number of replicas, or of micro-batches",
}
STATE = {
    "exp_avg": "means of gradients",
    "grad_avg": "means of gradients",
    "exp_avg_sq": "means of squares",
    "square_avg": "means of squares",
    "sum": "means of squares",
    "momentum_buffer": "momentum",
    "max_exp_avg_sq": "largest squares",
    "step": "count",
    "schedule": "position in the schedule",
}
OPTIONS = {"betas[0]": "beta1", "betas[1]": "beta2", "initial_accumulator_value": "the accumulator's start"}
OPTIONS |= {"RMSprop.alpha": "RMSprop's decay of squares"}
FLAGS = {"nesterov": "Nesterov momentum", "amsgrad": "AMSGrad", "centered": "a centred RMSprop"}
OPTAX_RULES = {
    "optax.nadam": "torch's momentum grows from step to step",
    "optax.radam": "torch adds eps before it corrects the bias, and rectifies in double precision",
    "optax.rprop": "torch uses each step size in the step that changes it",
}
REACHES = {
    "all": "on all tensors",
    "matrices": "on tensors with two or more dimensions",
    "all_but_biases": "on all but biases",
    "all_but_norms": "on all but norms",
    "all_but_other_biases": "on all but biases of other layers than norms",
    "all_but_embeddings": "on all but embeddings",
    "all_but_biases_and_norms": "on all but biases and norms",
    "all_but_biases_norms_and_embeddings": "on all but biases, norms and embeddings",
    "vectors": "on tensors of one dimension only",
}
SOURCES = {"update": "is that of {}", "result": "makes it {}", "before": "is that of the step before", "": ""}
RESTS = {
    "": "",
    "later": ", and the rest of the schedule is as much later",
    "ends_alike": ", and the schedule ends at the same step",
}
ENDS = {1: "ends a step later", -1: "ends a step earlier"}


def _numbers(values: Numbers) -> str:
    """Write the reference's values, which may differ between tensors or steps.

    >>> _numbers((0.9,)), _numbers((0.0, 0.01)), _numbers((0.85, 0.9, 0.95))
    ('0.9', '0 and 0.01', '0.85 to 0.95')
    """
    return " and ".join(map(number, values)) if len(values) < 3 else f"{number(values[0])} to {number(values[-1])}"


def _by_count(factor: float, of: str, is_root: bool, by: str) -> str:
    return f"learning rate {by.replace('_', ' ')} {number(factor)}, {'the root of ' if is_root else ''}{COUNTS[of]}"


def _skipped(steps: tuple[int, ...], state_moves: bool) -> str:
    numbers = f"{', '.join(map(str, steps[:MOST_STEPS]))}{' and more' * (len(steps) > MOST_STEPS)}"
    state = "while the optimizer's state does" if state_moves else "nor does the optimizer's state"
    return f"no parameter moves at step{'s' * (len(steps) > 1)} {numbers}, {state}"


def _options(optimizer: str, each: tuple[tuple[str, float, Numbers], ...]) -> str:
    names = {name: OPTIONS.get(f"{optimizer}.{name}") or OPTIONS.get(name, name) for name, _, _ in each}
    return " and ".join(
        f"{names[name]} {number(jax)}, the reference has {_numbers(torch)}" for name, jax, torch in each
    )


def _decay_in_port(jax: float, is_coupled: bool, reach: str) -> str:
    kind = "as an L2 penalty" if is_coupled else "decoupled"
    return f"weight decay {number(jax)}, {kind}, {REACHES[reach]}, where the reference has none"


def _kind_of_decay(is_coupled: bool) -> str:
    kinds = ("decoupled, in the reference it is an L2 penalty", "an L2 penalty, in the reference it is decoupled")
    return f"weight decay is {kinds[is_coupled]}"


def _decay_mask(reach: str, also: Names, lacking: Names) -> str:
    changes = {"also acts on": also, "does not act on": lacking}
    it = " and ".join(f"{what} {named(names)}" for what, names in changes.items() if names)
    says = f"acts {REACHES[reach]}, unlike in the reference: it {it}" if reach else f"{it}, unlike in the reference"
    return f"weight decay {says}"


def _warmup(starts: Numbers, later: int, shifts_rest: bool) -> str:
    rest = ", and so does the rest of the schedule" if shifts_rest else ""
    if not starts:
        return f"the learning rate's warm-up {ENDS[later]} than the reference's{rest}"
    text = f"the learning rate's warm-up starts at {number(starts[0])}, the reference's at {number(starts[1])}"
    return f"{text}, and {ENDS[later]}{rest}" if later else text


def _warmup_line(jax: Numbers, torch: Numbers) -> str:
    of_jax, of_torch = (f"{number(start)}, rising by {number(by)} a step" for start, by in (jax, torch))
    return f"the learning rate's warm-up starts at {of_jax}, the reference's at {of_torch}"


def _falls_by(jax: float, torch: float, steps: int) -> str:
    every = f"every {steps} steps" if steps > 1 else "at each step"
    return f"the learning rate falls by the factor {number(jax)} {every}, the reference's by {number(torch)}"


def _rates(each: tuple[tuple[Names, float], ...]) -> str:
    return f"learning rate {', '.join(f'of {named(names)} times {number(factor)}' for names, factor in each)}"


def _updates(each: tuple[tuple[str, str, str], ...]) -> str:
    return "; ".join(f"the update of {name} {SOURCES[source].format(other)}" for name, source, other in each)


def _other_rate(step: int, jax: float, torch: float, differing: int, steps: int) -> str:
    rates = f"the learning rate is {number(jax)} at step {step}, the reference's {number(torch)}"
    return f"{rates}; it differs at {differing} of {steps} steps"


def _rate_differs(of: str, tensor: str, step: int, torch: float, jax: float) -> str:
    digits = next((n for n in (4, 6, 9) if f"{torch:.{n}g}" != f"{jax:.{n}g}"), 17)
    values = f"{torch:.{digits}g} in torch, {jax:.{digits}g} in jax"
    return f"the {of}{f' of {tensor}' if tensor else ''} differs first at step {step:,}: {values}"


def _update_differs(tensor: str, step: int) -> str:
    more = "a number of the optimizer other than its learning rate follows a schedule on only one side"
    return f"the update{f' of {tensor}' if tensor else ''} differs first at step {step:,}, by no factor: {more}"


def _moved_once(names: Names, clips: bool) -> str:
    norm = ", and clips by a norm that counts each" if clips else ""
    return f"torch moves {listed(names, joint=', ')} by an update each{norm}, jax their sum by one"


SENTENCES: Mapping[str, str | Callable[..., str]] = {
    # Optimizer.
    "updated_without_gradient": "parameters without a gradient are updated as if it were 0",
    "restoring_loses": lambda step, lost: (
        f"restoring after step {step} loses {', '.join(STATE.get(part, part) for part in lost)}"
    ),
    "restoring_changes": lambda step, changed: f"restoring after step {step} changes {listed(changed, joint=', ')}",
    "state_lost": lambda steps, counts: (
        f"the optimizer's state{' without the count' if counts else ''} is lost every {steps} steps"
    ),
    "updates_skipped": _skipped,
    "options": _options,
    "flag": lambda name, of: f"{FLAGS.get(name, name)} in {'the reference' if of == 'torch' else 'the port'} only",
    "eps_in_root": lambda too: (
        f"eps is added inside the root, {'too, and not only outside' if too else 'the reference has it outside'}"
    ),
    "no_bias_correction": "{optimizer} without bias correction",
    "state_in_float32": lambda of: f"torch keeps {' and '.join(of)} of its state in float32, and the port does not",
    "corrected_squares": "AMSGrad's largest of the corrected squares, as optax has it",
    "momentum_of_updates": (
        "momentum sums updates, each at the learning rate of its step, where the reference sums gradients"
    ),
    "dampening_at_first": lambda jax, torch: (
        f"dampening {number(jax)} from the first gradient on, the reference has {_numbers(torch)}"
    ),
    "squares_start": lambda jax: f"RMSprop's squares start from {number(jax)}, in the reference from 0",
    "decay": lambda jax, torch: f"weight decay {number(jax)}, the reference has {_numbers(torch)}",
    "decay_only_in_port": _decay_in_port,
    "kind_of_decay": _kind_of_decay,
    "decay_rounded": "the factor 1 - lr x decay is rounded to float32",
    "decay_without_rate": lambda is_added: (
        f"weight decay is not multiplied by the learning rate{', and is added to the weights' if is_added else ''}"
    ),
    "decay_after_update": (
        "weight decay is applied after the update, to the updated weights, in the reference before it"
    ),
    "decay_mask": _decay_mask,
    "optax_rule": lambda function: f"{function}'s rule: {OPTAX_RULES[function]}",
    "updates_of_others": _updates,
    "gradients_applied": lambda factor, by_rate, optimizer: (
        f"the parameters move by their gradients times {number(factor)}{' and the rate' if by_rate else ''}, "
        f"in {optimizer} by its updates"
    ),
    "sum_moved_once": _moved_once,
    # Rates.
    "rate_by_count": _by_count,
    "rate_times": "learning rate times {factor}",
    "rates_of_tensors": _rates,
    "not_updated": lambda names: f"not updated in the port: {named(names)}",
    "rate_rounded": (
        "the learning rate is off by {by:.0e} of the largest, as where a part of it is computed in float32"
    ),
    "other_rate_at": _other_rate,
    "rate_differs_at": _rate_differs,
    "update_differs_at": _update_differs,
    "schedule_shifted": lambda by: f"the schedule is one step {'ahead' if by > 0 else 'behind'}",
    "schedule_too_fast": lambda times, of: f"the schedule advances {times} times per step, {COUNTS[of]}",
    "rate_held": "the learning rate changes only every {steps} steps",
    "schedule_slowed": "the schedule advances only every {steps} steps",
    "schedule_repeated": "the schedule starts again every {steps} steps",
    "rate_stays": lambda jax: f"the learning rate stays at {number(jax)}, the reference's changes",
    "rate_changes_every": "the learning rate changes every {jax} steps, the reference's every {torch}",
    "falls_by": _falls_by,
    "falls_as_far": lambda times: (
        f"the learning rate falls {number(times)} times as far from its peak as the reference's"
    ),
    "falls_to": lambda jax, torch: f"the learning rate falls to {number(jax)}, the reference's to {number(torch)}",
    "rate_to_power": lambda power: (
        f"the learning rate's share of its peak is the reference's to the power {number(power)}"
    ),
    "schedule_stretched": lambda steps: f"the schedule is stretched: a step of it takes {number(steps)} steps",
    "no_warmup": lambda torch: f"the learning rate has no warm-up, the reference's starts at {number(torch)}",
    "warmup": _warmup,
    "warmup_length": lambda jax, torch, rest: (
        f"the learning rate's warm-up takes {jax} steps, the reference's {torch}{RESTS[rest]}"
    ),
    "warmup_line": _warmup_line,
}
