"""Compare two runs stage by stage, and judge every stage given its inputs.

A port that sums its gradients has wrong updates too, yet its optimizer is right: given the same gradients, torch's
optimizer would compute the same updates. A stage therefore counts as different only if it differs from what the
reference would compute from the same inputs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxddp.parity.case_interface import LOCAL_STAGES
from jaxddp.parity.compare.clipping import NOT_CLIPPED, mean_gradients, reference_clipping, shows_clipping
from jaxddp.parity.compare.rates import shares_of_float32
from jaxddp.parity.compare.residuals import residuals
from jaxddp.parity.compare.whole import Whole
from jaxddp.parity.findings import ORDER, StageResult
from jaxddp.parity.fingerprints import differing_share, differing_shares
from jaxddp.parity.port import Facts
from jaxddp.parity.records import COUNTER, Record, StoredRecord, Tensors, full_norm, of_loss, relative, stage_norm

# Largest residual that counts as equal, in float64.
ALLOWED = {
    "samples": 0.0,
    "hyperparameters": 1e-6,  # optax stores them in float32; measured: up to 3e-8
    "local_loss": 1e-12,  # measured: up to 1e-15
    "local_gradients": 1e-12,  # measured: up to 1e-15
    "gradients": 1e-12,  # measured: up to 1e-15
    "clipped_gradients": 1e-12,  # measured: up to 1e-15
    "update": 1e-12,  # measured: up to 3e-14; see `rounding_of_update` for steps much smaller than the parameters
    "buffers": 1e-12,  # measured: up to 1e-15
    "optimizer_state": 1e-12,  # measured: up to 1e-14
}
# Local stages that a port's step shows -> the same, computed only from its loss.
OWN_LOSS, OWN_LOCAL = "own_local_loss", "own_local_gradients"
EPSILON = float(np.finfo(np.float64).eps)
# Names of optimizer states and hyperparameters in torch and in optax; compared where both sides have them.
STATES = {
    **{"exp_avg": ("mu",), "exp_avg_sq": ("nu",), "exp_inf": ("nu",), "square_avg": ("nu", "e_g")},
    **{"grad_avg": ("mu",), "sum": ("sum_of_squares",), "acc_delta": ("e_x",), "ax": ("average",)},
    **{"prev": ("previous",), "step_size": ("sizes",)},
}
MOMENTUM = ("buffer", "trace")  # torch's momentum_buffer; optax stores it in the same units for SGD only
RATES = {"learning_rate": "lr", "eps": "eps", "weight_decay": "weight_decay", "momentum": "momentum"}


@dataclass
class Located:
    """First step at which a stage differs, and the tensor that differs most there.

    Attributes:
        step: step, counted from 1.
        tensor: name of the tensor.
        residual: residual of the tensor.
        allowed: largest residual that would count as equal.
        detail: further text for the report.
    """

    step: int
    tensor: str
    residual: float
    allowed: float
    detail: str = ""

    @classmethod
    def worst(cls, step: int, residuals: Mapping[str, float], allowed: float, detail: str = "") -> "Located":
        """Return the tensor that differs most at a step."""
        tensor = max(residuals, key=residuals.__getitem__)
        return cls(step, tensor, residuals[tensor], allowed, detail)


@dataclass
class Judgement:
    """Result of comparing two runs.

    Attributes:
        residuals: stage -> per step, tensor -> residual of jax against torch.
        given: the same, against what the reference computes from jax's inputs of the stage.
        update_rounding: per step, see `rounding_of_update`.
        shares: per step, see `rate_in_float32`.
        rates_off: per step, rounding of a float32 rate, relative to the largest rate so far.
        shapes: tensor -> shape.
        same_examples: per step, replicas that were given the same examples on both sides.
        first: stage -> first difference from what the reference would compute from the same inputs.
    """

    residuals: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    given: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    update_rounding: list[float] = field(default_factory=list)
    shares: list[dict[str, float]] = field(default_factory=list)
    rates_off: list[float] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    same_examples: list[list[int]] = field(default_factory=list)
    first: dict[str, Located] = field(default_factory=dict)

    def results(self, alone: bool = False) -> dict[str, StageResult]:
        """Return each stage's result over all steps; with `alone`, given jax's inputs where that was judged."""
        steps = {**self.residuals, **{stage: x for stage, x in self.given.items() if alone and stage in self.residuals}}
        return {
            stage: stage_result(steps[stage], self.allowed(stage), self.shapes) for stage in ORDER if stage in steps
        }

    def exceeding(self) -> Iterator[tuple[str, Located]]:
        """Yield where each stage first differs by more than is allowed, although no stage was found to differ."""
        for stage, result in self.results(alone=True).items():
            steps = enumerate(result.residuals, start=1)
            if step := next((step for step, worst in steps if worst > result.allowed), None):
                of_step = (self.given.get(stage) or self.residuals[stage])[step - 1]
                yield stage, Located.worst(step, of_step, result.allowed, "no stage before it differs")

    @property
    def rate_rounding(self) -> float:
        """Largest rounding of a float32 rate of jax, relative to the largest rate so far."""
        return max(self.rates_off, default=0.0)

    def allowed(self, stage: str, step: int | None = None) -> float:
        """Return the largest residual that counts as equal at a step (from 1), or at any step if None."""
        if stage != "update":
            return ALLOWED.get(stage.removeprefix("own_"), 0.0)
        rounding = self.update_rounding if step is None else self.update_rounding[step - 1 : step]
        return ALLOWED[stage] + max(rounding, default=0.0)


def stage_result(
    steps: Sequence[Mapping[str, float]], allowed: float, shapes: Mapping[str, tuple[int, ...]]
) -> StageResult:
    """Return the result of a stage.

    Args:
        steps: per step, tensor -> residual.
        allowed: largest residual that counts as equal.
        shapes: shapes of the model's tensors.
    """
    worst: dict[str, float] = {}
    for of_step in steps:
        for name, value in of_step.items():
            worst[name] = max(worst.get(name, 0.0), value)
    tensors = {name: (shapes.get(name.rpartition(":")[2], ()), value) for name, value in worst.items()}
    return StageResult(allowed, tuple(max(of_step.values(), default=math.nan) for of_step in steps), tensors)


def judge(
    torch_records: Sequence[StoredRecord],
    jax_records: Sequence[StoredRecord],
    facts: Facts,
    optimizer: str,
    highest: float = 0.0,
) -> Judgement:
    """Compare every stage of every step that both sides took.

    Args:
        torch_records: records of the reference.
        jax_records: records of the run that the reference forces.
        facts: facts about the training loop.
        optimizer: class name of torch's optimizer.
        highest: largest learning rate that the schedule is known to reach after the run.
    """
    judgement, peak = Judgement(), 0.0
    for step, (torch, jax) in enumerate(zip(torch_records, jax_records, strict=False), start=1):
        judgement.shapes |= {name: value.shape for name, value in torch["update"].items()}
        judgement.update_rounding.append(rounding_of_update(torch))
        judgement.same_examples.append(_same_examples(torch, jax, facts))
        peak = max([peak, *(group["lr"] for group in torch.notes["groups"])])
        judgement.shares.append(rate_in_float32(torch, jax, max(peak, highest)))
        judgement.rates_off.append(_rate_off(torch, judgement.shares[-1], peak))
        context = facts, optimizer, judgement.shares[-1], max(peak, highest)
        whole = {stage: of_stage for stage, *of_stage in _stages_of_whole(torch, jax, *context)}
        for stage, plain, given in _stages(torch, jax, *context):
            plain, given = map(largest, (plain, given), whole.get(stage, ({}, {})))
            if plain:
                judgement.residuals.setdefault(stage, []).append(plain)
                judgement.given.setdefault(stage, []).append(given or plain)
            _locate(judgement, stage, step, given)
        moved = judgement.first.get("update")
        if moved is not None and moved.step == step and moved.tensor not in torch["clipped_gradients"]:
            moved.detail = "torch has no gradient for it (it is frozen, or the loss does not use it), and jax moves it"
        for stage, located in _spread(torch, jax, step):
            judgement.first.setdefault(stage, located)
    return judgement


def _stages_of_whole(
    torch: StoredRecord, jax: Record, facts: Facts, *more: Any
) -> Iterator[tuple[str, dict[str, float], dict[str, float]]]:
    """Yield what `_stages` does, of projections of large tensors in place of their excerpts; nothing without any."""
    wholes = Whole(torch, torch.notes), Whole(jax, {})
    if not wholes[0].projections:
        return
    for stage, plain, given in _stages(*wholes, facts, *more):
        if stage != "clipped_gradients" or facts.clip_grad_value is None:  # which is not linear
            yield stage, plain, given


def _stages(
    torch: "StoredRecord | Whole", jax: Record, facts: Facts, optimizer: str, shares: Mapping[str, float], peak: float
) -> Iterator[tuple[str, dict[str, float], dict[str, float]]]:
    """Yield (stage, residuals against torch, residuals against torch given the same inputs).

    Args:
        torch, jax: records of one step, of torch and of jax.
        facts, optimizer: see `judge`.
        shares, peak: see `rate_in_float32`.
    """
    examples = {"examples": differing_share(torch["samples"], jax["samples"])}
    yield "samples", examples, examples
    if shown := hyperparameters_apart(torch.notes["groups"][0], jax.get("hyperparameters", {}), peak):
        yield "hyperparameters", shown, shown
    pure = {stage: of_loss(jax, stage) for stage in LOCAL_STAGES if stage in torch}
    same = _same_examples(torch, jax, facts)
    for stage in pure:
        given = _against(_of_ranks(pure[stage], same), _of_ranks(torch[stage], same)) if same else {}
        yield stage, _against(jax.get(stage, pure[stage]), torch[stage]), given
        if f"pure_{stage}" in jax and stage in jax:
            yield f"own_{stage}", {}, _against(jax[stage], pure[stage])
    mean, norm = torch["gradients"], 0.0  # in a step of several losses, optimizers may get several means
    if not facts.multi_loss:
        mean, norm = mean_gradients(torch, jax)
    gradients = jax.get("gradients", mean)
    if "gradients" in jax:
        yield "gradients", _against(gradients, torch["gradients"]), _against(gradients, mean)
    clipping = reference_clipping(facts)
    if shows_clipping(jax, facts) and (facts.custom_step or clipping != NOT_CLIPPED):
        right = clipping.clip(gradients, full_norm(jax, "gradients") if "gradients" in jax else norm)
        clipped = jax["clipped_gradients"]
        yield "clipped_gradients", _against(clipped, torch["clipped_gradients"]), _against(clipped, right)
    update = _against(jax["update"], {name: shares.get(name, 1.0) * x for name, x in torch["update"].items()})
    yield "update", update, {} if facts.custom_step else update
    if torch["buffers"]:
        buffers = _against(jax["buffers"], torch["buffers"])
        yield "buffers", buffers, buffers if 0 in same else {}
    if states := states_apart(jax.get("optimizer_state", {}), torch["optimizer_state"], optimizer):
        yield "optimizer_state", states, {} if facts.custom_step else states


def rounding_of_update(record: Record) -> float:
    """Compute the rounding error of an update that is a difference of parameters: eps ||p|| / ||update||, or 0.

    >>> rounding_of_update({"params": {"w": np.array([3.0])}, "update": {"w": np.array([1e-3])}}) < 1e-12
    True
    """
    params, update = (stage_norm(record[stage]) for stage in ("params", "update"))
    return EPSILON * params / update if update and math.isfinite(params / update) else 0.0


def rate_in_float32(torch: StoredRecord, jax: Record, peak: float) -> dict[str, float]:
    """Return the factor by which a float32 rate scales each of jax's updates; 1 where the rate is not a float32 number.

    Args:
        torch, jax: records of one step, of torch and of jax.
        peak: largest rate of the schedule.
    """
    groups = [(group["names"], group["lr"]) for group in torch.notes["groups"]]
    return shares_of_float32(jax["update"], torch["update"], groups, peak, rounding_of_update(torch))


def _rate_off(torch: StoredRecord, shares: Mapping[str, float], peak: float) -> float:
    groups = [group for group in torch.notes["groups"] if group["names"]]
    return max((relative(abs(shares[g["names"][0]] - 1) * g["lr"], peak) for g in groups), default=0.0)


def _same_examples(torch: Record, jax: Record, facts: Facts) -> list[int]:
    """Return the replicas that were given the same examples; the gradients of others cannot be compared."""
    shares = differing_shares(torch["samples"], jax["samples"])
    same = [rank for rank, share in enumerate(shares) if share == 0]
    # With one mean over all elements each replica's gradient depends on the other replicas' counts.
    return same if facts.loss_normalization == "ddp" or len(same) == len(shares) else []


def largest(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the larger residual of each tensor."""
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}}


