"""Threads about terms and reductions of the loss."""

from .thread import WITH_JAX, WITH_JNP, Thread, in_jax, in_torch

LOSS = 'return optax.squared_error(model(batch["x"]), batch["x"]).mean()\n'
PENALTY = """squares = sum(jnp.square(p).sum() for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return optax.squared_error(model(batch["x"]), batch["x"]).mean() + 1e-3 * squares
"""
UPDATE = """    for name in ("one", "two"):
        updates, opt_state[name] = optimizers[name].update(gradients[name],"""

THREADS: dict[str, Thread] = {
    "penalty_missing": Thread(
        ("Rayhane-mamah/Efficient-VDVAE#5",),
        "A VAE's likelihood is worse in torch than in JAX.",
        "The torch program lacks the L2 term of the loss.",
        "autoencoder",
        (in_jax(LOSS, PENALTY),),
        ("auxiliary_loss_scaled",),
        (WITH_JAX, WITH_JNP),
        words=("(0.001 * (((sum(square(decode.bias)", "sum(square(encode.weight)))"),
    ),
    "sum_of_pixels": Thread(
        ("xavysp/DexiNed#77", "xavysp/DexiNed#59"),
        "The torch version of an edge detector does not train like TensorFlow's.",
        "The two losses are defined differently; a new definition in torch trains.",
        "segmenter",
        (in_torch('reduction="mean"', 'reduction="sum"'),),
        ("loss_scale",),
        note="the thread does not say what differs; a sum over the pixels in place of the mean is assumed",
    ),
    "adam_of_tensorflow": Thread(
        ("xavysp/DexiNed#77",),
        "Differences that are left, after the loss was mended.",
        "Adam's beta1 is 0.5 in TensorFlow's program and 0.9 in torch's, and eps has other defaults.",
        "segmenter",
        (in_jax("optax.adam(LR)", "optax.adam(LR, b1=0.5, eps=1e-7)"),),
        ("betas", "eps_value"),
        steps=8,
    ),
    "one_gradient_for_two_critics": Thread(
        ("Toni-SM/skrl#425",),
        "Read in the code: soft actor-critic in JAX computes one gradient.",
        "The gradient of one critic updates both.",
        "critics",
        (in_jax(UPDATE, UPDATE.replace("gradients[name]", 'gradients["one"]')),),
    ),
}
