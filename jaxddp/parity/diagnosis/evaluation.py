"""Compare the evaluations of both sides with the weights after torch's run, and explain a difference."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxddp.parity.cases import PortCase
from jaxddp.parity.compare.evaluation import ALLOWED, Output, compared, not_compared, padded
from jaxddp.parity.coverage import Aspect
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.cause_lines import with_function_lines
from jaxddp.parity.diagnosis.differences import NOT_SEARCHED
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.findings import Cause, Difference, Problem
from jaxddp.parity.jax_side.evaluation import EvaluateJax
from jaxddp.parity.port.evaluation import PREDICT, Evaluated
from jaxddp.parity.processes import ChildError
from jaxddp.parity.quote import Quote
from jaxddp.parity.records import is_large_model
from jaxddp.parity.torch_side.evaluation import EvaluateTorch
from jaxddp.parity.torch_side.rank import rank_folder
from jaxddp.parity.workers import Workers

STAGE = "evaluation"
SEEDS = (0, 1, 2)  # of small changes of torch's weights, which show how an output rounds
# Residual, over that of such a change, up to which an output is equal; measured for a constant, and for inputs, in
# float32: 0.05 to 0.1.
ROUNDS = 2.0
NOT_ROUNDING = 1e-3  # residual of such a change from which an output hangs on the last bit, as that of a tie
# Mode of torch's model that computes what jax does -> words.
MODES = {  # of training, in which a port's model may be evaluated
    "dropout": Statement("evaluated_with_dropout"),
    "statistics": Statement("evaluated_with_statistics"),
    "training": Statement("evaluated_in_training"),
}
FIX = "put the model into evaluation mode in predict, or in the loss where it gets `train`"
FIX_TORCH = "make torch's functions depend on the module's mode, as F.dropout by `training=self.training`"
FIX_UNUSED = "compute the outputs with the model that predict is given, not with weights of the file"
EARLIER = {"samples": "the examples of the run differ", "local_loss": "the loss of the run differs"}
ALONE = "The losses differ in evaluation mode, residual {number}; this port has no predict, so it decides nothing."
HANGS = "it changes with the last bit of the weights in float32"
FIX_PADS = "let each example's output depend only on that example, or return metrics that are means over the batch"

Sides = tuple[Sequence[Evaluated], Sequence[Evaluated]]  # torch's and jax's, batch by batch
Functions = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Evaluations:
    """Evaluations of both sides, batch by batch.

    Attributes:
        torch, jax: what each side computes.
        results: comparison of outputs, losses and metrics.
        filled: the same of losses and metrics with jax's batches as its trainer fills them up.
        allowed: largest residual of each that counts as equal.
    """

    torch: Sequence[Evaluated]
    jax: Sequence[Evaluated]
    results: Mapping[str, Output]
    filled: Mapping[str, Output]
    allowed: Mapping[str, float]

    def differing(self, results: Mapping[str, Output]) -> list[str]:
        """Return names of what differs; only outputs of `predict` if one does, since metrics follow from them."""
        names = [name for name, output in results.items() if not output.residual <= self.allowed[name]]
        return [name for name in names if is_output(name)] or names


def is_output(name: str) -> bool:
    """Return whether a name is that of an output of `predict`, perhaps of one of several test sets.

    >>> is_output("noisy_predict.logits"), is_output("loss")
    (True, False)
    """
    return name.partition(".")[0].endswith(PREDICT)


def evaluation_of(
    evidence: Evidence, searches: InterruptibleSearches, causes: bool = True
) -> tuple[dict[str, Aspect], list[Difference]]:
    """Compare the evaluations; return a row for the report, if any, and a difference, if there is one.

    Args:
        evidence: the run.
        searches: runs the jobs of both sides.
        causes: look for what a difference comes from.
    """
    if not evidence.judgement.residuals or not isinstance(evidence.case, PortCase):
        return {}, []
    if not {"predict", "test_data"} & {*evidence.facts.evaluation}:
        return _of_losses(evidence, searches), []
    early, failed = [why for stage, why in EARLIER.items() if stage in evidence.judgement.first], list[Problem]()
    sides = None if early else searches.run(lambda: _both_sides(evidence, searches.workers), failed)
    if sides is None:
        return _left_out([*early, *map(str, failed), "the check ended early"][0]), []
    if any(of_torch.digest != of_jax.digest for of_torch, of_jax in zip(*sides, strict=False)):
        return _left_out("test_data() returns other examples at each call"), []
    return _row_and_difference(evidence, searches, _judged(evidence, searches, sides), causes)


def _row_and_difference(
    evidence: Evidence, searches: InterruptibleSearches, evaluations: Evaluations, causes: bool
) -> tuple[dict[str, Aspect], list[Difference]]:
    reasons = not_compared(evaluations.torch, evaluations.jax)
    differing = evaluations.differing(evaluations.results) or evaluations.differing(evaluations.filled)
    if not differing:
        return {STAGE: _without_difference(evaluations, reasons)}, []
    difference = _difference(evidence, searches, evaluations, differing, causes)
    says = f"The evaluation differs in {difference.tensor}, residual {difference.residual:.2g}."
    where = difference.residual, 0, difference.allowed, difference.tensor
    return {STAGE: Aspect("differs", (says, *_sentences(reasons)), *where)}, [difference]


def _left_out(why: str) -> dict[str, Aspect]:
    return {STAGE: Aspect("not compared", tuple(_sentences({STAGE: why})))}


def _sentences(reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each reason for which parts of the evaluation were not compared.

    >>> [*_sentences({"predict": "jax raises KeyError", "metrics": "jax raises KeyError"})]
    ['Not compared in evaluation: predict, metrics, since jax raises KeyError.']
    """
    for why in dict.fromkeys(reasons.values()):
        parts = [part for part in reasons if reasons[part] == why]
        what = f"Not compared in evaluation: {', '.join(parts)}"
        what = "The evaluation was not compared" if parts == [STAGE] else what
        yield f"{what}, since {why}."


