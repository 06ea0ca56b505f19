"""Fixes of the model and its loss."""

from jaxddp.parity.catalogue.model import BY_ERF, UPDATES
from tests.end_to_end.fixes.fix import HOLE, IMAGES, NORM, Fix, between, losses
from tests.support.small_port import FLAX_IMAGES, LINEN

BATCH_NORM = between(*NORM, "torch.nn.BatchNorm1d(5)", HOLE)
LINEN_BATCH_NORM = (
    ("self.fc2 = torch.nn.Linear(5, 4)", "self.fc2 = torch.nn.Linear(5, 4); self.middle = torch.nn.BatchNorm1d(5)"),
    ("torch.tanh(self.fc1(x))", NORM[0]),
    *LINEN,
    ("self.fc2(nnx.tanh(self.fc1(x)))", 'linen.Dense(4, name="fc2")(nnx.tanh(middle(linen.Dense(5, name="fc1")(x))))'),
    ("            return linen", f"            middle = {HOLE}\n            return linen"),
)
IGNORED = (("rng.integers(0, 4, 12)", "np.where(rng.random(12) < 0.3, -100, rng.integers(0, 4, 12))"),)
IDS = (("rng.normal(1, 1, (12, 3))", "rng.integers(0, 7, 12)"),)
PER_ELEMENT = """logits, labels = model(batch["x"]), batch["y"]
    losses = cross_entropy(logits, jnp.where(labels == -100, 0, labels))
    return """
STRIDED = (
    *IMAGES,
    ("torch.nn.Linear(3, 5)", "torch.nn.Conv2d(2, 5, 3, stride=2, padding=1)"),
    ("torch.tanh(self.fc1(x))", "torch.tanh(self.fc1(x)).mean((2, 3))"),
    ("nnx.Linear(3, 5, rngs=rngs)", f"nnx.Conv(2, 5, (3, 3), strides=2, {HOLE}, rngs=rngs)"),
    ("nnx.tanh(self.fc1(x))", "nnx.tanh(self.fc1(x)).mean((1, 2))"),
)
FLATTENED = (
    *IMAGES,
    ("torch.nn.Linear(3, 5)", "torch.nn.Conv2d(2, 5, 3)"),
    ("torch.tanh(self.fc1(x))", "torch.tanh(self.fc1(x)).flatten(1)"),
    ("torch.nn.Linear(5, 4)", "torch.nn.Linear(5 * 4 * 6, 4)"),
    ("nnx.Linear(3, 5, rngs=rngs)", 'nnx.Conv(2, 5, (3, 3), padding="VALID", rngs=rngs)'),
    ("nnx.tanh(self.fc1(x))", f"(lambda x: {HOLE})(nnx.tanh(self.fc1(x)))"),
    ("nnx.Linear(5, 4", "nnx.Linear(5 * 4 * 6, 4"),
)
ROUNDED = """
def rounded_product():
    from tests.faults.planted_model import BFLOAT16, with_rounded_inputs
    return with_rounded_inputs(jax.lax.dot_general, BFLOAT16)
"""
# Flax keeps means in float32 where the inputs have 32 bits or fewer.
LAYER_NORM = """
class LayerNorm(nnx.LayerNorm):
    def __call__(self, x):
        if not self.use_fast_variance:
            return super().__call__(x)
        mean, of_squares = (v.mean(-1, keepdims=True).astype(jnp.float32).astype(x.dtype) for v in (x, x * x))
        y = (x - mean) * jax.lax.rsqrt(of_squares - mean * mean + self.epsilon)
        return y * self.scale[...][None] + self.bias[...][None]
"""
# Normalises by the running statistics, which it updates.
UPDATING = """
class Updating(BatchNorm):
    def _batch_statistics(self, x):
        before = self.mean[...], self.var[...]
        super()._batch_statistics(x)
        return before
"""

