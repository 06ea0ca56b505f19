"""Sentences of faults of a loss: edits of its calls, and how its micro-batches are combined."""

from collections.abc import Callable, Mapping
from typing import Any

Names = tuple[str, ...]
MOST_OPERATIONS = 3  # of a side that are said of a fault
# Words for the keys in the parts of statements.
WORDS: Mapping[str, Mapping[Any, str]] = {
    "operator": {
        **{"mul": "times", "div": "divided by", "add": "plus", "sub": "minus", "rsub": "subtracted from"},
        **{"pow": "to the power", "rdiv": "as the divisor of", "rpow": "as the exponent of the base"},
        "compare": "compared with",
    },
    "by": {-1: "before", 1: "after"},
    "early": {-1: "early", 1: "late"},
    "neighbour": {"end": "at the ends the end itself", "other_end": "at an end the other end"},
    "rows": {
        "first": "row 0 for every index",
        "next": "the row after that of each index",
        "previous": "the row before that of each index",
    },
    "end": {"rolled": "its end at its beginning", "zero": "with a 0 at its end"},
    "reduction": {"amax": "largest value", "amin": "smallest value"},
    "passes": {"__get__": "an attribute such as .T"},
    "kept": {True: "though it updates them", False: "and leaves them as they are"},
    "position": {0: "first", 1: "second"},
    "layer": {"conv": "convolution", "max_pool": "max pooling", "avg_pool": "average pooling", "": "layers"},
    "products": {"products": "matrix products", "others": "matrix products but convolutions"},
    "rounding": {"hardware": "", "cast": " by a cast", "forward": ", forward only"},
    "measure": {"std": "standard deviation", "var": "variance", "": "standard deviations and variances"},
    "divisor": {0: "n", 1: "n - 1"},
    "lead": {"left_out": "left out: ", "added": "added: "},
}


def _argument(call: str, name: str, inner: bool, within: str) -> str:
    argument = f"{name} of {call}" if inner else f"{call}'s {name}"
    return f"{argument} within {within}" if within else argument


def _instead(of: str, jax: float | str, torch: float | str) -> str:
    jax, torch = (x if isinstance(x, str) else f"{x:.10g}" for x in (jax, torch))
    zeros = " (zeros)" if jax == "'constant'" else ""
    return f"{of} {jax}{zeros} instead of {torch}"


def _two_arguments(call: str, names: Names, jax: tuple[float, ...], torch: tuple[float, ...]) -> str:
    of_both = (" and ".join(f"{x:.10g}" for x in of) for of in (jax, torch))
    return f"{call}'s {' and '.join(names)} {' instead of '.join(of_both)}"


def _expressions(jax: str, torch: str, call: str, module: str, by: str) -> str:
    text = f"{jax} instead of {torch}" if jax != torch else f"{torch} with its values in another order"
    after = f", in {call}{f' of {module}' if module else ''}" if call else ""
    return f"{WORDS['lead'].get(by, '')}{text}{after}"


def _operations(jax: Names, torch: Names) -> str:
    return " instead of ".join(
        " then ".join(names[:MOST_OPERATIONS]) + " and more" * (len(names) > MOST_OPERATIONS) or "nothing"
        for names in (jax, torch)
    )


def _exchanged(operands: Names, calls: Names) -> str:
    return f"{' and '.join(name or 'another tensor' for name in operands)} exchanged between {' and '.join(calls)}"