def _of_losses(evidence: Evidence, searches: InterruptibleSearches) -> dict[str, Aspect]:
    """Compare the losses in evaluation mode, of a port that has no evaluation; a difference then decides nothing.

    There is no row unless torch's losses depend on the mode, and those of jax too: a port that only trains may give its
    layers their mode by hand.
    """
    start, workers = evidence.start, searches.workers
    if evidence.facts.multi_loss or is_large_model(start) or EARLIER.keys() & evidence.judgement.first.keys():
        return {}
    modes = ("evaluation", "training")
    torch = searches.run(lambda: workers.torch.do(_torch_job(evidence, modes=modes))[0], [])
    if not torch or _residual(torch["training"], torch["evaluation"], "loss") == 0:
        return {}
    jax = searches.run(lambda: workers.jax.do(_jax_job(evidence)), [])
    if not jax or not_compared(torch["evaluation"], jax):
        return {}
    evaluations = _judged(evidence, searches, (torch["evaluation"], jax))
    if not (differing := evaluations.differing(evaluations.results)):
        return {STAGE: _without_difference(evaluations, {})}
    name = differing[0]
    residual, allowed = evaluations.results[name].residual, evaluations.allowed[name]
    if _residual(torch["training"], jax, name) <= allowed:
        return {}
    return {STAGE: Aspect("not compared", (ALONE.format(number=f"{residual:.2g}"),), residual, 0, allowed, name)}


def _both_sides(evidence: Evidence, workers: Workers) -> Sides:
    """Evaluate on both sides, at the same time unless the model is large."""
    of_jax, of_torch = _jax_job(evidence), _torch_job(evidence)
    if is_large_model(evidence.start):
        torch = workers.torch.do(of_torch)[0]["evaluation"]
        workers.end_torch(patience=10.0)
        return torch, workers.jax.do(of_jax)
    workers.jax.start(of_jax)
    try:
        torch = workers.torch.do(of_torch)[0]["evaluation"]
    except ChildError:
        workers.jax.wait()
        raise
    return torch, workers.jax.wait()


def _torch_job(evidence: Evidence, **change: Any) -> EvaluateTorch:
    ranks = [rank_folder(evidence.torch_folder, rank) for rank in range(evidence.case.world_size)]
    return EvaluateTorch(evidence.case.torch_source, evidence.start, ranks, evidence.case.steps, **change)


def _jax_job(evidence: Evidence, train: bool = False) -> EvaluateJax:
    assert isinstance(evidence.case, PortCase), "a built-in model has no evaluation"
    return EvaluateJax(evidence.case, evidence.start, evidence.torch_folder, train)