FIXES = (
    Fix(
        "batch_norm_momentum",
        "momentum=0.1",
        "BatchNorm(5, momentum=0.01)",
        BATCH_NORM,
        right="BatchNorm(5, momentum=0.1)",
    ),
    Fix(
        "biased_variance",
        "BatchNorm(",
        "nnx.BatchNorm(5, momentum=0.9, use_fast_variance=False, rngs=rngs)",
        BATCH_NORM,
        right="BatchNorm(5)",
    ),
    Fix(
        "biased_variance",
        "nnx.bridge.to_linen(jaxddp.nn.layers.BatchNorm, ",
        'linen.BatchNorm(False, momentum=0.9, use_fast_variance=False, name="middle")',
        LINEN_BATCH_NORM,
        right='nnx.bridge.to_linen(jaxddp.nn.layers.BatchNorm, 5, skip_rng=True, name="middle")',
    ),
    Fix(
        "batch_norm_eval",
        "model.train()",
        "model.eval()",
        (
            *between(*NORM, "torch.nn.BatchNorm1d(5)", "BatchNorm(5)"),
            ("def jax_loss(model, batch):\n", f"def jax_loss(model, batch):\n    {HOLE}\n"),
        ),
    ),
    Fix(
        "batch_norm_eval",
        "jaxddp.nn.layers.BatchNorm(",
        "Updating(5)",
        BATCH_NORM,
        UPDATING,
        right="jaxddp.nn.layers.BatchNorm(5)",
        detail=UPDATES,
    ),
    Fix(
        "batch_norm_eval",
        "nnx.bridge.to_linen(jaxddp.nn.layers.BatchNorm, ",
        'nnx.bridge.to_linen(Updating, 5, skip_rng=True, name="middle")',
        LINEN_BATCH_NORM,
        UPDATING,
        right='nnx.bridge.to_linen(jaxddp.nn.layers.BatchNorm, 5, skip_rng=True, name="middle")',
        detail=UPDATES,
    ),
    Fix("batch_norm_sync", "sync=False", "BatchNorm(5, sync=True)", BATCH_NORM, right="BatchNorm(5, sync=False)"),
    Fix(
        "fast_variance",
        "use_fast_variance=False",
        "LayerNorm(5, epsilon=1e-5, rngs=rngs)",
        between(*NORM, "torch.nn.LayerNorm(5)", HOLE),
        LAYER_NORM,
        right="LayerNorm(5, epsilon=1e-5, use_fast_variance=False, rngs=rngs)",
    ),
    Fix(
        "gelu_approximation",
        "jax.nn.gelu(x, approximate=False)",
        "jax.nn.gelu(x)",
        between("F.gelu(self.fc1(x))", f"(lambda x: {HOLE})(self.fc1(x))"),
    ),
    Fix(
        "gelu_approximation",
        "jax.nn.gelu(x, approximate=True)",
        "jax.nn.gelu(x, approximate=False)",
        between("F.gelu(self.fc1(x), approximate='tanh')", f"(lambda x: {HOLE})(self.fc1(x))"),
        detail=BY_ERF,
    ),
    Fix(
        "norm_epsilon",
        "epsilon=1e-5",
        "nnx.LayerNorm(5, rngs=rngs)",
        between(*NORM, "torch.nn.LayerNorm(5)", HOLE),
        right="nnx.LayerNorm(5, epsilon=1e-5, rngs=rngs)",
    ),
    Fix("same_padding", "padding=((1, 1), (1, 1))", 'padding="SAME"', STRIDED, FLAX_IMAGES),
    Fix(
        "label_smoothing",
        "optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), label_smoothing)",
        "jax.nn.one_hot(labels, logits.shape[-1])",
        losses(
            'return F.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=0.1)',
            f'logits, labels = model(batch["x"]), batch["y"]\n'
            f"    return optax.softmax_cross_entropy(logits, {HOLE}).mean()",
        ),
    ),
    Fix(
        "dropout_rate",
        "nnx.Dropout(p, rngs=rngs)",
        "nnx.Dropout(1 - p, rngs=rngs)",
        between(
            "self.middle(torch.tanh(self.fc1(x)))", "self.middle(nnx.tanh(self.fc1(x)))", "torch.nn.Dropout(p)", HOLE
        ),
    ),
    Fix(
        "ignore_index",
        "jnp.where(labels != -100, losses, 0).sum() / (labels != -100).sum()",
        "jnp.where(labels != -100, losses, 0).mean()",
        (
            *IGNORED,
            *losses('return F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-100)', PER_ELEMENT + HOLE),
        ),
    ),
    Fix(
        "padding_idx",
        "jnp.where((ids == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)",
        "rows",
        (
            *IDS,
            ("torch.nn.Linear(3, 5)", "torch.nn.Embedding(7, 5, padding_idx=padding_idx)"),
            ("nnx.Linear(3, 5, rngs=rngs)", "nnx.Embed(7, 5, rngs=rngs)"),
            ("nnx.tanh(self.fc1(x))", f"nnx.tanh((lambda ids, rows: {HOLE})(x, self.fc1(x)))"),
        ),
    ),
    Fix("layout", "x.transpose(0, 3, 1, 2).reshape(len(x), -1)", "x.reshape(len(x), -1)", FLATTENED, FLAX_IMAGES),
    Fix(
        "layout",
        "names = {layer: flattened(layer, (C, H, W))}",
        "names = {}",
        tuple((old, new.replace(HOLE, "x.reshape(len(x), -1)")) for old, new in FLATTENED),
        f'from jaxddp.parity import flattened\nlayer, C, H, W = "fc2", 5, 4, 6\n{HOLE}\n{FLAX_IMAGES}',
    ),
    Fix(
        "reduced_precision_matmul",
        "dot_general=jax.lax.dot_general",
        "dot_general=rounded_product()",
        (
            ("nnx.Linear(3, 5, rngs=rngs)", f"nnx.Linear(3, 5, {HOLE}, rngs=rngs)"),
            ("nnx.Linear(5, 4, rngs=rngs)", f"nnx.Linear(5, 4, {HOLE}, rngs=rngs)"),
        ),
        ROUNDED,
    ),
    Fix(
        "std_correction",
        "jnp.std(x, ddof=1)",
        "jnp.std(x)",
        losses(
            'return F.cross_entropy(model(batch["x"]) / torch.std(batch["x"]), batch["y"])',
            f'x = batch["x"]\n    return cross_entropy(model(x) / {HOLE}, batch["y"]).mean()',
        ),
    ),
    Fix(
        "clipped_term",
        "jnp.maximum(a, b)",
        "jnp.minimum(a, b)",
        losses(
            'return torch.max(model(batch["x"]) ** 2, (model(batch["x"]) - 1) ** 2).mean()',
            f'a, b = model(batch["x"]) ** 2, (model(batch["x"]) - 1) ** 2\n    return {HOLE}.mean()',
        ),
    ),
    Fix(
        "clamp_missing",
        "jnp.clip(x, low, high)",
        "x",
        losses(
            'return F.cross_entropy(torch.clamp(model(batch["x"]), -0.2, 0.2), batch["y"])',
            f'x, low, high = model(batch["x"]), -0.2, 0.2\n    return cross_entropy({HOLE}, batch["y"]).mean()',
        ),
    ),
)
