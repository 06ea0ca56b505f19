"""Faults of the optimizer and its schedule."""

from jaxddp.parity.catalogue.fault import Fault, FixOf
from jaxddp.parity.catalogue.torch_optimizer import TorchOptimizer
from jaxddp.parity.deviation import Deviation

COUNTED = "the elements that count"  # what a loss with weights is a mean over
GRADIENTS = ("gradients", "local gradients", "reduced gradients")  # what a port may multiply after the loss
CHOSEN = "where mask holds the tensors that torch decays"
MASK = (
    f"{CHOSEN}: for matrices only, mask = lambda params: jax.tree.map(lambda p: p.ndim > 1, params); by name where "
    "shapes do not tell, as for attention's biases (heads, D): mask = lambda params: "
    "jax.tree_util.tree_map_with_path(lambda path, p: 'kernel' in jax.tree_util.keystr(path), params)"
)


def _as_torchs(advice: str, *shown: str, rate: str = "lr") -> FixOf:
    """Return a fix: advice, then code that makes the reference's optimizer and always writes these options."""

    def fix_of(deviation: Deviation, optimizer: TorchOptimizer) -> str:
        code = optimizer.in_jax(*shown, rate=rate)
        return code and f"{advice}: {code}{f', {CHOSEN}' if len(optimizer.decays) > 1 else ''}"

    return fix_of


def _decay(deviation: Deviation, optimizer: TorchOptimizer) -> str:
    advice = "set weight_decay on both sides" if any(optimizer.decays) else "leave the weight decay out"
    return _as_torchs(advice)(deviation, optimizer)


def _kind_of_decay(deviation: Deviation, optimizer: TorchOptimizer) -> str:
    decoupled, coupled = "decouple the weight decay", "put the weight decay first, as an L2 penalty"
    return _as_torchs(decoupled if optimizer.decouples else coupled)(deviation, optimizer)


def _masked_decay(deviation: Deviation, optimizer: TorchOptimizer) -> str:
    """Return the fix of a mask; the deviation's detail: the matrices that decay in the port only, if all do."""
    if len(optimizer.decays) == 1:
        return _as_torchs("decay all tensors, without a mask")(deviation, optimizer)
    code = optimizer.in_jax()
    mask = f"{CHOSEN}: among the matrices, leave out {deviation.detail}" if deviation.detail else MASK
    return code and f"decay the same tensors on both sides: {code}, {mask}"


def _scale(deviation: Deviation, _: TorchOptimizer) -> str:
    for value in deviation.values:
        if not value.is_factor:
            weighted, plain = "(losses * weights).sum() / weights.sum()", f"losses.{value.torch}()"
            code = weighted if value.key == COUNTED else plain
            return f"take the {value.torch} over {value.key} in the port, like the reference: {code}"
        if value.key in GRADIENTS:
            return f"leave the gradients as they are, without the factor {value.jax}"
    return ""