SENTENCES: Mapping[str, str | Callable[..., str]] = {
    # Names of tensors.
    "result": "the result of {call}",
    "operand_number": "operand {number}",
    "numbered_operand": "<{of} >(operand {number})",
    # Arguments of calls.
    "argument": _argument,
    "operand": "<before {before}, >{of:tensor} {operator:operator}< within {within}>",
    "instead": _instead,
    "two_arguments": _two_arguments,
    "other_axis": "{call} over axis {jax} instead of {torch}",
    "other_axes": "{call} over axes {jax} instead of {torch}",
    "normalized_axes": "layer_norm over the axes {jax:and} instead of {torch:and}",
    "masked_scores": "the scores that attn_mask hides are",
    "without_argument": "{call} without {name}",
    "not_rescaled": "{call} without the division by 1 - p = {kept:.4g}",
    "other_function": "{jax} instead of {torch}< of {of}>",
    "other_operator": "{jax} by {number:.10g} instead of {torch}",
    # Elements.
    "neighbour": "the index {by:by}, {ends:neighbour}, instead of the index",
    "index_left_out": "values at index {index}<{is_last:?}, the last,> of axis {axis} count as 0: they are left out",
    "other_index": "index {jax} instead of {torch}",
    "arange_start": "arange starts at {jax} instead of {torch}",
    "other_rows": "{call} takes {rows:rows}",
    "slices_shifted": "slices of {of:tensor} shifted by {jax} instead of {torch}",
    "entry_moved": "{entry} moved by one along axis {axis}, one too {by:early}, {end:end}",
    "other_values": "{entry} of the batch has other values",
    # Connections of calls.
    "shape_left_out": "{call} left out< of {of}>: shape {jax} instead of {torch}",
    "call_left_out": "{call}< by {by}> left out< of {of}>",
    "flip_left_out": "flip left out: the direction backwards reads forwards",
    "of_step_before": "<{of:tensor} of >the step before in {call}",
    "operand_left_out": "{operands:and} left out of {call}< by {by}>",
    "call_by": "{call}< by {by:and}>",
    "calls_left_out": "{calls:and} left out",
    "factor": "{of} in {call} times",
    "addend": "{of} in {call} plus",
    "state_of_zeros": "zeros in place of the state that {call} is given",
    "parts_reordered": "the parts of {call} in the order {order}",
    "joined_in_order": lambda call, names, order: f"{call} in the order {', '.join(names) if names else order}",
    "copies_by_block": (
        "copies made block by block, as repeat and tile make them, instead of each element next to its copies"
    ),
    "gates_reordered": "the gates of {call} in the order {order}",
    "call_added_before": "{added} of {of} before {call}",
    "call_added_after": "{added} after {call}",
    "number_instead": "the number {jax} instead of {torch}< in {call}>",
    "operand_transposed": "axes {axes:and} of {of:tensor} exchanged before {call}",
    "operands_reversed": "the operands of {call} in the other order",
    "call_moved": "{call} after {after} instead of before",
    "earlier_weights": "weights from before {before} are used, and not those after it",
    "other_operand": "{jax} in place of {torch} in {call}",
    "operands_exchanged": _exchanged,
    "arguments_exchanged": "the arguments {operands:and}< of {function}> exchanged",
    "other_argument": "{jax} in place of {torch} as an argument< of {function}>",
    # Other expressions.
    "expressions": _expressions,
    "few_bits": "{of} is computed in {dtype}",
    "made_otherwise": "other operations in {of}<, before {call}>",
    "operations": _operations,
    "function_instead": "{function} of {of} in place of the result of {call}",
    "reduction_instead": lambda of, axes, elements, call, reduction: (
        f"the {WORDS['reduction'].get(reduction, reduction)} of {of} over {f'axis {axes[0]}, ' if axes else ''}"
        f"all elements ({elements} in number){',' if axes else ''} in place of the result of {call}"
    ),
    "other_divisor_of": "{of:tensor} divided by {jax} instead of by {torch:tensor}",
    "power_before": "the {power} of {of:tensor} before {call}",
    # Gradients.
    "gradient_passes": "the gradient is not stopped< at {at}>",
    "gradient_passes_no_grad": "the gradient is not stopped<{on_line:?} on its line> at {at}, though torch has no_grad",
    "no_gradient": "no gradient reaches {of} in {call}",
    "gradient_factor": "the gradient of {of} in {call}, times",
    "gradient_lost": "{name} gets no gradient from {call:passes}",
    "other_gradient": "another gradient of {of}, from {call}",
    "padding_row": "row {row} of an embedding gets a gradient",
    # Layers and losses.
    "gelu": "GELU by {by}",
    "norm_epsilon": "{norm} eps",
    "epsilon_under_root": "under a root, eps",
    "label_smoothing": "label smoothing",
    "labels_counted": "labels of {index} count in the mean",
    "labels_not_ignored": "labels of {index} are not ignored",
    "divided_by_labels": "{call} divides by the number of labels instead of by the sum of their weights",
    "dropout_rate": "dropout rate {jax:.10g} instead of {torch:.10g}",
    "loss_term": "the {position:position} term of a sum of losses times",
    "batch_norm_over_replicas": "BatchNorm over all replicas",
    "running_statistics": "BatchNorm by its running statistics, as in evaluation, {updates:kept}",
    "batch_statistics": "BatchNorm by the batch's statistics, as in training",
    "batch_norm_momentum": "BatchNorm momentum",
    "biased_variance": "BatchNorm keeps the biased variance",
    "chosen_term": "the {jax} of two values instead of the {torch}",
    "not_clamped": "values not clamped",
    "not_clamped_on": "values not clamped from {end}",
    "same_padding": "{kind:layer} padded 'SAME'<, {pads}>",
    "axes_merged": "axes {order:axes} merged in the order {order}",
    "axis_split": "an axis split into {order:axes} in the order {order}",
    "kernel_swapped": "kernel's axes {axes} swapped",
    "kernel_turned": "kernel turned round, axes {axes}",
    "inputs_rounded": "inputs of {of:products} rounded to {dtype}{by:rounding}",
    "other_divisor": "{of:measure} with divisor {jax:divisor} instead of {torch:divisor}",
    "fast_variance": "{norm}'s variance as E[x^2] - E[x]^2, of means in float32",
    # Buffers, and the combination of micro-batches.
    "buffers_local": "each replica keeps its own buffers, the reference those of rank 0",
    "buffers_averaged": "the buffers are the mean over the replicas, the reference keeps rank 0's",
    "together": "{each:and}",
    "loss_averaged": "the loss of every replica is the mean over the replicas",
}
