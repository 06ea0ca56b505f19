"""Ports whose optimizer has a mistake: names of the mistake, the reference's optimizer, and the port's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import optax
import pytest
from jax import numpy as jnp
from torch.optim import ASGD, SGD, Adagrad, Adam, AdamW, NAdam, RMSprop

from jaxddp import optim
from jaxddp.parity.catalogue import EDITS, FAULTS
from jaxddp.parity.compare.clipping import Clipping
from jaxddp.parity.diagnosis.optimizer.update_causes import OptimizerEvidence
from tests.faults.planted_optimizer import reset_every
from tests.faults.recipes import is_matrix as matrices
from tests.support.faulty_optax import (
    Transformation,
    a_step_late,
    all_but,
    asgd,
    decay_towards_start,
    l2,
    nadam,
    stale,
    then,
    uncorrected_adam,
    without_every_third,
)
from tests.support.faulty_schedules import COSINE, WARM, cosine, rising, shifted
from tests.support.optimizer_runs import SHAPES, matrices_alone, matrices_decay, run, still_biases

AT_NORM, BY_VALUE = Clipping(1.9), Clipping(largest=0.1)


def clipped(max_norm: float, epsilon: float = 1e-6, times: float = 1.0) -> Transformation:
    """Clip by the global norm times a factor, then take SGD with momentum."""

    def clip(gradients: Any, params: Any) -> Any:
        share = jnp.minimum(1, max_norm / (times * optax.tree.norm(gradients) + epsilon))
        return jax.tree.map(lambda g: g * share, gradients)

    return optax.chain(optax.stateless(clip), optax.sgd(0.1, 0.9))


def without_count(transformation: Transformation, state: Any, params: Any) -> Any:
    return jax.tree.map(lambda leaf: 0 * leaf if leaf.dtype == jnp.int32 else leaf, state)


def without_moments(transformation: Transformation, state: Any, params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.int32 else 0 * leaf, state)


@dataclass(frozen=True)
class Planted:
    """A port with mistakes.

    Attributes:
        causes: sets of faults that explain the port, which the run cannot tell apart.
        torch_optimizer: the reference's.
        jax_optimizer: the port's.
        says: text that the first cause must contain.
        options: of `run`.
    """

    causes: tuple[frozenset[str], ...]
    torch_optimizer: Callable[..., Any]
    jax_optimizer: Transformation
    says: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def evidence(self, seed: int = 0) -> OptimizerEvidence:
        return run(self.torch_optimizer, self.jax_optimizer, seed=seed, **self.options)


def planted(
    causes: str, torch_optimizer: Callable[..., Any], jax_optimizer: Transformation, says: str = "", **options: Any
) -> Any:
    """Return a test case.

    Args:
        causes: "a"; "a+b" for a pair; "a | b" for two causes that the run cannot tell apart.
    """
    sets = tuple(frozenset(cause.strip().split("+")) for cause in causes.split("|"))
    assert frozenset().union(*sets) <= (FAULTS | EDITS).keys()
    return pytest.param(Planted(sets, torch_optimizer, jax_optimizer, says, options), id=causes.replace(" ", ""))


sgd, momentum = partial(SGD, lr=0.1), partial(SGD, lr=0.1, momentum=0.9)
decayed = partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)
adam, adamw = partial(Adam, lr=1e-3), partial(AdamW, lr=1e-3)
coupled = partial(Adam, lr=1e-3, weight_decay=1e-2)
rmsprop, adagrad = partial(RMSprop, lr=1e-2), partial(Adagrad, lr=1e-2)
torchs_rmsprop = partial(optax.rmsprop, 1e-2, decay=0.99, eps_in_sqrt=False)
same_adamw = partial(optax.adamw, weight_decay=1e-2)
UNUSED = {2: ["head.bias"], 3: ["head.bias", "fc1.weight"], 5: ["fc1.weight"]}

# Units that never fire: where the gradient is 0, the smallest decay decides all of Adam's update.
SILENT = ("fc1.bias",)
BLOCKS = SHAPES | {"h.0.weight": (4, 3), "h.0.bias": (4,), "h.1.weight": (4, 3), "h.1.bias": (4,)}

SINGLES = [
    planted("decay_value", adamw, optax.adamw(1e-3), "weight decay 0.0001, the reference has 0.01"),
    planted("decay_value", adamw, optax.adam(1e-3), "weight decay 0, the reference has 0.01"),
    planted("decay_value", coupled, optax.adam(1e-3), "weight decay 0, the reference has 0.01", silent=SILENT),
    planted("decay_value", decayed, l2(5e-4, optax.sgd(0.1, 0.9)), "weight decay 0.0005, the reference has 0.001"),
    planted("decay_value", momentum, l2(5e-4, optax.sgd(0.1, 0.9)), "weight decay 0.0005, as an L2 penalty, on all"),
    planted("decay_value", adam, optax.adamw(1e-3, mask=matrices), "decoupled, on tensors with two or more dimensions"),
    planted("coupled_decay", coupled, same_adamw(1e-3), "weight decay is decoupled"),
    planted("coupled_decay", adamw, l2(1e-2, optax.adam(1e-3)), "weight decay is an L2 penalty"),
    planted("coupled_decay", decayed, optax.chain(optax.trace(0.9), l2(1e-3, optax.scale(-0.1)))),
    planted("decay_without_lr", adamw, optax.chain(optax.adam(1e-3), optax.add_decayed_weights(-1e-2))),
    planted("decay_without_lr", decayed, optax.chain(optax.sgd(0.1, 0.9), optax.add_decayed_weights(1e-3)), "is added"),
    planted("decay_mask", adamw, same_adamw(1e-3), "on all tensors", groups=matrices_decay),
    planted("decay_mask", adamw, same_adamw(1e-3, mask=matrices), "on tensors with two or more dimensions"),
    planted(
        "decay_mask", adamw, same_adamw(1e-3, mask=all_but("fc2.weight")), "decay does not act on fc2.weight, unlike"
    ),
    *(
        planted("decay_mask", adamw, same_adamw(1e-3, mask=all_but(*left_out)), f"act on {says}, unlike", shapes=BLOCKS)
        for left_out, says in ((("h.0.weight", "h.1.weight"), "h.*.weight"), (("h.0.weight",), "h.0.weight"))
    ),
    planted("decay_mask", decayed, l2(1e-3, optax.sgd(0.1, 0.9), all_but("head.bias", "fc1.bias", "fc2.bias"))),
    planted(
        "decay_mask",
        adamw,
        same_adamw(1e-3, mask=all_but("norm.weight", "norm.bias")),
        "on all but norms, unlike in the reference: it does not act on norm.bias, norm.weight",
    ),
    planted(
        "decay_mask",
        adamw,
        same_adamw(1e-3, mask=all_but("fc1.bias", "fc2.bias", "head.bias")),
        "also acts on norm.bias, norm.weight",
        groups=matrices_decay,
    ),
    planted(
        "rate_of_some",
        adam,
        then(optax.adam(1e-3), lambda u: {"fc2.weight": 0 * u["fc2.weight"]}),
        "not updated in the port: fc2",
    ),
    planted(
        "rate_of_some",
        adam,
        then(optax.adam(1e-3), lambda u: {name: (4.0 if "bias" in name else 0.5) * x for name, x in u.items()}),
        "times 0.5, of fc1.bias",
    ),
    planted(  # rates of two groups, 3e-4 and 1e-3, that are swapped
        "rate_of_some",
        adam,
        then(optax.adam(1e-3), lambda u: {name: (10 / 3 if "bias" in name else 0.3) * x for name, x in u.items()}),
        "times 3.33333",
    ),
    planted("rate_of_some", adam, then(optax.adam(1e-3), lambda u: {"fc2.weight": 1.1 * u["fc2.weight"]}), "times 1.1"),
    planted("rate_of_some", adam, optax.adam(1e-3), "updated in the port alone: fc1.bias", groups=matrices_alone),
    planted("rate_of_some", adam, optax.adam(1e-3), "head.weight times 0.5, of fc1.bias", groups=still_biases),
    planted(
        "rate_of_some",
        adamw,
        then(same_adamw(1e-3), lambda u: {name: 0.3 * value for name, value in u.items() if "head" in name}),
        "learning rate of head.bias, head.weight times 0.3",
    ),
    planted("state_reset", adam, reset_every(3, optax.adam(1e-3)), "the optimizer's state is lost every 3 steps"),
    planted("state_reset", momentum, reset_every(3, optax.sgd(0.1, 0.9)), "is lost every 3 steps"),
    planted("optimizer_option", momentum, optax.chain(optax.sgd(0.1, 0.9), optax.scale(-1.0)), "maximize in the port"),
    planted("eps_value", adam, optax.adam(1e-3, eps=1e-7), "eps 1e-7, the reference has 1e-8"),
    planted("eps_value", adam, optax.adam(1e-3, eps=0.0), "eps 0, the reference has 1e-8"),
    planted("eps_value", adam, optax.adam(1e-3, eps=1e-6), "eps 1e-6, the reference has 1e-8"),
    planted("loss_scale", adam, optax.chain(optax.scale(65536.0), optax.adam(1e-3)), "gradients times 65536"),
    planted("eps_value", rmsprop, torchs_rmsprop(eps=1e-6), "eps 1e-6, the reference has 1e-8"),
    planted("loss_scale", decayed, optax.chain(optax.scale(128.0), l2(1e-3, optax.sgd(0.1, 0.9))), "times 128"),
    planted("eps_in_root", adam, optax.adam(1e-3, eps=0.0, eps_root=1e-8), "eps is added inside the root"),
    planted("eps_in_root", adam, optax.adam(1e-3, eps_root=1e-8), "too, and not only outside"),
    planted("eps_in_root", rmsprop, optax.rmsprop(1e-2, decay=0.99), "eps is added inside the root"),
    planted("no_bias_correction", adam, uncorrected_adam(1e-3)),
    planted(
        "updates_skipped", adam, without_every_third(optax.adam(1e-3), False), "at steps 3, 6, nor does the optimizer's"
    ),
    planted(
        "updates_skipped", adam, without_every_third(optax.adam(1e-3), True), "at steps 3, 6, while the optimizer's"
    ),
    planted("gradients_applied", adam, optax.identity(), "by their gradients times 1, in Adam by its updates"),
    planted("gradients_applied", adamw, optax.sgd(0.02), "by their gradients times -0.02, in AdamW"),
    planted("amsgrad", adam, optim.adam(1e-3, amsgrad=True), "in the port only"),
    planted("amsgrad", adam, optax.amsgrad(1e-3), "corrected squares"),
    planted("amsgrad", partial(coupled, amsgrad=True), optim.adam(1e-3, weight_decay=1e-2), "in the reference only"),
    planted(
        "lr_in_momentum",
        momentum,
        optax.chain(optax.scale_by_learning_rate(cosine(0.1)), optax.trace(0.9)),
        scheduler=COSINE,
    ),
    planted("eps_value+betas", adam, optax.adam(1e-3, b2=0.98, eps=1e-6), "beta2 0.98"),
    planted(
        "clip_norm",
        momentum,
        clipped(0.02),
        "clipped at norm 0.02, the reference clips at norm 0.01",
        clipping=Clipping(0.01),
    ),
    planted(
        "clip_norm",
        momentum,
        clipped(2.0),
        "clipped at norm 2, the reference clips at norm 1.9",
        clipping=AT_NORM,
    ),
    planted("clip_norm", momentum, clipped(0.5, 0.0), "clipped at norm 0.5, the reference does not clip"),
    planted("clip_missing", momentum, optax.sgd(0.1, 0.9), clipping=AT_NORM),
    planted("clip_missing", momentum, optax.sgd(0.1, 0.9), "reference clips by value, at 0.1", clipping=BY_VALUE),
    planted("clip_norm", momentum, clipped(0.5), "reference clips by value, at 0.1", clipping=BY_VALUE),
    planted("clip_by_value", momentum, optax.chain(optax.clip(0.3), optax.sgd(0.1, 0.9)), "at 0.3", clipping=BY_VALUE),
    planted("clip_epsilon", momentum, clipped(1.9, 0.0), clipping=AT_NORM),
    planted(
        "clip_norm_local",
        momentum,
        clipped(1.9, times=2.0),
        "a norm times 2, the root of the number of",
        clipping=AT_NORM,
    ),
    planted("clip_by_value", momentum, optax.chain(optax.clip(0.1), optax.sgd(0.1, 0.9)), "at 0.1, the reference does"),
    planted(
        "clip_by_value",
        adam,
        optax.chain(optax.clip(0.1), optax.adam(1e-3)),
        "reference clips at norm",
        clipping=AT_NORM,
    ),
    planted("nesterov", decayed, l2(1e-3, optax.sgd(0.1, 0.9, nesterov=True)), "in the port only"),
    planted("nesterov", partial(momentum, nesterov=True), optax.sgd(0.1, 0.9), "in the reference only"),
    planted("nesterov", adam, optax.nadam(1e-3), "in the port only"),
    planted("dampening", partial(momentum, dampening=0.3), optax.sgd(0.1, 0.9), "dampening 0, the reference has 0.3"),
    planted(
        "dampening", decayed, optim.sgd(0.1, 0.9, dampening=0.5, weight_decay=1e-3), "dampening 0.5, the reference"
    ),
    # A mean of gradients is a tenth of their sum.
    planted("dampening | lr_scaled", momentum, optax.chain(optax.ema(0.9, debias=False), optax.scale(-0.1))),
    planted("rmsprop_decay", rmsprop, optax.rmsprop(1e-2, eps_in_sqrt=False), "0.9, the reference has 0.99"),
    planted("rmsprop_centred", rmsprop, torchs_rmsprop(centered=True), "in the port only"),
    planted("rmsprop_centred", partial(rmsprop, centered=True), torchs_rmsprop(), "in the reference only"),
    planted("rmsprop_centred", rmsprop, torchs_rmsprop(initial_scale=1.0), "start from 1, in the reference from 0"),
    planted(
        "adagrad_accumulator",
        adagrad,
        optim.adagrad(1e-2, initial_accumulator_value=0.1),
        "start 0.1, the reference has 0",
    ),
    planted("lr_scaled", adam, optax.adam(4e-3), "learning rate times 4, the number of replicas"),
    planted("lr_scaled", adamw, same_adamw(2e-3), "learning rate times 2, the root of the number of replicas"),
    planted("lr_scaled", adamw, same_adamw(1e-3 / 3), "learning rate divided by 3, the number of micro-batches"),
    planted("lr_scaled", adamw, same_adamw(1.37e-3), "learning rate times 1.37"),
    planted("lr_scaled", decayed, l2(1e-3, optax.sgd(0.4, 0.9)), "learning rate times 4, the number of replicas"),
    planted("lr_scaled", momentum, optax.sgd(0.4, 0.9), "learning rate times 4, the number of replicas"),
    planted("lr_scaled", momentum, optax.sgd(0.137, 0.9), "learning rate times 1.37"),
    planted("rate_rounded", partial(NAdam, lr=1e-3), nadam(1e-3), "torch keeps mu_product of its state in float32"),
    planted(
        "rate_rounded",
        partial(ASGD, lr=0.1, lambd=0.01),
        asgd(0.1, 0.01),
        "keeps eta and mu of its state in float32",
    ),
    planted("resume_lost_state", adam, optax.adam(1e-3), "means of gradients, means of squares, count", restored_at=3),
    planted("resume_lost_state", adam, optax.adam(1e-3), "loses count", restored_at=3, restore=without_count),
    planted("resume_lost_state", adam, optax.adam(1e-3), "squares", restored_at=3, restore=without_moments),
    planted("resume_lost_state", momentum, optax.sgd(0.1, 0.9), "after step 2 loses momentum", restored_at=2),
    planted("resume_lost_state", sgd, optax.sgd(cosine(0.1)), "position in the", restored_at=3, scheduler=COSINE),
    planted("betas", adam, optax.adam(1e-3, b1=0.95, b2=0.98), "beta1 0.95, the reference has 0.9 and beta2 0.98"),
    planted("betas", adam, optax.adam(1e-3, b2=0.98), "beta2 0.98, the reference has 0.999"),
    planted("betas", momentum, optax.sgd(0.1, 0.8), "momentum 0.8, the reference has 0.9"),
    planted("betas", decayed, l2(1e-3, optax.sgd(0.1)), "momentum 0, the reference has 0.9"),
    planted("unused_parameters", adamw, same_adamw(1e-3), unused=UNUSED),
    planted("unused_parameters", momentum, optax.sgd(0.1, 0.9), unused=UNUSED),
    planted(
        "aliased_buffers",
        adam,
        then(optax.adam(1e-3), lambda u: {"fc2.bias": u["fc1.bias"]}),
        "the update of fc2.bias is that of fc1.bias",
    ),
    planted("aliased_buffers", momentum, stale(optax.sgd(0.1, 0.9), "head.weight"), "that of the step before"),
]

COMBINED = [
    planted("decay_mask+betas", adamw, same_adamw(1e-3, b2=0.98, mask=all_but("norm.weight", "norm.bias"))),
    planted("decay_value+warmup_start", adamw, optax.adamw(rising(1e-3, 0.0, 4)), "starts at 0, the", scheduler=WARM),
    planted("rmsprop_decay+eps_in_root", rmsprop, optax.rmsprop(1e-2)),
    planted("adagrad_accumulator+eps_in_root", adagrad, optax.adagrad(1e-2, eps=1e-10)),
    planted("adagrad_accumulator+eps_in_root+eps_value", adagrad, optax.adagrad(1e-2), "eps 1e-7, the reference has"),
    planted("decay_value+nesterov", adamw, optax.nadamw(1e-3)),
    planted("decay_value+decay_mask", adamw, optax.adamw(1e-3), "weight decay 0.0001", groups=matrices_decay),
    planted("decay_value+lr_off_by_one", adamw, optax.adamw(shifted(cosine(1e-3), 1)), scheduler=COSINE),
    planted("decay_value+lr_scaled", adamw, optax.adamw(4e-3), "learning rate times 4, the number of replicas"),
    planted("decay_value+resume_lost_state", adamw, optax.adamw(1e-3), restored_at=3),
    planted("decay_value+unused_parameters", adamw, optax.adamw(1e-3), unused=UNUSED),
    planted("coupled_decay+betas", coupled, same_adamw(1e-3, b2=0.98), "beta2 0.98, the reference has 0.999"),
    planted("coupled_decay+eps_value", coupled, same_adamw(1e-3, eps=1e-7), "eps 1e-7"),
    # At a constant learning rate, decay without the rate is another decay.
    planted("coupled_decay+decay_value | decay_without_lr+decay_value", coupled, optax.adamw(1e-3)),
    planted("eps_in_root+betas", adam, optax.adam(1e-3, b2=0.98, eps=0.0, eps_root=1e-8)),
    planted(
        "eps_in_root+scheduler_too_fast",
        adam,
        optax.adam(lambda c: cosine(1e-3)(4 * c), eps=0.0, eps_root=1e-8),
        scheduler=COSINE,
    ),
    planted("betas+decay_value", decayed, l2(5e-4, optax.sgd(0.1, 0.8)), "weight decay 0.0005"),
    planted("betas+nesterov", sgd, optax.sgd(0.1, 0.8, nesterov=True), "momentum 0.8, the reference has 0"),
    planted("nesterov+decay_mask", decayed, l2(1e-3, optax.sgd(0.1, 0.9, nesterov=True), matrices)),
    planted("nesterov+lr_scaled", momentum, optax.sgd(0.4, 0.9, nesterov=True)),
    planted(
        "dampening+lr_off_by_one",
        partial(momentum, dampening=0.3),
        optax.sgd(shifted(cosine(0.1), 1), 0.9),
        scheduler=COSINE,
    ),
    planted("rmsprop_centred+rmsprop_decay", rmsprop, optax.rmsprop(1e-2, initial_scale=1.0, eps_in_sqrt=False)),
]

NOT_IN_THE_CATALOGUE = {
    "lion": (adam, optax.lion(1e-3)),
    "adam for rmsprop": (rmsprop, optax.adam(1e-2)),
    "decay towards the start": (
        adamw,
        optax.chain(optax.scale_by_adam(), decay_towards_start(1e-2), optax.scale(-1e-3)),
    ),
    "clipped update": (adam, optax.chain(optax.adam(1e-3), optax.clip(5e-4))),
    "sign of Adam's update": (adam, optax.chain(optax.adam(1e-3), optax.scale(-1.0))),
    "rows in reverse": (adam, then(optax.adam(1e-3), lambda u: {"fc2.weight": u["fc2.weight"][::-1]})),
    "gradients a step late": (sgd, a_step_late(0.1)),
}
