"""Faults of the optimizer and its schedule."""

from jaxddp.parity.catalogue.fault import Fault

FAULTS: dict[str, Fault] = {
    "coupled_decay": Fault(
        "weight decay goes through the optimizer's statistics (L2) where the reference decouples it, or vice versa",
        "use optax.adamw for AdamW, and optax.add_decayed_weights before the rest of the chain for all others",
        "google-deepmind/optax#417",
    ),
    "decay_value": Fault(
        "weight decay differs; the defaults are 1e-2 in torch.optim.AdamW and 1e-4 in optax.adamw",
        "set it explicitly on both sides",
    ),
    "decay_without_lr": Fault(
        "weight decay is not multiplied by the learning rate",
        "put add_decayed_weights before scale_by_learning_rate",
        "google-deepmind/optax#292",
    ),
    "decay_mask": Fault(
        "weight decay applies to different tensors: biases and norms decay on one side only",
        "use the same groups on both sides: add_decayed_weights(..., mask=...)",
    ),
    "decay_rounded_away": Fault(
        "float32 rounds 1 - lr * weight_decay, so the decay is lost or coarse",
        "nothing to fix in the port: the two sides mean the same and round differently",
        "pytorch/pytorch#64475",
    ),
    "eps_in_root": Fault(
        "eps is added inside the square root instead of outside, or vice versa",
        "use optax.adam(eps=..., eps_root=0), optax.rmsprop(eps_in_sqrt=False) or jaxddp.optim.adagrad(eps=...)",
    ),
    "eps_value": Fault("eps differs", "set eps explicitly on both sides"),
    "loss_scale": Fault(
        "the loss, or the gradient that the optimizer sees, is multiplied by a number",
        "use the same loss on both sides (a mean or a sum; optax.l2_loss has a factor 1/2), and undo any loss scale",
    ),
    "no_bias_correction": Fault(
        "Adam without bias correction", "optax.scale_by_adam corrects the bias; do not undo it"
    ),
    "nesterov": Fault("Nesterov momentum on one side only", "use the same nesterov= on both sides"),
    "lr_in_momentum": Fault(
        "momentum accumulates after the learning rate is applied, as in TensorFlow, and so remembers old rates",
        "put optax.trace before optax.scale_by_learning_rate",
    ),
    "amsgrad": Fault(
        "AMSGrad on one side only, or optax.amsgrad, which corrects the bias before it takes the maximum",
        "use jaxddp.optim.adam(amsgrad=True)",
    ),
    "dampening": Fault(
        "the dampening of the momentum differs; optax.trace has none",
        "use jaxddp.optim.sgd(dampening=...)",
    ),
    "rmsprop_decay": Fault(
        "the decay rate of RMSprop differs; the defaults are alpha 0.99 in torch and decay 0.9 in optax",
        "use optax.rmsprop(decay=0.99, eps_in_sqrt=False)",
        "google-deepmind/optax#532",
    ),
    "rmsprop_centred": Fault(
        "RMSprop is centred on one side only, or its mean square starts from a different value",
        "set centered= and initial_scale=0. as in torch",
        "google-deepmind/optax#49",
    ),
    "adagrad_accumulator": Fault(
        "Adagrad's accumulator starts from a different value; the defaults are 0 in torch and 0.1 in optax",
        "use optax.adagrad(..., initial_accumulator_value=0.)",
    ),
    "lr_scaled": Fault(
        "the learning rate is multiplied by the number of replicas or its square root",
        "use the learning rate of the reference, or scale it on both sides",
    ),
    "lr_off_by_one": Fault(
        "the schedule is one step ahead or behind",
        "use schedule(t) for update t, counted from 0",
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
        "advance it once per optimizer step, whatever the number of replicas",
        "huggingface/accelerate#1382",
    ),
    "resume_lost_state": Fault(
        "a resumed run starts with a fresh step count or fresh moments",
        "save and restore the whole optimizer state",
    ),
    "betas": Fault("the betas or the momentum differ", "set them explicitly on both sides"),
}
