"""Sentences of faults of a loss: edits of its calls, and how its micro-batches are combined."""

from collections.abc import Callable, Mapping

Names = tuple[str, ...]
MOST_OPERATIONS = 3  # of a side that are said of a fault
OPERATORS = {
    "mul": "{} times",
    "div": "{} divided by",
    "add": "{} plus",
    "sub": "{} minus",
    "rsub": "{} subtracted from",
    "pow": "{} to the power",
    "rdiv": "{} as the divisor of",
    "rpow": "{} as the exponent of the base",
    "compare": "{} compared with",
}
LAYERS = {"conv": "convolution", "max_pool": "max pooling", "avg_pool": "average pooling"}
PRODUCTS = {
    "products": "matrix products",
    "convolutions": "convolutions",
    "others": "matrix products but convolutions",
}
ROUNDED = {"hardware": "", "cast": " by a cast", "forward": ", forward only"}
MEASURES = {"std": "standard deviation", "var": "variance", "": "standard deviations and variances"}
DIVISORS = {0: "n", 1: "n - 1"}
REDUCTIONS = {"amax": "largest value", "amin": "smallest value"}
NEIGHBOURS = {"end": "at the ends the end itself", "other_end": "at an end the other end"}
ROWS = {
    "first": "row 0 for every index",
    "next": "the row after that of each index",
    "previous": "the row before that of each index",
}
ENDS = {"rolled": "its end at its beginning", "zero": "with a 0 at its end"}
LEAD = {"left_out": "left out: ", "added": "added: ", "": ""}


def _and(names: Names, lead: str = "") -> str:
    """Join names; nothing for none.

    >>> _and(("a", "b"), " by "), _and((), " by ")
    (' by a and b', '')
    """
    return f"{lead}{' and '.join(names)}" if names else ""


def _number(number: float | str) -> str:
    return number if isinstance(number, str) else f"{number:.10g}"


def _argument(call: str, name: str, inner: bool, within: str) -> str:
    argument = f"{name} of {call}" if inner else f"{call}'s {name}"
    return f"{argument} within {within}" if within else argument


def _operand(operator: str, of: str, within: str, before: str) -> str:
    text = f"{OPERATORS[operator].format(of or 'a tensor')}{f' within {within}' if within else ''}"
    return f"before {before}, {text}" if before else text


def _instead(of: str, jax: float | str, torch: float | str) -> str:
    zeros = " (zeros)" if jax == "'constant'" else ""
    return f"{of} {_number(jax)}{zeros} instead of {_number(torch)}"


def _two_arguments(call: str, names: Names, jax: tuple[float, ...], torch: tuple[float, ...]) -> str:
    of_jax, of_torch = (_and((*map(_number, of),)) for of in (jax, torch))
    return f"{call}'s {_and(names)} {of_jax} instead of {of_torch}"


def _expressions(jax: str, torch: str, call: str, module: str, by: str) -> str:
    text = f"{jax} instead of {torch}" if jax != torch else f"{torch} with its values in another order"
    after = f", in {call}{f' of {module}' if module else ''}" if call else ""
    return f"{LEAD[by]}{text}{after}"


def _operations(jax: Names, torch: Names) -> str:
    of_jax, of_torch = (
        " then ".join(names[:MOST_OPERATIONS]) + " and more" * (len(names) > MOST_OPERATIONS) or "nothing"
        for names in (jax, torch)
    )
    return f"{of_jax} instead of {of_torch}"


def _entry_moved(entry: str, axis: int, by: int, end: str) -> str:
    return f"{entry} moved by one along axis {axis}, one too {'early' if by < 0 else 'late'}, {ENDS[end]}"


def _same_padding(kind: str, pads: tuple[int, ...]) -> str:
    return f"{LAYERS[kind]} padded 'SAME', {pads}" if kind else "layers padded 'SAME'"


def _neighbour(by: int, ends: str) -> str:
    return f"the index {'before' if by < 0 else 'after'}, {NEIGHBOURS[ends]}, instead of the index"


def _index_left_out(index: int, is_last: bool, axis: int) -> str:
    return f"values at index {index}{', the last,' if is_last else ''} of axis {axis} count as 0: they are left out"


def _reduction(of: str, axes: tuple[int, ...], elements: int, call: str, reduction: str) -> str:
    over = f"all elements ({elements} in number)"
    over = f"axis {axes[0]}, {over}," if axes else over
    return f"the {REDUCTIONS.get(reduction, reduction)} of {of} over {over} in place of the result of {call}"


def _batch_norm(updates: bool) -> str:
    kept = "though it updates them" if updates else "and leaves them as they are"
    return f"BatchNorm by its running statistics, as in evaluation, {kept}"


def _passes(at: str, on_line: bool) -> str:
    return f"the gradient is not stopped{' on its line' if on_line else ''} at {at}, though torch has no_grad"


def _exchanged(operands: Names, calls: Names) -> str:
    return f"{_and(tuple(name or 'another tensor' for name in operands))} exchanged between {_and(calls)}"


