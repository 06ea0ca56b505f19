"""Changes of calls that have, by default or by habit, another meaning in JAX than in torch.

Each function yields the changes that a port may have made to a call.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.config.choices import IGNORE_INDEX
from jaxddp.parity.catalogue.model import BY_ERF, BY_HAND, UPDATES
from jaxddp.parity.deviation import Statement, Value, as_code, rounded
from jaxddp.parity.diagnosis.forward.answers import (
    argument,
    instead,
    multiplied,
    with_argument,
    with_options,
    with_value,
)
from jaxddp.parity.diagnosis.forward.calls import Answer, Call, Change, Proceed
from jaxddp.parity.diagnosis.forward.statistics import affine

NORMS = {
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
    "group_norm": "GroupNorm",
    "instance_norm": "InstanceNorm",
    "batch_norm": "BatchNorm",
}
# Function -> its parameter that is a dropout rate.
DROPOUTS = {
    **{f"dropout{dims}": "p" for dims in ("", "1d", "2d", "3d")},
    "scaled_dot_product_attention": "dropout_p",
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), "dropout"),
}
ADDITIONS = ("add", "add_")  # called by a + b and a += b
_LOSS_DEFAULTS = {"weight": None, "ignore_index": IGNORE_INDEX, "reduction": "mean"}
SMALL = 0.01  # largest eps in a hand-written normalisation


def gelu(call: Call) -> Iterator[Change]:
    """Yield GELU by the other formula, tanh or erf."""
    if call.name == "gelu":
        is_tanh = call.get("approximate") == "tanh"
        answer = with_options(approximate="none" if is_tanh else "tanh")
        what = Statement("gelu", by="erf" if is_tanh else "tanh")
        yield Change("gelu_approximation", what, answer, detail=BY_ERF if is_tanh else "")


def norm_epsilon(call: Call) -> Iterator[Change]:
    """Yield another eps in a normalisation layer, torch's or hand-written."""
    if call.name in NORMS:
        default = torch.finfo(call.get("input").dtype).eps if call.name == "rms_norm" else 1e-5
        eps = call.get("eps")
        what, reference = Statement("norm_epsilon", norm=NORMS[call.name]), float(default if eps is None else eps)
        yield _epsilon(what, reference, "eps", Value(call=call.name, key="eps"))
    elif call.name in ADDITIONS and len(call.args) > 1 and any(map(_is_root, call.into)):
        added = call.args[1]
        if isinstance(added, float) and 0 < added <= SMALL:
            yield _epsilon(Statement("epsilon_under_root"), added, 1, Value(call=call.name), BY_HAND)


def _is_root(call: Call) -> bool:
    return call.name in ("sqrt", "rsqrt") or (call.name == "pow" and call.args[1] in (0.5, -0.5))


def _epsilon(what: Statement, reference: float, key: int | str, value: Value, detail: str = "") -> Change:
    start = 1e-6 if reference != 1e-6 else 1e-5
    return Change("norm_epsilon", what, with_value(key), reference, start, values=(value,), detail=detail)


def label_smoothing(call: Call) -> Iterator[Change]:
    """Yield another label smoothing."""

    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        if call.name == "nll_loss":
            # log_softmax(log_softmax(x)) is log_softmax(x), so log-probabilities can serve as logits.
            options = {name: call.get(name, default) for name, default in _LOSS_DEFAULTS.items()}
            call = replace(
                call, site=("cross_entropy", 0), function=F.cross_entropy, args=call.args[:2], kwargs=options
            )
        return proceed(call.but(label_smoothing=value))

    if call.name in ("cross_entropy", "nll_loss"):
        reference = call.get("label_smoothing", 0.0) if call.name == "cross_entropy" else 0.0
        start, values = 0.0 if reference else 0.1, (Value(call=call.name, key="label_smoothing"),)
        yield Change("label_smoothing", Statement("label_smoothing"), answer, reference, start, values=values)


