"""Threads about optimizers."""

from .thread import WITH_JAX, WITH_JNP, Edit, Thread, in_jax, in_torch

TORCH_ADAM, JAX_ADAM = "torch.optim.Adam(parameters, lr=LR)", "optax.adam(LR)"


def pair(torch: str, jax: str) -> tuple[Edit, Edit]:
    """Return the edits that give the classifiers other optimizers than Adam."""
    return in_torch(TORCH_ADAM, f"torch.optim.{torch}"), in_jax(JAX_ADAM, jax)


JNP = WITH_JAX, WITH_JNP


def clipped_as_in_torch(norm: str, optimizer: str) -> str:
    """Return an optimizer with a clipping in front of it that adds 1e-6 to the norm."""
    return f"""

def torchs_clipping(gradients, params):
    scale = jnp.minimum(1, {norm} / (optax.tree.norm(gradients) + 1e-6))
    return jax.tree.map(lambda g: g * scale, gradients)


jax_optimizer = optax.chain(optax.stateless(torchs_clipping), {optimizer})
"""


def adam_of(direction: str) -> str:
    """Return an Adam by hand; `direction` computes the update from m, v, t and LR."""
    return f"""

def init(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, zeros)


def update(gradients, state, params=None):
    t = state.count + 1
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mu, gradients)
    nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, state.nu, gradients)
    return jax.tree.map(lambda m, v: {direction}, mu, nu), optax.ScaleByAdamState(t, mu, nu)


jax_optimizer = optax.GradientTransformation(init, update)
"""


OPTIMIZER = "\n\njax_optimizer = optax.adam(LR)\n"
TENSORFLOWS = "-LR * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (jnp.sqrt(v) + 1e-5)"
UNCORRECTED = "-LR * m / (jnp.sqrt(v) + 1e-8)"

THREADS: dict[str, Thread] = {
    "l2_or_decoupled": Thread(
        ("google-deepmind/optax#417",),
        "A paper's result with torch's Adam and weight decay is not reproduced by `optax.adamw`.",
        "Torch's Adam adds the decay to the gradient (L2); AdamW decouples it.",
        "classifier",
        pair("Adam(parameters, lr=LR, weight_decay=0.01)", "optax.adamw(LR, weight_decay=0.01)"),
        ("coupled_decay",),
    ),
    "rmsprop_eps": Thread(
        ("google-deepmind/optax#532", "jax-ml/jax#1427", "pytorch/pytorch#23796", "chainer/chainer#4754"),
        "IMPALA with RMSprop learns differently in JAX and torch, though it does not with Adam.",
        "Eps, 0.01 here, is added inside the root in Optax and TensorFlow, and outside in torch.",
        "classifier",
        pair("RMSprop(parameters, lr=6e-4, alpha=0.99, eps=0.01)", "optax.rmsprop(6e-4, decay=0.99, eps=0.01)"),
        ("eps_in_root",),
    ),
    "clip_epsilon": Thread(
        ("goodfire-ai/spd#643", "goodfire-ai/spd#645"),
        "Gradients that are clipped at 0.01 differ by 1e-4 of their size in almost every step.",
        "Torch's clipping adds 1e-6 to the norm, Optax's does not.",
        "classifier",
        (in_jax("optax.stateless(torchs_clipping)", "optax.clip_by_global_norm(0.01)"),),
        ("clip_epsilon",),
        (
            in_torch("LR = 1e-3\n", "LR = 1e-3\ntorch_clip_grad_norm = 0.01\n"),
            in_torch(TORCH_ADAM, "torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01)"),
            in_jax(OPTIMIZER, clipped_as_in_torch("0.01", "optax.adamw(LR, weight_decay=0.01)")),
            *JNP,
        ),
    ),
    "adam_agrees": Thread(
        ("jax-ml/jax#4834",),
        "JAX's Adam seems to be inconsistent with torch's.",
        "A mistake in the comparison; the parameters agree to 1e-7 in float32.",
        "classifier",
        outcome="mistake",
    ),
    "eps_hat": Thread(
        (
            "HorizonRobotics/alf#466",
            "keras-team/keras#17391",
            "pytorch/pytorch#104857",
            "aiqm/torchani#261",
            "vwxyzjn/lm-human-preference-details#13",
        ),
        "No hyperparameters make Adam the same in torch and TensorFlow; policies drift apart.",
        "TensorFlow adds eps to the uncorrected root, so that torch's eps is scaled by 1 / sqrt(1 - beta2^t).",
        "classifier",
        (in_jax(OPTIMIZER.replace("LR", "LR, eps=1e-5"), adam_of(TENSORFLOWS)),),
        (),
        (*JNP, *pair("Adam(parameters, lr=LR, eps=1e-5)", "optax.adam(LR, eps=1e-5)")),
        steps=4,
    ),
    "eps_not_passed": Thread(
        ("vwxyzjn/lm-human-preference-details#23",),
        "Reward models in JAX and torch end with slightly different parameters.",
        "The JAX program did not pass eps to Optax's Adam.",
        "classifier",
        (in_torch(TORCH_ADAM, "torch.optim.Adam(parameters, lr=LR, eps=1e-5)"),),
        ("eps_value",),
    ),
    "no_bias_correction": Thread(
        ("ml-explore/mlx#1542", "ml-explore/mlx#1623"),
        "A model trains worse and less steadily than in torch and Keras.",
        "MLX's Adam did not correct the bias by default.",
        "classifier",
        (in_jax(OPTIMIZER, adam_of(UNCORRECTED)),),
        ("no_bias_correction",),
        JNP,
        note="MLX's Adam is written out in JAX",
    ),
    "momentum_of_jax": Thread(
        ("jax-ml/jax#1528",),
        "SGD with momentum has an unusual formula in JAX's example optimizers.",
        "The gradient enters the momentum times 1 - momentum, which amounts to another learning rate.",
        "classifier",
        pair("SGD(parameters, lr=0.1, momentum=0.9)", "optax.chain(optax.ema(0.9, debias=False), optax.scale(-0.1))"),
        ("lr_scaled|loss_scale|dampening",),
        note="the formula is assumed; the thread says that it differs by the learning rate's meaning",
    ),
    "rprop": Thread(
        ("google-deepmind/optax#1725",),
        "Read in the code: `optax.rprop` computes an update, and returns the one before.",
        "Every update comes a step late, and the first is 0.",
        "classifier",
        pair("Rprop(parameters, lr=0.01)", "optax.rprop(0.01)"),
        ("optax_rule",),
    ),
}