FAULTS: dict[str, Fault] = {
    "coupled_decay": Fault(
        "weight decay goes through the optimizer's statistics (L2) where the reference decouples it, or vice versa",
        "for torch's AdamW, use optax.adamw(lr, weight_decay=decay); for SGD, Adam, RMSprop and Adagrad, put the decay "
        "first: optax.chain(optax.add_decayed_weights(decay), optax.adam(lr))",
        "google-deepmind/optax#417",
        fix_of=_kind_of_decay,
    ),
    "decay_value": Fault(
        "weight decay differs; the defaults are 1e-2 in torch.optim.AdamW and 1e-4 in optax.adamw",
        "set weight_decay on both sides: optax.adamw(lr, weight_decay=decay) for torch's AdamW; for other optimizers, "
        "optax.add_decayed_weights(decay) first in the chain",
        fix_of=_decay,
    ),
    "decay_without_lr": Fault(
        "weight decay is not multiplied by the learning rate",
        "put the decay before the learning rate: optax.chain(optax.scale_by_adam(), "
        "optax.add_decayed_weights(decay), optax.scale_by_learning_rate(lr))",
        "google-deepmind/optax#292",
        fix_of=_as_torchs("put the decay before the learning rate"),
    ),
    "decay_mask": Fault(
        "weight decay applies to different tensors: biases and norms decay on one side only",
        f"decay the same tensors on both sides: optax.adamw(lr, weight_decay=decay, mask=mask), {MASK}; "
        "optax.add_decayed_weights takes the same mask",
        fix_of=_masked_decay,
    ),
    "decay_rounded_away": Fault(
        "float32 rounds 1 - lr * weight_decay, so the decay is lost or coarse",
        "nothing to fix in the port: the two sides mean the same and round differently",
        "pytorch/pytorch#64475",
    ),
    "eps_in_root": Fault(
        "eps is added inside the square root instead of outside, or vice versa",
        "use optax.adam(lr, eps=eps, eps_root=0.0), optax.rmsprop(lr, decay=0.99, eps=eps, eps_in_sqrt=False) "
        "or jaxddp.optim.adagrad(lr, eps=eps)",
        fix_of=_as_torchs("add eps outside of the root", "eps", "eps_root"),
    ),
    "eps_value": Fault(
        "eps differs",
        "set eps on both sides: eps=eps in the optimizer's function",
        fix_of=_as_torchs("set eps on both sides", "eps"),
    ),
    "loss_scale": Fault(
        "the loss, or the gradient that the optimizer sees, is multiplied by a number",
        "use the same loss on both sides (a mean or a sum; for torch's mse_loss, "
        "optax.squared_error(prediction, target).mean(), since optax.l2_loss has a factor 1/2), and undo any "
        "loss scale before the optimizer: optax.scale(1 / scale)",
        fix_of=_scale,
    ),
    "no_bias_correction": Fault(
        "Adam without bias correction",
        "use optax.scale_by_adam(), which corrects the bias, or divide the means by 1 - beta**t",
    ),
    "nesterov": Fault(
        "Nesterov momentum on one side only",
        "use the same nesterov on both sides: optax.sgd(lr, momentum=0.9, nesterov=True) where torch has it, "
        "nesterov=False where not",
        fix_of=_as_torchs("use the same nesterov on both sides", "nesterov"),
    ),
    "lr_in_momentum": Fault(
        "momentum accumulates after the learning rate is applied, as in TensorFlow, and so remembers old rates",
        "put the momentum before the rate: optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(schedule))",
        fix_of=_as_torchs("put the momentum before the rate", rate="schedule"),
    ),
    "amsgrad": Fault(
        "AMSGrad on one side only, or optax.amsgrad, which corrects the bias before it takes the maximum",
        "use jaxddp.optim.adam(lr, amsgrad=True) where torch has amsgrad, optax.adam where not",
        fix_of=_as_torchs("use the same amsgrad on both sides"),
    ),
    "dampening": Fault(
        "the dampening of the momentum differs; optax.trace has none",
        "use jaxddp.optim.sgd(lr, momentum=0.9, dampening=0.3) with torch's values",
        fix_of=_as_torchs("use torch's momentum and dampening", "momentum", "dampening"),
    ),
    "rmsprop_decay": Fault(
        "the decay rate of RMSprop differs; the defaults are alpha 0.99 in torch and decay 0.9 in optax",
        "use optax.rmsprop(lr, decay=0.99, eps_in_sqrt=False) for torch's default alpha",
        "google-deepmind/optax#532",
        fix_of=_as_torchs("use torch's alpha", "alpha"),
    ),
    "rmsprop_centred": Fault(
        "RMSprop is centred on one side only, or its mean square starts from a different value",
        "use torch's centered, and a start from 0: optax.rmsprop(lr, decay=0.99, eps_in_sqrt=False, "
        "centered=True, initial_scale=0.0) or centered=False",
        "google-deepmind/optax#49",
        fix_of=_as_torchs("use torch's centered, and a start from 0", "centered", "initial_scale"),
    ),
    "adagrad_accumulator": Fault(
        "Adagrad's accumulator starts from a different value; the defaults are 0 in torch and 0.1 in optax",
        "use optax.adagrad(lr, initial_accumulator_value=0.0) for torch's default",
        fix_of=_as_torchs("start from torch's value", "initial_accumulator_value"),
    ),
    "lr_scaled": Fault(
        "the learning rate is multiplied by the number of replicas or its square root",
        "use the learning rate of the reference, or multiply it on both sides",
    ),
    "lr_off_by_one": Fault(
        "the schedule is one step ahead or behind",
        "use the rate schedule(t) for update t, counted from 0; torch's scheduler.step() belongs after "
        "optimizer.step(). A reference that itself begins a step late has schedule(jnp.maximum(t - 1, 0))",
        "pytorch/torchtitan#1261",
    ),
    "warmup_start": Fault(
        "the warm-up of the learning rate starts at another value, or ends a step earlier or later",
        "use optax.warmup_cosine_decay_schedule(init_value=first_rate, peak_value=highest_rate, warmup_steps=steps, "
        "decay_steps=last_step) with torch's first rate; without a decay, "
        "optax.linear_schedule(first_rate, highest_rate, steps)",
    ),
    "scheduler_too_fast": Fault(
        "the schedule advances several times per optimizer step",
        "use the rate schedule(t) for update t, with t advanced once per optimizer step, whatever the number "
        "of replicas and micro-batches",
        "huggingface/accelerate#1382",
    ),
    "resume_lost_state": Fault(
        "a resumed run starts with a fresh step count or fresh moments",
        "save the whole optimizer state, saved = jax.tree.leaves(opt_state), and restore it: opt_state = "
        "jax.tree.unflatten(jax.tree.structure(optimizer.init(params)), saved)",
    ),
    "betas": Fault(
        "the betas or the momentum differ",
        "give torch's values, in the form of optax.adam(lr, b1=0.9, b2=0.98) or optax.sgd(lr, momentum=0.9)",
        fix_of=_as_torchs("use torch's values", "b1", "b2", "betas", "momentum"),
    ),
    "state_reset": Fault(
        "the optimizer's state is lost again and again, as at the end of each epoch",
        "make the optimizer's state once, opt_state = optimizer.init(params), before the loop over epochs",
    ),
    "updates_skipped": Fault(
        "the port makes no update at some steps at which the reference makes one",
        "make an update at each step, as the reference does: no optax.MultiSteps, optax.apply_if_finite or condition "
        "that it does not have",
    ),
    "gradients_applied": Fault(
        "the parameters move by the gradients, and not by what the optimizer makes of them",
        "apply what the optimizer returns: updates, opt_state = optimizer.update(gradients, opt_state, params), then "
        "params = optax.apply_updates(params, updates)",
    ),
    "rate_of_some": Fault(
        "some tensors have another learning rate, or are frozen",
        "give all tensors the reference's rate: one transformation for all, or the same rate for each label of "
        "optax.partition",
    ),
    "optax_rule": Fault(
        "Optax's optimizer follows another rule than torch's of the same name",
        "use jaxddp's optimizer of that name, which follows torch's rule",
        fix_of=_as_torchs("use torch's rule"),
    ),
    "optimizer_option": Fault(
        "an option of the optimizer differs",
        "give the optimizer the reference's value",
        fix_of=_as_torchs("give the optimizer the reference's options"),
    ),
}