SENTENCES: Mapping[str, str | Callable[..., str]] = {
    # Names of tensors.
    "result": "the result of {call}",
    "operand_number": "operand {number}",
    "numbered_operand": lambda of, number: f"{of} (operand {number})".lstrip(),
    # Arguments of calls.
    "argument": _argument,
    "operand": _operand,
    "instead": _instead,
    "two_numbers": lambda each: ", and ".join(each),
    "two_arguments": _two_arguments,
    "other_axis": "{call} over axis {jax} instead of {torch}",
    "other_axes": "{call} over axes {jax} instead of {torch}",
    "normalized_axes": lambda jax, torch: (
        f"layer_norm over the axes {_and((*map(str, jax),))} instead of {_and((*map(str, torch),))}"
    ),
    "masked_scores": "the scores that attn_mask hides are",
    "without_argument": "{call} without {name}",
    "not_rescaled": "{call} without the division by 1 - p = {kept:.4g}",
    "other_function": lambda jax, torch, of: f"{jax} instead of {torch}{f' of {of}' if of else ''}",
    "other_operator": "{jax} by {number:.10g} instead of {torch}",
    # Elements.
    "neighbour": _neighbour,
    "index_left_out": _index_left_out,
    "other_index": "index {jax} instead of {torch}",
    "arange_start": "arange starts at {jax} instead of {torch}",
    "other_rows": lambda call, rows: f"{call} takes {ROWS[rows]}",
    "slices_shifted": lambda of, jax, torch: f"slices of {of or 'a tensor'} shifted by {jax} instead of {torch}",
    "entry_moved": _entry_moved,
    "other_values": "{entry} of the batch has other values",
    # Connections of calls.
    "shape_left_out": lambda call, of, jax, torch: (
        f"{call} left out{f' of {of}' if of else ''}: shape {jax} instead of {torch}"
    ),
    "call_left_out": lambda call, by, of: f"{call}{f' by {by}' if by else ''} left out{f' of {of}' if of else ''}",
    "flip_left_out": "flip left out: the direction backwards reads forwards",
    "operand_left_out": lambda operands, call, by: f"{_and(operands)} left out of {call}{f' by {by}' if by else ''}",
    "call_by": lambda call, by: f"{call}{_and(by, ' by ')}",
    "calls_left_out": lambda calls: f"{_and(calls)} left out",
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
    "call_moved": "{call} after {after} instead of before",
    "earlier_weights": "weights from before {before} are used, and not those after it",
    "other_operand": "{jax} in place of {torch} in {call}",
    "operands_exchanged": _exchanged,
    # Other expressions.
    "expressions": _expressions,
    "operations": _operations,
    "function_instead": "{function} of {of} in place of the result of {call}",
    "reduction_instead": _reduction,
    "other_divisor_of": lambda of, jax, torch: (
        f"{of or 'a tensor'} divided by {jax} instead of by {torch or 'a tensor'}"
    ),
    "power_before": lambda power, of, call: f"the {power} of {of or 'a tensor'} before {call}",
    # Gradients.
    "gradient_passes": lambda at: f"the gradient is not stopped{f' at {at}' if at else ''}",
    "gradient_passes_no_grad": _passes,
    "no_gradient": "no gradient reaches {of} in {call}",
    "gradient_factor": "the gradient of {of} in {call}, times",
    "gradient_lost": lambda name, call: (
        f"{name} gets no gradient from {'an attribute such as .T' if call == '__get__' else call}"
    ),
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
    "loss_term": lambda position: f"the {('first', 'second')[position]} term of a sum of losses times",
    "batch_norm_over_replicas": "BatchNorm over all replicas",
    "running_statistics": _batch_norm,
    "batch_statistics": "BatchNorm by the batch's statistics, as in training",
    "batch_norm_momentum": "BatchNorm momentum",
    "biased_variance": "BatchNorm keeps the biased variance",
    "chosen_term": "the {jax} of two values instead of the {torch}",
    "not_clamped": "values not clamped",
    "not_clamped_on": "values not clamped from {end}",
    "same_padding": _same_padding,
    "axes_merged": lambda order: f"axes {(*range(len(order)),)} merged in the order {order}",
    "axis_split": lambda order: f"an axis split into {(*range(len(order)),)} in the order {order}",
    "kernel_swapped": "kernel's axes {axes} swapped",
    "kernel_turned": "kernel turned round, axes {axes}",
    "inputs_rounded": lambda of, dtype, by: f"inputs of {PRODUCTS[of]} rounded to {dtype}{ROUNDED[by]}",
    "other_divisor": lambda of, jax, torch: f"{MEASURES[of]} with divisor {DIVISORS[jax]} instead of {DIVISORS[torch]}",
    "fast_variance": "{norm}'s variance as E[x^2] - E[x]^2, of means in float32",
    # Buffers, and the combination of micro-batches.
    "buffers_local": "each replica keeps its own buffers, the reference those of rank 0",
    "buffers_averaged": "the buffers are the mean over the replicas, the reference keeps rank 0's",
    "together": lambda each: _and(each),
    "loss_averaged": "the loss of every replica is the mean over the replicas",
}
