"""Faults of the model and its loss."""

from jaxddp.parity.catalogue.fault import Fault
from jaxddp.parity.catalogue.torch_optimizer import TorchOptimizer
from jaxddp.parity.deviation import Deviation

# Details of a deviation.
UPDATES = "updates"  # BatchNorm in training mode that normalises by its running statistics
BY_HAND = "by hand"  # a normalisation that is no layer
BY_ERF = "erf"  # a GELU whose reference uses the tanh approximation


def _ignored(deviation: Deviation, _: TorchOptimizer) -> str:
    return FAULTS["ignore_index"].fix.replace("-100", deviation.detail) if deviation.detail else ""


FAULTS: dict[str, Fault] = {
    "batch_norm_momentum": Fault(
        "BatchNorm's momentum is not the complement of torch's: 0.1 in torch is 0.9 in flax (default: 0.99)",
        "use momentum=0.9 in nnx.BatchNorm or linen.BatchNorm for torch's momentum=0.1, and 1 - m for any m; "
        "jaxddp.nn.layers.BatchNorm(features, momentum=0.1) takes torch's number",
    ),
    "biased_variance": Fault(
        "the running variance is the biased one; torch keeps n/(n-1) times it",
        "use jaxddp.nn.layers.BatchNorm(features), in linen as nnx.bridge.to_linen(jaxddp.nn.layers.BatchNorm, "
        "features, skip_rng=True), or track n/(n-1) times the batch variance, like torch",
        "pytorch/pytorch#19902",
    ),
    "batch_norm_eval": Fault(
        "BatchNorm normalises by its running statistics on one side and by the batch's on the other",
        "give each layer the reference's mode: model.train() or use_running_average=False where it trains, eval() or "
        "use_running_average=True where it is frozen",
        fixes={
            UPDATES: "normalise by the statistics of the batch, and use the running ones in evaluation only: "
            "jaxddp.nn.layers.BatchNorm(features), in linen as nnx.bridge.to_linen(jaxddp.nn.layers.BatchNorm, "
            "features, skip_rng=True)"
        },
    ),
    "batch_norm_sync": Fault(
        "BatchNorm computes its statistics over all replicas and the reference for each replica, or vice versa",
        "for statistics of each replica, use nnx.BatchNorm(features, axis_name=None) or "
        "jaxddp.nn.layers.BatchNorm(features, sync=False); where the reference has SyncBatchNorm, axis_name=axis_name "
        "or sync=True",
        "google/flax#2417",
    ),
    "fast_variance": Fault(
        "the variance is computed as E[x^2] - E[x]^2, which cancels if the mean is large",
        "set use_fast_variance=False in the layer: nnx.LayerNorm(features, use_fast_variance=False)",
    ),
    "gelu_approximation": Fault(
        "GELU uses the tanh approximation on one side and erf on the other",
        "use jax.nn.gelu(x, approximate=False) for torch's default",
        "jax-ml/jax#4428",
        fixes={BY_ERF: "use jax.nn.gelu(x, approximate=True), like the reference"},
    ),
    "norm_epsilon": Fault(
        "the epsilon of a normalisation layer differs; LayerNorm's defaults are 1e-5 in torch and 1e-6 in flax",
        "set epsilon to the reference's eps: nnx.LayerNorm(features, epsilon=1e-5) for torch.nn.LayerNorm's default",
        fixes={BY_HAND: "add the reference's eps under the root: x / jnp.sqrt(variance + eps)"},
    ),
    "same_padding": Fault(
        "'SAME' padding at stride 2 differs from symmetric padding",
        "use padding=((1, 1), (1, 1)) for torch's padding=1",
        "google/flax#2993",
    ),
    "label_smoothing": Fault(
        "label smoothing differs",
        "use torch's label_smoothing: optax.softmax_cross_entropy(logits, "
        "optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), label_smoothing))",
    ),
    "dropout_rate": Fault(
        "dropout has another rate", "give torch's p as the rate: nnx.Dropout(p, rngs=rngs), linen.Dropout(p)"
    ),
    "ignore_index": Fault(
        "labels that should be ignored count in the mean",
        "divide by the number of labels that are not ignored: jnp.where(labels != -100, losses, 0).sum() / "
        "(labels != -100).sum()",
        fix_of=_ignored,
    ),
    "padding_idx": Fault(
        "the embedding's padding row gets a gradient",
        "stop the gradient of that row: rows = jnp.where((ids == padding_idx)[..., None], "
        "jax.lax.stop_gradient(rows), rows)",
    ),
    "layout": Fault(
        "the values are right but in another order: a kernel's axes, or the axes that were flattened",
        "split an axis into the reference's axes, in its order; transpose to torch's order (N, C, H, W) before "
        "flattening, x.transpose(0, 3, 1, 2).reshape(len(x), -1), or "
        "declare flax's order in the program, names = {layer: flattened(layer, (C, H, W))}; store kernels as "
        "(H, W, in, out)",
    ),
    "reduced_precision_matmul": Fault(
        "matrix products round their inputs to fewer bits (TF32, bfloat16)",
        "do not round the inputs of products: no casts to bfloat16 before them, "
        'dot_general=jax.lax.dot_general in flax\'s layers, and jax.default_matmul_precision("highest") on a '
        "GPU",
        "jax-ml/jax#12008",
    ),
    "std_correction": Fault(
        "a standard deviation or variance divides by n where the reference divides by n - 1, or vice versa; torch.std "
        "and torch.var divide by n - 1, jnp.std and jnp.var by n",
        "use jnp.std(x, ddof=1) and jnp.var(x, ddof=1) for torch's default, ddof=0 for correction=0",
    ),
    "clipped_term": Fault(
        "where the reference takes the larger (or smaller) of two values, as in a clipped loss, the port takes the "
        "other, or always one of them",
        "use jnp.maximum(a, b) for torch.max(a, b) and jnp.minimum(a, b) for torch.min(a, b), before the mean",
    ),
    "clamp_missing": Fault(
        "values are not clamped, or only on one side; the reference clamps them",
        "use jnp.clip(x, low, high) for torch.clamp(x, low, high)",
    ),
}