def _judged(evidence: Evidence, searches: InterruptibleSearches, sides: Sides) -> Evaluations:
    """Compare both sides; what exceeds float64's rounding is compared with what torch's outputs make of float32's."""
    torch, jax = sides
    results, filled = compared(torch, jax), compared(torch, padded(jax)) if padded(jax) else {}
    allowed = dict.fromkeys((*results, *filled), ALLOWED)
    if any(not output.residual <= ALLOWED for output in (*results.values(), *filled.values())):
        for job in [_torch_job(evidence, seed=seed) for seed in SEEDS]:
            changed = searches.run(partial(searches.workers.torch.do, job), [])
            of_change = compared(torch, changed[0]["evaluation"]) if changed else {}
            for name in allowed.keys() & of_change.keys():
                allowed[name] = max(allowed[name], ROUNDS * of_change[name].residual)
    return Evaluations(torch, jax, results, filled, allowed)


def _without_difference(evaluations: Evaluations, reasons: Mapping[str, str]) -> Aspect:
    results, allowed = evaluations.results, evaluations.allowed
    hanging = [name for name, x in results.items() if not x.residual <= ALLOWED and allowed[name] > NOT_ROUNDING]
    reasons = {**reasons, **dict.fromkeys(hanging, HANGS)}
    if not results:
        return Aspect("not compared", tuple(_sentences(reasons or {STAGE: "predict returns no array"})))
    worst = max(results, key=lambda name: results[name].residual / allowed[name])
    verdict = "not compared" if reasons else "equal"
    return Aspect(verdict, tuple(_sentences(reasons)), results[worst].residual, 0, allowed[worst], worst)


def _difference(
    evidence: Evidence,
    searches: InterruptibleSearches,
    evaluations: Evaluations,
    differing: Sequence[str],
    causes: bool,
) -> Difference:
    results = evaluations.results if differing[0] in evaluations.differing(evaluations.results) else evaluations.filled
    name = max(differing, key=lambda name: results[name].residual)
    output, allowed = results[name], evaluations.allowed[name]
    cause = None
    if results is evaluations.filled:
        cause = Statement("evaluation_padded"), FIX_PADS, f"filled up, {name} has a residual of {output.residual:.2g}"
    elif causes:
        cause = _cause(evidence, searches, evaluations, name)
    lines = with_function_lines(evidence, searches, None, _functions(name)).lines[0]
    jax, torch = Quote.of(lines.jax), Quote.of(lines.torch) if lines.torch != lines.jax else None
    detail = _detail([x.size for x in evaluations.torch if name.startswith(x.test_set)], output, allowed)
    where = STAGE, 0, name, output.residual, allowed
    if cause is None:
        return Difference(*where, detail=detail, jax=jax, torch=torch, needs="" if causes else NOT_SEARCHED)
    what, fix, measured = cause
    known = Cause((Deviation(STAGE, what, fix=fix),), 0.0, measured=measured, jax=jax, torch=torch)
    return Difference(*where, detail=detail, cause=known)


def _detail(sizes: Sequence[int], output: Output, allowed: float) -> str:
    """Say which examples differ, in batches of these sizes."""
    if output.only_last(allowed):
        return f"only the last batch differs, which has {sizes[-1]} examples, the others {sizes[0]}"
    return f"{output.differing} of {output.examples} examples differ" if output.examples else ""


def _functions(name: str) -> Functions:
    """Return the names of the functions that compute an output, for jax and for torch."""
    if is_output(name):
        return ("predict",), ("predict",)
    if name.endswith("loss"):
        return ("jax_loss",), ("torch_loss",)
    return ("jax_metrics", "metrics"), ("torch_metrics", "metrics")


def _cause(
    evidence: Evidence, searches: InterruptibleSearches, evaluations: Evaluations, name: str
) -> tuple[Statement, str, str] | None:
    """Return what a difference comes from, what to do, and the proof; None: unknown."""
    jax, workers = evaluations.jax, searches.workers
    if is_output(name) and not jax[0].depends:
        return Statement("weights_unused"), FIX_UNUSED, "jax's program reads no parameter"
    torch = searches.run(lambda: workers.torch.do(_torch_job(evidence, modes=(*MODES,)))[0], []) or {}
    for mode, evaluated in torch.items():
        if (left := _residual(evaluated, jax, name)) <= evaluations.allowed[name]:
            return MODES[mode], FIX, f"with torch's model in that mode the residual is {left:.2g}"
    training = searches.run(lambda: workers.jax.do(_jax_job(evidence, train=True)), [])
    if training and is_output(name) and (left := _residual(evaluations.torch, training, name)) <= ALLOWED:
        return (
            Statement("torch_evaluates_in_training"),
            FIX_TORCH,
            f"with jax's model in training mode the residual is {left:.2g}",
        )
    return None


def _residual(torch: Sequence[Evaluated], jax: Sequence[Evaluated], name: str) -> float:
    results = compared(torch, jax)
    return results[name].residual if name in results else math.inf
