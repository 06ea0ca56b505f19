"""The fix of a fault of the optimizer is code that makes torch's optimizer, whatever that is."""

from functools import partial
from typing import Any

import jax
import optax
import pytest
import torch
from torch.nn import Parameter
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, NAdam, RMSprop

import jaxddp.optim
from jaxddp.parity.catalogue import FAULTS, TorchOptimizer
from jaxddp.parity.catalogue.model import BY_HAND
from jaxddp.parity.catalogue.optimizer import FAULTS as OF_OPTIMIZER
from jaxddp.parity.compare.patterns import scaled
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.micro_batches import SUMMED
from tests.support.optimizer_ports import COMBINED, SINGLES, Planted
from tests.support.optimizer_runs import matrices_decay, one_group, run, worst
from tests.support.schedule_ports import SCHEDULES

CLEAN = 3e-14  # of the stage's norm, as of correct ports
CODED = {fault for fault, of in OF_OPTIMIZER.items() if of.fix_of is not None} - {"loss_scale"}  # fixed in the loss
LEFT = {"resume_lost_state", "unused_parameters"}  # not faults of the optimizer, which stay
KINDS = [
    case
    for case in SINGLES + SCHEDULES + COMBINED
    if case.values[0].causes[0] & CODED and not case.values[0].causes[0] & LEFT
]
MASK = "mask = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)"


def code_of(fix: str) -> str:
    """Return the optimizer in a fix: what follows the advice, up to what is said of the mask."""
    return fix.partition(": ")[2].partition(", where mask")[0]


def made(code: str, lr: Any) -> Any:
    """Run the code of a fix, with the names that it uses."""
    names: dict[str, Any] = {"jax": jax, "jaxddp": jaxddp, "optax": optax, "lr": lr, "schedule": lr}
    exec(MASK, names)
    return eval(code, names)


def worst_of(case: Planted, flax: Any) -> float:
    """Return the largest residual of this optimizer's updates from torch's, which is `case`'s."""
    return worst(run(case.torch_optimizer, flax, **case.options))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", KINDS)
def test_the_code_of_a_fix_makes_torchs_updates(case: Planted) -> None:
    evidence = case.evidence()
    optimizer = TorchOptimizer(evidence.kind, evidence.steps[0].groups)
    rates = [step.groups[0]["lr"] for step in evidence.steps]
    lr = rates[0] if len(set(rates)) == 1 else lambda count: jax.numpy.asarray(rates)[count]
    for fault in case.causes[0] & CODED:
        fix = FAULTS[fault].fix_for(Deviation(fault, Statement("")), optimizer)
        assert worst_of(case, made(code_of(fix), lr)) <= CLEAN, fix
        assert worst_of(case, case.jax_optimizer) > 1e-8