def _of_ranks(tensors: Tensors, ranks: list[int]) -> Tensors:
    return {name: value[ranks] for name, value in tensors.items()}


def _against(jax: Tensors, torch: Tensors) -> dict[str, float]:
    """Compute the residuals of torch's tensors; a jax tensor of zeros that torch lacks counts as equal."""
    torch = {name: value for name, value in torch.items() if not name.endswith(COUNTER)}
    unused = {name: np.zeros_like(jax[name]) for name in jax if name not in torch and not np.any(jax[name])}
    return residuals({name: jax[name] for name in (*torch, *unused)}, {**torch, **unused})


def _locate(judgement: Judgement, stage: str, step: int, of_tensors: Mapping[str, float]) -> None:
    """Record this step as the stage's first difference if it is."""
    if stage in judgement.first or not of_tensors:
        return
    located = Located.worst(step, of_tensors, judgement.allowed(stage, step))
    if not located.residual <= located.allowed:
        judgement.first[stage] = located


def _spread(torch: Record, jax: Record, step: int) -> Iterator[tuple[str, Located]]:
    """Yield the shared stages in which the replicas do not hold the same bits."""
    by_stage: dict[str, dict[str, float]] = {}
    for key, value in jax["spread"].items():
        stage, _, name = key.partition(":")
        apart = float(np.max(np.abs(value - value[:1])))
        by_stage.setdefault(stage, {})[name] = relative(apart, stage_norm(jax[stage]))
    for stage, of_stage in by_stage.items():
        if stage == "params" and not by_stage.keys() <= {"params", "buffers"}:
            continue  # the parameters differ because the gradients do
        detail = f"the replicas differ from each other in {len(of_stage)} tensors"
        yield ("update" if stage == "params" else stage), Located.worst(step, of_stage, 0.0, detail)


