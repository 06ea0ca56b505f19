"""Threads about silent differences in evaluation, in weights that are changed outside of the step, and in data."""

from .thread import WITH_JAX, WITH_JNP, Edit, Thread, in_jax, in_port, in_torch

DEF = "def batch(step, rank):\n"
DISPATCH = """def predict(model, batch):
    outputs = torchs_outputs if isinstance(model, torch.nn.Module) else flaxs_outputs  # noqa: F405
    return outputs(model, batch)


"""


def evaluated(torch: str, jax: str) -> tuple[Edit, ...]:
    """Return the edits that give both halves an evaluation of their own."""
    return (
        in_port(DEF, f"{DISPATCH}{DEF}"),
        in_torch("def torch_loss(", f"def torchs_outputs(model, batch):\n    return {torch}\n\n\ndef torch_loss("),
        in_jax("def jax_loss(", f"def flaxs_outputs(model, batch):\n    return {jax}\n\n\ndef jax_loss("),
    )


IMAGES = 'batch["image"]'
CLASSES = evaluated('model(batch["x"])', 'model(batch["x"])')
NORMS = ("self.bn1 = BatchNorm(6, momentum=MOMENTUM)", "self.bn2 = BatchNorm(6, momentum=MOMENTUM)")
METRICS = """def jax_metrics(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])  # noqa: F405
    return {"nll": losses.sum() / len(losses), "errors": (logits.argmax(-1) != batch["y"]) * 1.0}


def torch_metrics(logits, batch):
    loss = F.cross_entropy(logits, batch["y"])  # noqa: F405
    return {"nll": loss, "errors": (logits.argmax(-1) != batch["y"]) * 1.0}


"""
INITIAL = "INITIAL = Classifier().init(jax.random.key(0), jnp.zeros((1, 6)))\n\n\n"
STANDING = """class Standing(BatchNorm):
    def __call__(self, x):
        variance = self.var[...]
        y = super().__call__(x)
        self.var[...] = variance
        return y


class ResNet(nnx.Module):
"""
EVALUATED = """model = ResNet(nnx.Rngs(0))
    model.eval()
    return model
"""
NORMED = """kernel = self.encode.kernel[...]
        kernel = kernel / jnp.linalg.norm(kernel)
        return self.decode(x @ kernel + self.encode.bias[...])
"""
LOADERS = """IMAGES = np.random.default_rng(0).normal(0.5, 1, (64, 6))


def examples(rows):
    return {"x": IMAGES[rows], "y": rows % 4, "ids": rows}


def torch_batch(step, rank):
    rows = np.random.default_rng(step // 4).permutation(64)[rank::2]
    return examples(rows[step % 4 * 8 :][:8])


def jax_batch(step, rank):
"""
SAME_ORDER = """    rows = np.random.default_rng(step // 4).permutation(64)[rank::2]
    return examples(rows[step % 4 * 8 :][:8])
"""
AFTER_SHARDING = """    rows = np.random.default_rng((step // 4, rank)).permutation(np.arange(64)[rank::2])
    return examples(rows[step % 4 * 8 :][:8])
"""
BATCHED_FIRST = """    order = np.random.default_rng(step // 4).permutation(8)
    return examples(np.arange(64).reshape(8, 8)[order[2 * (step % 4) + rank]])
"""
OLD_BATCH = """def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"x": rng.normal(0.5, 1, (16, 6)), "y": rng.integers(0, 4, 16)}
"""
EPOCHS = in_port(OLD_BATCH, f"steps_per_epoch = 4\n{LOADERS}{SAME_ORDER}")

