"""An exam for `jaxddp check`: ports and faults by an author who does not know how the check works."""

from . import (
    contrastive,
    convnext,
    decoder,
    experts,
    flow,
    graph,
    masked,
    policy,
    recurrence,
    seq2seq,
    tabular,
    unet,
)
from .fault import UnseenFault

PORTS = {
    "convnext": convnext.FAULTS,
    "decoder": decoder.FAULTS,
    "seq2seq": seq2seq.FAULTS,
    "contrastive": contrastive.FAULTS,
    "experts": experts.FAULTS,
    "unet": unet.FAULTS,
    "masked": masked.FAULTS,
    "graph": graph.FAULTS,
    "recurrence": recurrence.FAULTS,
    "flow": flow.FAULTS,
    "policy": policy.FAULTS,
    "tabular": tabular.FAULTS,
}

UNSEEN: dict[str, UnseenFault] = {
    f"{port}/{name}": fault for port, faults in PORTS.items() for name, fault in faults.items()
}

# Two faults of one port at once, whose edits do not overlap.
PAIRS: dict[str, tuple[str, str]] = {
    f"{port}/{first}+{second}": (f"{port}/{first}", f"{port}/{second}")
    for port, first, second in (
        ("convnext", "response_axes", "pooled_maximum"),
        ("convnext", "scale_after_sum", "vector_decay"),
        ("decoder", "rotary_base", "silu_on_up"),
        ("decoder", "keys_tiled", "embedding_scale"),
        ("seq2seq", "gate_order", "attention_mask"),
        ("seq2seq", "final_state", "sentence_means"),
        ("contrastive", "padding_in_mean", "scale_ceiling"),
        ("experts", "balance_factor", "softmax_axis"),
        ("unet", "skip_first", "noise_level"),
        ("masked", "pixel_variance", "attention_scale"),
        ("graph", "slope", "residual"),
        ("recurrence", "window", "late_output"),
        ("flow", "scale_volume", "straight_through"),
        ("policy", "done_shift", "advantage_gradient"),
        ("tabular", "running_variance", "mean_of_levels"),
    )
}
