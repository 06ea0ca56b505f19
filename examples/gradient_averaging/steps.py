"""Forward pass of the model in small steps, and the backward pass derived by hand, step by step.

Both are written once and run in NumPy, JAX and torch: `xp` is `numpy`, `jax.numpy` or `torch`, and only functions
that all three share are used. Shapes: n examples, V characters, E features per character, H hidden units.
"""

from collections.abc import Callable, Mapping
from typing import Any

Arrays = dict[str, Any]
Note = Callable[[str, Any], Any]

EPS = 1e-5


def forward(xp: Any, p: Mapping[str, Any], x: Any, y: Any, note: Note) -> Any:
    """Compute the loss: mean cross entropy of embedding, linear, BatchNorm, tanh, linear.

    Args:
        xp: the array module.
        p: parameters C (V, E), W1 (3 E, H), b1 (H,), W2 (H, V), b2 (V,), bngain and bnbias (1, H).
        x, y: (n, 3) and (n,), integer.
        note: maps each intermediate's name and value to the value to continue with.
    """
    n = len(y)
    emb = note("emb", p["C"][x])
    embcat = note("embcat", emb.reshape(n, -1))
    hprebn = note("hprebn", embcat @ p["W1"] + p["b1"][None])

    bnmeani = note("bnmeani", hprebn.sum(0, keepdims=True) / n)
    bndiff = note("bndiff", hprebn - bnmeani)
    bndiff2 = note("bndiff2", bndiff * bndiff)
    bnvar = note("bnvar", bndiff2.sum(0, keepdims=True) / (n - 1))
    bnvar_inv = note("bnvar_inv", (bnvar + EPS) ** -0.5)
    bnraw = note("bnraw", bndiff * bnvar_inv)
    hpreact = note("hpreact", p["bngain"] * bnraw + p["bnbias"])

    h = note("h", xp.tanh(hpreact))
    logits = note("logits", h @ p["W2"] + p["b2"][None])

    logit_maxes = note("logit_maxes", xp.amax(logits, 1, keepdims=True))
    norm_logits = note("norm_logits", logits - logit_maxes)
    counts = note("counts", xp.exp(norm_logits))
    counts_sum = note("counts_sum", counts.sum(1, keepdims=True))
    counts_sum_inv = note("counts_sum_inv", counts_sum**-1)
    probs = note("probs", counts * counts_sum_inv)
    logprobs = note("logprobs", xp.log(probs))
    return -logprobs[xp.arange(n), y].mean()


def remembered(xp: Any, p: Mapping[str, Any], x: Any, y: Any) -> tuple[Any, Arrays]:
    """Return the loss, and the intermediates by name."""
    values: Arrays = {}

    def note(name: str, value: Any) -> Any:
        values[name] = value
        return value

    return forward(xp, p, x, y, note), values


def backward(xp: Any, p: Mapping[str, Any], x: Any, y: Any) -> Arrays:
    """Differentiate the loss with respect to every intermediate and parameter, by name, last step first.

    Args:
        xp, p, x, y: see `forward`.
    """
    _, v = remembered(xp, p, x, y)
    n, vocab_size = v["logits"].shape
    one_hot = xp.eye(vocab_size, dtype=v["logits"].dtype)
    d: Arrays = {}

    d["logprobs"] = -one_hot[y] / n  # the only place where the mean over the batch divides
    d["probs"] = d["logprobs"] / v["probs"]
    d["counts_sum_inv"] = (d["probs"] * v["counts"]).sum(1, keepdims=True)
    d["counts_sum"] = -(v["counts_sum"] ** -2) * d["counts_sum_inv"]
    d["counts"] = d["probs"] * v["counts_sum_inv"] + d["counts_sum"]  # used twice
    d["norm_logits"] = d["counts"] * v["counts"]
    d["logit_maxes"] = -d["norm_logits"].sum(1, keepdims=True)  # 0: softmax ignores a shift of all logits
    d["logits"] = d["norm_logits"] + one_hot[v["logits"].argmax(1)] * d["logit_maxes"]

    d["h"] = d["logits"] @ p["W2"].T
    d["W2"] = v["h"].T @ d["logits"]
    d["b2"] = d["logits"].sum(0)
    d["hpreact"] = (1 - v["h"] ** 2) * d["h"]

    d["bngain"] = (v["bnraw"] * d["hpreact"]).sum(0, keepdims=True)
    d["bnbias"] = d["hpreact"].sum(0, keepdims=True)
    d["bnraw"] = p["bngain"] * d["hpreact"]
    d["bnvar_inv"] = (v["bndiff"] * d["bnraw"]).sum(0, keepdims=True)
    d["bnvar"] = -0.5 * (v["bnvar"] + EPS) ** -1.5 * d["bnvar_inv"]
    d["bndiff2"] = xp.ones_like(v["bndiff2"]) * d["bnvar"] / (n - 1)
    d["bndiff"] = v["bnvar_inv"] * d["bnraw"] + 2 * v["bndiff"] * d["bndiff2"]
    d["bnmeani"] = -d["bndiff"].sum(0, keepdims=True)
    d["hprebn"] = d["bndiff"] + d["bnmeani"] / n  # each example moves the mean

    d["embcat"] = d["hprebn"] @ p["W1"].T
    d["W1"] = v["embcat"].T @ d["hprebn"]
    d["b1"] = d["hprebn"].sum(0)  # 0: BatchNorm removes a bias
    d["emb"] = d["embcat"].reshape(v["emb"].shape)
    lookups = one_hot[x].reshape(-1, vocab_size)  # the character of each embedding
    d["C"] = lookups.T @ d["emb"].reshape(len(lookups), -1)
    return d
