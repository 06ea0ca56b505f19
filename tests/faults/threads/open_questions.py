"""Threads without a known cause: re-enacted as they are described, or with a cause that is suspected."""

from .thread import WITH_JAX, WITH_JNP, Thread, in_jax, in_torch

TORCH_LOOP = """rows = [batch["x"], batch["x"].flip(-1)]
    return sum(F.mse_loss(model(x), x) for x in rows) / len(rows)
"""
JAX_VMAP = """rows = jnp.stack([batch["x"], batch["x"][:, ::-1]])
    return jax.vmap(lambda x: optax.squared_error(model(x), x).mean())(rows).mean()
"""
BF16 = "dtype=jnp.bfloat16, rngs=rngs)"

THREADS: dict[str, Thread] = {
    "linear_autoencoder": Thread(
        ("google/flax#4087",),
        "A linear autoencoder reaches a loss of 1.01 in JAX and 1.84 in flax, after 10 epochs.",
        "Closed; the cause is not visible.",
        "autoencoder",
        outcome="open",
        note="from equal weights all is equal: initial weights, which the check compares, the data's order or a part "
        "of the thread's programs that it does not describe are left",
        answer="initialisation",
        words=("encode.weight",),
    ),
    "vmap_over_loss": Thread(
        ("google/flax#3973",),
        "Training with `vmap` over the loss gives other results than a loop over the batches.",
        "Open.",
        "autoencoder",
        outcome="open",
        setting=(
            WITH_JAX,
            WITH_JNP,
            in_torch('return F.mse_loss(model(batch["x"]), batch["x"])\n', TORCH_LOOP),
            in_jax('return optax.squared_error(model(batch["x"]), batch["x"]).mean()\n', JAX_VMAP),
        ),
        note="a loop in torch and `vmap` in JAX: the mean over the batches does not depend on it",
    ),
    "haiku_on_cifar": Thread(
        ("google-deepmind/dm-haiku#120",),
        "A CNN on CIFAR-10 converges faster in JAX, and to a better accuracy, than in torch.",
        "Closed; the cause is not visible.",
        "convnet",
        outcome="open",
        setting=(
            in_torch("torch.optim.SGD(parameters, lr=LR, momentum=0.9)", "torch.optim.Adam(parameters, lr=1e-3)"),
            in_torch(
                'return F.cross_entropy(model(batch["image"]), batch["label"])',
                "penalty = 5e-4 * sum(p.square().sum() for p in model.parameters())\n"
                '    return F.cross_entropy(model(batch["image"]), batch["label"]) + penalty',
            ),
            in_jax("optax.sgd(LR, momentum=0.9)", "optax.adam(1e-3)"),
            in_jax(
                'return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()',
                "penalty = 5e-4 * sum(jnp.square(p).sum() for p in jax.tree.leaves(nnx.state(model, nnx.Param)))\n"
                '    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean() + penalty',
            ),
            WITH_JAX,
        ),
        note="Adam, the L2 term and the losses that the thread lists are no cause: with them all is equal",
    ),
    "conv1d_gradients": Thread(
        ("google/flax#4188",),
        "A depthwise Conv1d and its counterpart have equal outputs and other gradients.",
        "Open.",
        "depthwise",
        outcome="open",
        note="with `feature_group_count` and the padding (3, 0), gradients are equal too",
    ),
    "reparameterised_policy": Thread(
        ("jax-ml/jax#22101",),
        "A soft actor has the same loss in both frameworks, and other gradients.",
        "Open.",
        "policy",
        (in_jax("1 - action**2 + 1e-6", "1 - jax.lax.stop_gradient(action) ** 2 + 1e-6"),),
        causes=("gradient_stopped",),
        outcome="open",
        note="a tensor that is detached on one side is suspected, which leaves the loss as it is",
    ),
    "oscillator": Thread(
        ("jax-ml/jax#28110",),
        "A network that solves a differential equation converges in torch, and not in nnx.",
        "Open.",
        "oscillator",
        outcome="open",
        note="first and second derivatives by `torch.autograd.grad` and by `jax.jvp`, and gradients through them, are "
        "equal; initial weights, which the check compares, are left",
        answer="initialisation",
        words=("first.weight",),
    ),
    "detector": Thread(
        ("jax-ml/jax#23646",),
        "An SSD's results differ after some updates, though losses, gradients and updates use the same values.",
        "Open; the optimizer is suspected.",
        "detector",
        outcome="open",
        note="focal and smooth L1 loss and SGD with momentum are no cause: with them all is equal",
    ),
    "robot_policy_precision": Thread(
        (
            "Physical-Intelligence/openpi#989",
            "Physical-Intelligence/openpi#824",
            "Physical-Intelligence/openpi#738",
            "huggingface/lerobot#2598",
        ),
        "A robot policy that is trained in torch is worse: 71.9 in place of JAX's 82.6.",
        "Open; precision and a missing mean of the weights (EMA) are suspected.",
        "flow",
        (
            in_jax("self.first = nnx.Linear(9, 24, rngs=rngs)", f"self.first = nnx.Linear(9, 24, {BF16}"),
            in_jax("self.second = nnx.Linear(24, 24, rngs=rngs)", f"self.second = nnx.Linear(24, 24, {BF16}"),
        ),
        ("reduced_precision_matmul",),
        outcome="open",
        note="layers compute in bfloat16 on one side. A mean of the weights that only "
        "evaluation uses is no part of a step, and the check does not see it",
    ),
    "schedule_free": Thread(
        ("mlcommons/algorithmic-efficiency#809", "mlcommons/algorithmic-efficiency#925"),
        "Results of schedule-free AdamW in torch are not reproduced in JAX; later, JAX is better.",
        "Open; among several small differences, Optax decays at y.",
        "schedule_free",
        (in_torch("+ DECAY * y\n", '+ DECAY * state["z"]\n'),),
        outcome="open",
        note="torch decays at z; where it decays at y as well, all is equal",
    ),
}