def hyperparameters_apart(group: Mapping[str, Any], shown: Mapping[str, Any], peak: float) -> dict[str, float]:
    """Compute relative differences of the hyperparameters that both sides show.

    Args:
        group: torch's parameter group.
        shown: jax's hyperparameters, under optax's names.
        peak: largest learning rate, to which differences of the rate are relative.
    """
    pairs = {n: (float(shown[n]), float(group[key])) for n, key in RATES.items() if n in shown and key in group}
    scale = {name: max(abs(b), peak if RATES[name] == "lr" else 0.0) for name, (_, b) in pairs.items()}
    return {name: relative(abs(a - b), scale[name], abs(a)) for name, (a, b) in pairs.items()}


def _like(jax: Tensors, torch: Tensors) -> Tensors:
    """Scale jax's momentum to torch's units: an optax chain may apply the rate before or after the momentum."""
    dot, square = (sum(float(np.vdot(jax[name], x[name])) for name in jax) for x in (torch, jax))
    return {name: value * dot / square for name, value in jax.items()} if square and dot else jax


def states_apart(jax: Tensors, torch: Tensors, optimizer: str, whole: bool = True) -> dict[str, float]:
    """Compute the residuals of the states that both optimizers have, in the same units.

    Args:
        jax, torch: states by kind and parameter, "mu:fc.weight" and "exp_avg:fc.weight".
        optimizer: class name of torch's optimizer.
        whole: leave out kinds of states that jax has for some of the parameters only.
    """
    state_residuals: dict[str, float] = {}
    for kind in sorted({key.partition(":")[0] for key in torch}):
        torch_states = {key: x for key, x in torch.items() if key.startswith(f"{kind}:")}
        for name in states_of_kind(kind, optimizer):
            jax_states = {key: jax[twin] for key in torch_states if (twin := key.replace(kind, name, 1)) in jax}
            if jax_states and (not whole or jax_states.keys() == torch_states.keys()):
                same_units = _like(jax_states, torch_states) if name in MOMENTUM else jax_states
                state_residuals |= residuals(same_units, {key: torch_states[key] for key in jax_states})
                break
    return state_residuals


def states_of_kind(kind: str, optimizer: str) -> tuple[str, ...]:
    """Return optax's names for a state of torch's optimizer of this class.

    >>> states_of_kind("exp_avg", "AdamW"), states_of_kind("momentum_buffer", "SGD")
    (('mu',), ('buffer', 'trace'))
    """
    return STATES.get(kind, MOMENTUM if optimizer == "SGD" else ())