@pytest.mark.parametrize("groups", [one_group, matrices_decay])
@pytest.mark.parametrize(
    "kind",
    [
        partial(SGD, lr=0.1, momentum=0.9, dampening=0.3),
        partial(Adam, lr=1e-3, eps=1e-6),
        partial(AdamW, lr=1e-3, betas=(0.8, 0.98)),
        partial(RMSprop, lr=1e-2, eps=1e-6),
        partial(RMSprop, lr=1e-2, momentum=0.9, centered=True),
        partial(Adagrad, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    ],
)
def test_the_fix_of_a_decay_is_right_for_every_optimizer_and_mask(kind: Any, groups: Any) -> None:
    torch_optimizer = partial(kind, weight_decay=0.03)
    case = Planted((frozenset({"decay_value"}),), torch_optimizer, optax.sgd(0.1), options={"groups": groups})
    evidence = case.evidence()
    optimizer = TorchOptimizer(evidence.kind, evidence.steps[0].groups)
    fix = FAULTS["decay_value"].fix_for(Deviation("decay_value", Statement("")), optimizer)
    assert "0.03" in fix and fix.endswith(", where mask holds the tensors that torch decays") == (
        groups is not one_group
    )
    assert worst_of(case, made(code_of(fix), evidence.steps[0].groups[0]["lr"])) <= CLEAN


@pytest.mark.parametrize(
    ("kind", "groups", "code"),
    [
        (partial(Adam, weight_decay=0.03), 1, "optax.chain(optax.add_decayed_weights(0.03), optax.adam(lr))"),
        (partial(AdamW, amsgrad=True), 1, "jaxddp.optim.adamw(lr, amsgrad=True, weight_decay=0.01)"),
        (partial(AdamW, weight_decay=0.0), 1, "optax.adamw(lr, weight_decay=0.0)"),
        (
            partial(RMSprop, lr=0.01, momentum=0.9, weight_decay=0.1),
            1,
            "optax.chain(optax.add_decayed_weights(0.1), jaxddp.optim.rmsprop(lr, momentum=0.9))",
        ),
        (partial(SGD, lr=0.1, maximize=True), 1, ""),
        (NAdam, 1, "jaxddp.optim.nadam(lr, betas=(0.9, 0.999), eps=1e-8, momentum_decay=0.004)"),
        (LBFGS, 1, ""),
        (partial(AdamW, amsgrad=True), 2, ""),  # jaxddp's takes no mask
    ],
)
def test_torchs_optimizer_is_written_in_jax(kind: Any, groups: int, code: str) -> None:
    options = {"weight_decay": 0.0} if groups == 2 else {}
    of_torch = kind(
        [{"params": [Parameter(torch.zeros(2))]}, {"params": [Parameter(torch.zeros(2))], **options}][:groups]
    )
    assert TorchOptimizer(type(of_torch).__name__, of_torch.param_groups).in_jax() == code


def test_groups_that_differ_in_more_than_decay_have_no_code_and_the_general_fix() -> None:
    groups = [{"betas": (0.9, 0.999), "weight_decay": 0.0}, {"betas": (0.8, 0.999), "weight_decay": 0.0}]
    optimizer = TorchOptimizer("Adam", groups)
    assert optimizer.in_jax() == ""
    betas, fault = Deviation("betas", Statement("")), FAULTS["betas"]
    assert fault.fix_for(betas, optimizer) == fault.fix == fault.fix_for(betas)


def test_the_fix_of_a_mask_depends_on_what_the_reference_decays() -> None:
    of_all = TorchOptimizer("AdamW", [{"weight_decay": 0.01}])
    of_some = TorchOptimizer("SGD", [{"weight_decay": 0.01}, {"weight_decay": 0.0}])
    fixes = [FAULTS["decay_mask"].fix_for(Deviation("decay_mask", Statement("")), of) for of in (of_all, of_some)]
    assert fixes[0] == "decay all tensors, without a mask: optax.adamw(lr, weight_decay=0.01)"
    assert code_of(fixes[1]) == "optax.chain(optax.add_decayed_weights(0.01, mask), optax.sgd(lr))"
    of_matrices = FAULTS["decay_mask"].fix_for(Deviation("decay_mask", Statement(""), detail="cls, pos"), of_some)
    assert of_matrices.endswith("leave out cls, pos") and "ndim" not in of_matrices and "ndim" in fixes[1]
    assert MASK in fixes[1] and len(fixes[1]) < 470  # the console cuts longer lines


@pytest.mark.parametrize(
    ("deviation", "part"),
    [
        (Deviation("ignore_index", Statement(""), detail="0"), "labels != 0"),
        (Deviation("ignore_index", Statement(""), detail="-100"), "labels != -100"),
        (Deviation("norm_epsilon", Statement(""), detail=BY_HAND), "under the root"),
        (Deviation("norm_epsilon", Statement("")), "nnx.LayerNorm"),
        (scaled("reduced gradients", 0.9, {}), "leave the gradients as they are, without the factor 0.9"),
        (scaled("loss and gradients", 0.9, {}), "use the same loss on both sides"),
        (scaled("gradients", 32.0, {32: "the batch"}), "take the mean over the batch in the port, like the reference"),
        (scaled("gradients", 2.0, {2: "the batch"}), "use the same loss on both sides"),  # 2 has other causes too
        (SUMMED, "(losses * weights).sum() / weights.sum()"),
    ],
)
def test_a_fix_has_what_the_cause_says(deviation: Deviation, part: str) -> None:
    assert part in FAULTS[deviation.kind].fix_for(deviation, TorchOptimizer("SGD", [{}]))