def ignore_index(call: Call) -> Iterator[Change]:
    """Yield a mean that counts the ignored labels, and a loss that does not ignore them."""
    if call.name not in ("cross_entropy", "nll_loss") or call.get("target").is_floating_point():
        return
    index = call.get("ignore_index", IGNORE_INDEX)
    counts = call.get("reduction", "mean") != "mean"

    def counted(call: Call, proceed: Proceed, value: float) -> Any:
        target = call.get("target")
        valid = target != index
        if counts:
            call.count_more(float((~valid).sum()))
            return proceed(call)
        return proceed(call) * (float(valid.sum()) / valid.numel())

    def not_ignored(call: Call, proceed: Proceed, value: float) -> Any:
        if counts:
            call.count_more(float((call.get("target") == index).sum()))
        return proceed(call.but(ignore_index=IGNORE_INDEX))

    fault = partial(Change, "ignore_index", counts=counts, detail=f"{index}")
    yield fault(Statement("labels_counted", index=index), counted)
    if index != IGNORE_INDEX:
        yield fault(Statement("labels_not_ignored", index=index), not_ignored)


def weights_not_counted(call: Call) -> Iterator[Change]:
    """Yield a mean of weighted losses over the number of labels."""

    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        target = call.get("target")
        counted = call.get("weight")[target[target != call.get("ignore_index", IGNORE_INDEX)]]
        return proceed(call) * (counted.sum() / counted.numel())

    by_label = call.name in ("cross_entropy", "nll_loss") and not call.get("target").is_floating_point()
    if by_label and call.get("weight") is not None and call.get("reduction", "mean") == "mean":
        yield Change("other_expression", Statement("divided_by_labels", call=call.name), answer)


def padding_idx(call: Call) -> Iterator[Change]:
    """Yield an embedding whose padding row gets a gradient."""
    if call.name == "embedding" and call.get("padding_idx") is not None:
        what = Statement("padding_row", row=call.get("padding_idx"))
        yield Change("padding_idx", what, with_options(padding_idx=None))


def dropout_rate(call: Call, rates: Sequence[tuple[float, float]]) -> Iterator[Change]:
    """Yield dropout at the rate of JAX's mask.

    Args:
        call: any call.
        rates: the reference's rate and JAX's, of each pair of masks.
    """
    parameter = DROPOUTS.get(call.name)
    if parameter is None or (parameter == "p" and not call.get("training", True)):
        return
    reference = call.get(parameter, 0.5 if parameter == "p" else 0.0)
    for rate in dict.fromkeys(
        of_jax for of_torch, of_jax in rates if of_torch != of_jax and np.isclose(of_torch, reference)
    ):
        what = Statement("dropout_rate", jax=rounded(rate), torch=rounded(reference))
        value = Value(as_code(rate), as_code(reference), call.name, parameter)
        yield Change("dropout_rate", what, _with_rate(rate), values=(value,))


def _with_rate(rate: float) -> Answer:
    # One change may have sites of several functions, whose parameters have different names.
    return lambda call, proceed, value: proceed(call.put(DROPOUTS[call.name], rate))


def loss_terms(call: Call) -> Iterator[Change]:
    """Yield a factor of one scalar term in a sum of losses."""
    if call.name not in ADDITIONS or (isinstance(call.result, Tensor) and call.result.ndim):  # losses are scalars
        return
    for position, term in enumerate(call.args[:2]):
        if isinstance(term, Tensor) and term.requires_grad and term.ndim == 0:
            yield multiplied("auxiliary_loss_scaled", Statement("loss_term", position=position), position)


def tied_weights(calls: Sequence[Call], module: nn.Module) -> Iterator[tuple[Call, Change]]:
    """Yield uses of a parameter that pass no gradient to it, for a parameter that has several uses."""
    uses: dict[str, list[tuple[Call, int]]] = defaultdict(list)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for call in calls:
        if isinstance(call.result, Tensor) and call.result.requires_grad:
            for position, argument in enumerate(call.args):
                if id(argument) in names:
                    uses[names[id(argument)]].append((call, position))
    for name, places in uses.items():
        if len({(call.name, call.module) for call, _ in places}) > 1:
            for call, position in places:
                what = Statement("gradient_lost", name=name, call=call.name)
                yield call, Change("tied_weights", what, with_argument(position, Tensor.detach))


def batch_norm_sync(call: Call) -> Iterator[Change]:
    """Yield BatchNorm with the statistics of all replicas."""

    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        own = call.get("input")
        inputs = call.gather(own)
        of_all = proceed(call.but(input=torch.cat(list(inputs)), weight=None, bias=None))
        rank = next(rank for rank, other in enumerate(inputs) if other is own)
        first = sum(len(other) for other in inputs[:rank])
        normalised = of_all[first : first + len(own)]
        return affine(normalised, call, (1, -1) + (1,) * (own.ndim - 2))

    if call.name == "batch_norm" and call.get("training"):
        what = Statement("batch_norm_over_replicas")
        yield Change("batch_norm_sync", what, answer, lockstep=True, setting=True)