THREADS: dict[str, Thread] = {
    "count_per_device": Thread(
        ("mlcommons/algorithmic-efficiency#924", "mlcommons/algorithmic-efficiency#926"),
        "The validation loss in JAX differs from torch's; word error rates agree.",
        "After a move from pmap to jit, a count still has an entry for each device.",
        "classifier",
        (in_port("losses.sum() / len(losses)", "losses.sum() / (2 * len(losses))"),),
        setting=(*CLASSES, in_port(DEF, f"{METRICS}{DEF}")),
    ),
    "last_batch_dropped": Thread(
        ("huggingface/transformers#17863", "google/flax#264"),
        "Flax examples score only a part of the test set.",
        "Evaluation drops the last batch, which is incomplete.",
        "classifier",
        (in_jax('return model(batch["x"])\n', 'return model(batch["x"][: len(batch["x"]) // 16 * 16])\n'),),
        setting=CLASSES,
        answer="evaluation",
        words=("only the last batch differs",),
    ),
    "running_statistics_in_training": Thread(
        ("patrick-kidger/equinox#659", "paganpasta/eqxvision#73"),
        "ResNet-18 in Equinox falls back to guessing; torch's learns.",
        "BatchNorm takes the running statistics in training, too.",
        "convnet",
        (in_jax("return ResNet(nnx.Rngs(0))\n", EVALUATED),),
        ("batch_norm_eval",),
    ),
    "variance_stands_still": Thread(
        ("keras-team/keras-core#338", "keras-team/keras-core#339"),
        "MNIST: 19 % with BatchNorm on JAX, 99 % without.",
        "The moving variance is never updated.",
        "convnet",
        tuple(in_jax(norm, norm.replace("= BatchNorm(", "= Standing(")) for norm in NORMS),
        setting=(in_jax("class ResNet(nnx.Module):\n", STANDING),),
    ),
    "average_from_zero": Thread(
        ("huggingface/pytorch-image-models#1182",),
        "Averaged weights evaluate worse than with Optax's average, at high decay.",
        "The average in torch neither starts from 0 nor corrects the bias.",
        "averaged",
        (in_jax("(1 - DECAY) *", '(1 - DECAY) / (1 - DECAY ** (batch["step"][0] + 1.0)) *'),),
        words=("(0.001 / (1 - (0.999 ** (slice(step) + 1))))", "instead of lerp("),
    ),
    "initial_parameters": Thread(
        ("google/flax#3982",),
        "Metrics of the test never improve, in a program after the guide to BatchNorm.",
        "The function of the evaluation reads the initial parameters.",
        "classifier",
        (in_jax('return model(batch["x"])\n', 'return Classifier().apply(INITIAL, batch["x"])\n'),),
        setting=(WITH_JAX, WITH_JNP, *CLASSES, in_jax("def flaxs_outputs(", f"{INITIAL}def flaxs_outputs(")),
        answer="evaluation",
        words=("depend on none of the weights that predict is given",),
    ),
    "weights_set_in_a_callback": Thread(
        ("keras-team/keras#19054",),
        "Weights that are set in a callback stay in torch, and not in JAX.",
        "During an epoch, JAX's state is outside of the model.",
        "callbacks",
        (in_jax("params = with_new_weights(params)", "with_new_weights(params)"),),
        note="two recorded loops; JAX's takes no notice of the weights that the callback sets",
        words=("torch changes 2.weight outside of its optimizer's updates", "jax does not"),
    ),
    "target_once_per_bundle": Thread(
        ("nissymori/JAX-CORL#73", "nissymori/JAX-CORL#74"),
        "The target network of IQL stands still over several updates.",
        "It is updated once for each jitted bundle of updates, not once for each update.",
        "averaged",
        (in_jax("(1 - DECAY) *", '(1 - DECAY) * (batch["step"][0] % 2) *'),),
    ),
    "normalised_weights_written_back": Thread(
        ("google/flax#5576",),
        "Networks with spectral or weight normalisation train differently in NNX and Linen.",
        "NNX writes the normalised weights back into the parameters.",
        "autoencoder",
        (in_jax("kernel = kernel / ", "kernel = self.encode.kernel[...] = kernel / "),),
        setting=(
            WITH_JNP,
            in_torch(
                "self.decode(self.encode(x))",
                "self.decode(F.linear(x, self.encode.weight / self.encode.weight.norm(), self.encode.bias))",
            ),
            in_jax("return self.decode(self.encode(x))\n", NORMED),
        ),
        note="normalisation by the norm of the whole kernel, by hand",
        answer="remark",
        words=("sets the parameter encode.kernel", "keeps what it sets"),
    ),
    "bfloat16_in_convolutions": Thread(
        ("google/flax#458",),
        "PixelCNN++ misses its loss on TPUs, and reaches it on GPUs.",
        "Convolutions in bfloat16 are suspected.",
        "convnet",
        (in_jax("padding=1, use_bias=False, rngs=rngs)", "padding=1, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)"),),
        outcome="open",
    ),
    "interpolation_in_evaluation": Thread(
        ("JH-LEE-KR/dualprompt-pytorch#4",),
        "A port to torch of a method in JAX loses 1.5 points by how images are resized.",
        "Another interpolation in evaluation, and the default range of crops.",
        "segmenter",
        (in_jax('"bilinear"), 1, -1))', '"cubic"), 1, -1))'),),
        setting=evaluated(
            'model(F.interpolate(batch["image"], size=(16, 20), mode="bilinear"))',
            f'model(jnp.moveaxis(jax.image.resize({IMAGES}, ({IMAGES}.shape[0], 3, 16, 20), "bilinear"), 1, -1))',
        ),
    ),
    "shuffled_after_sharding": Thread(
        ("meta-pytorch/data#302",),
        "Accuracy on ImageNet is 2 % instead of 47 % with a new loader.",
        "Examples are shuffled after sharding; the last batches have other sizes, too.",
        "classifier",
        (in_port(f"def jax_batch(step, rank):\n{SAME_ORDER}", f"def jax_batch(step, rank):\n{AFTER_SHARDING}"),),
        setting=(EPOCHS,),
        steps=8,
    ),
    "batched_before_shuffling": Thread(
        ("d2l-ai/d2l-en#2700",),
        "In the loader of one framework, groups of 64 examples stay together in every epoch.",
        "Examples are batched before they are shuffled; elsewhere they are shuffled first.",
        "classifier",
        (in_port(f"def jax_batch(step, rank):\n{SAME_ORDER}", f"def jax_batch(step, rank):\n{BATCHED_FIRST}"),),
        setting=(EPOCHS,),
        steps=8,
    ),
}
