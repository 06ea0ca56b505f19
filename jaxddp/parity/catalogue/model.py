"""Faults of the model and its loss."""

from jaxddp.parity.catalogue.fault import Fault

FAULTS: dict[str, Fault] = {
    "batch_norm_momentum": Fault(
        "BatchNorm's momentum is not the complement of torch's: 0.1 in torch is 0.9 in flax (default: 0.99)",
        "use momentum=0.9 in flax for 0.1 in torch",
    ),
    "biased_variance": Fault(
        "the running variance is the biased one; torch keeps n/(n-1) times it",
        "track n/(n-1) times the batch variance, as jaxddp.nn.layers.BatchNorm does",
        "pytorch/pytorch#19902",
    ),
    "batch_norm_eval": Fault(
        "BatchNorm uses its running statistics during training",
        "pass use_running_average=False, or call model.train()",
    ),
    "batch_norm_sync": Fault(
        "BatchNorm computes its statistics over all replicas and the reference for each replica, or vice versa",
        "use axis_name=None for local statistics",
        "google/flax#2417",
    ),
    "fast_variance": Fault(
        "the variance is computed as E[x^2] - E[x]^2, which cancels if the mean is large",
        "set use_fast_variance=False",
    ),
    "gelu_approximation": Fault(
        "GELU uses the tanh approximation on one side and erf on the other",
        "use jax.nn.gelu(x, approximate=False) for torch's default",
        "jax-ml/jax#4428",
    ),
    "norm_epsilon": Fault(
        "the epsilon of a normalisation layer differs; LayerNorm's defaults are 1e-5 in torch and 1e-6 in flax",
        "set epsilon= to the reference's eps",
    ),
    "same_padding": Fault(
        "'SAME' padding at stride 2 differs from symmetric padding",
        "use padding=((1, 1), (1, 1)) for torch's padding=1",
        "google/flax#2993",
    ),
    "label_smoothing": Fault("label smoothing differs", "use optax.smooth_labels with torch's label_smoothing"),
    "dropout_rate": Fault("dropout has another rate", "give nnx.Dropout or linen's torch's p as its rate"),
    "ignore_index": Fault(
        "labels that should be ignored count in the mean",
        "divide by the number of labels that are not ignored",
    ),
    "padding_idx": Fault(
        "the embedding's padding row gets a gradient",
        "apply stop_gradient to that row, or mask its gradient",
    ),
    "layout": Fault(
        "the values are right but in another order: a kernel's axes, or the axes that were flattened",
        "transpose to torch's order (N, C, H, W) before flattening, or declare flax's order in names: flattened(...); "
        "store kernels as (H, W, in, out)",
    ),
    "reduced_precision_matmul": Fault(
        "matrix products round their inputs to fewer bits (TF32, bfloat16)",
        'compare under jax.default_matmul_precision("highest")',
        "jax-ml/jax#12008",
    ),
    "std_correction": Fault(
        "a standard deviation or variance divides by n where the reference divides by n - 1, or vice versa; torch.std "
        "and torch.var divide by n - 1, jnp.std and jnp.var by n",
        "use jnp.std(x, ddof=1) and jnp.var(x, ddof=1) for torch's default, ddof=0 for correction=0",
    ),
    "clipped_term": Fault(
        "where the reference takes the larger (or smaller) of two values, as in a clipped loss, the port takes the "
        "other, or one of them always",
        "use jnp.maximum(a, b) for torch.max(a, b) and jnp.minimum(a, b) for torch.min(a, b), before the mean",
    ),
    "clamp_missing": Fault(
        "values are not clamped, or only on one side; the reference clamps them",
        "use jnp.clip(x, low, high) for torch.clamp(x, low, high)",
    ),
}