def batch_norm_eval(call: Call, updates: bool) -> Iterator[Change]:
    """Yield BatchNorm in the other mode, training or evaluation.

    Args:
        call: any call.
        updates: JAX changes the running statistics, as in training.
    """

    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        before = {name: call.get(name).clone() for name in ("running_mean", "running_var")}
        if updates:
            call.run()
        return proceed(call.but(training=False, **before))

    if _keeps_statistics(call):
        what = Statement("running_statistics", updates=updates)
        yield Change("batch_norm_eval", what, answer, setting=True, detail=UPDATES if updates else "")
    elif call.name == "batch_norm" and updates:
        what = Statement("batch_statistics")
        yield Change("batch_norm_eval", what, with_options(training=True), setting=True)


def momentum(call: Call) -> Iterator[Change]:
    """Yield another momentum m of BatchNorm's running statistics: running = (1 - m) running + m batch."""
    if _keeps_statistics(call):
        reference, values = float(call.get("momentum", 0.1)), (Value(call=call.name, key="momentum"),)
        what, answer = Statement("batch_norm_momentum"), with_value("momentum")
        yield Change("batch_norm_momentum", what, answer, reference, 1 - reference, values=values)


def biased_variance(call: Call) -> Iterator[Change]:
    """Yield BatchNorm that keeps the biased variance."""

    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        x, running = call.get("input"), call.get("running_var")
        # batch_norm keeps running_var for its backward pass, so it gets a copy that nothing changes afterwards.
        moved = running.clone()
        result = proceed(call.but(running_var=moved))
        n = x.numel() / x.shape[1]
        # The update is linear in the batch's variance, whatever the momentum is: only that part shrinks.
        share = call.get("momentum", 0.1)
        kept = (1 - share) * running
        running.copy_(kept + (moved - kept) * (n - 1) / n)
        return result

    if _keeps_statistics(call):
        yield Change("biased_variance", Statement("biased_variance"), answer)


def _keeps_statistics(call: Call) -> bool:
    return call.name == "batch_norm" and bool(call.get("training")) and isinstance(call.get("running_var"), Tensor)


LARGER, SMALLER = ("max", "maximum"), ("min", "minimum")
CLAMPS = ("clamp", "clip", "clamp_", "clip_")


def chosen_term(call: Call) -> Iterator[Change]:
    """Yield the maximum of two tensors replaced by the minimum, the first or the second tensor; or vice versa."""
    if call.name not in (*LARGER, *SMALLER) or len(_pair(call)) != 2:
        return
    right, wrong = ("larger", "smaller") if call.name in LARGER else ("smaller", "larger")
    other = torch.minimum if call.name in LARGER else torch.maximum
    functions: dict[str, Callable[..., Tensor]]
    functions = {wrong: other, "first": partial(_one_of, 0), "second": partial(_one_of, 1)}
    for which, function in functions.items():
        answer = instead(function, lambda call: (_pair(call), {}))
        yield Change("clipped_term", Statement("chosen_term", jax=which, torch=right), answer)


def _pair(call: Call) -> list[Tensor]:
    """Return the two tensors of floating-point numbers; nothing for a call with an axis, or with one tensor."""
    pair = (*call.args, *(call.kwargs[name] for name in ("input", "other") if name in call.kwargs))
    return [one for one in pair if isinstance(one, Tensor) and one.is_floating_point()] if len(pair) == 2 else []


def _one_of(place: int, *pair: Tensor) -> Tensor:
    return torch.broadcast_tensors(*pair)[place]


def clamps(call: Call) -> Iterator[Change]:
    """Yield values that are not clamped, or whose lower or upper bound is left out."""
    if call.name not in CLAMPS or not call.args or not call.args[0].is_floating_point():
        return
    yield Change("clamp_missing", Statement("not_clamped"), argument(0))
    if None not in _bounds(call).values():
        for bound, end in (("max", "below"), ("min", "above")):
            answer = instead(torch.clamp, partial(_with_one_bound, bound))
            yield Change("clamp_missing", Statement("not_clamped_on", end=end), answer)


def _bounds(call: Call) -> dict[str, Any]:
    low, high = (*call.args[1:], None, None)[:2]
    return {"min": call.kwargs.get("min", low), "max": call.kwargs.get("max", high)}


def _with_one_bound(bound: str, call: Call) -> tuple[Any, Any]:
    return call.args[:1], {bound: _bounds(call)[bound]}
