"""Functions of torch that are one call and compute many, opened: their inner calls can be read and edited, too.

The inner calls of a recurrent layer have the same site at every time step, so that an edit applies to all of them.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from jaxddp.parity.torch_side.draws import numbers_of_draw

ATTENTION = "multi_head_attention_forward"
GATES = {"lstm": 4, "gru": 3}  # in each of the weights
MOST_STEPS = 128  # time steps of all layers and directions of a call that is opened; each is about 15 calls


class Make(Protocol):
    """Function that makes an inner call."""

    def __call__(self, part: str, function: Callable[..., Any], /, *args: Any) -> Any:
        """Call the function, and return its result; `part`: what it computes, in words."""


Weights = Sequence[Tensor | None]  # of a cell: of the input, of the state, and their biases
State = tuple[Tensor, ...]  # of a cell: what it returns, and what else it keeps
Cell = Callable[[Make, Tensor, State, Weights], State]


def opened_attention(function: Any) -> Callable[..., Any]:
    """Return the function without its check for overrides, so that its inner calls are intercepted, too."""
    names = function.__globals__ | {"has_torch_function": lambda arguments: False}
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def cells_of(name: str, args: Sequence[Any]) -> int:
    """Return the number of cells of a recurrent layer, one for each layer and direction.

    Args:
        name, args: function of torch and its arguments.

    Returns:
        0 for any other function, and for a layer that cannot be opened: of packed sequences, with projections, of too
        many time steps.
    """
    if name.removesuffix("_cell") not in CELLS:
        return 0
    if name.endswith("_cell"):
        return 1
    if len(args) != 9 or not isinstance(args[3], bool):
        return 0
    x, _, weights, has_biases, layers, _, _, bidirectional, batch_first = args
    count = layers * (2 if bidirectional else 1)
    steps = x.shape[1 if batch_first else 0]
    return count if len(weights) == count * (4 if has_biases else 2) and steps * count <= MOST_STEPS else 0


def run_recurrent(name: str, args: Sequence[Any], make: Callable[..., Any]) -> Any:
    """Return what torch's recurrent layer returns, computed by the calls that it consists of.

    Source: the equations of torch.nn.LSTM, GRU and RNN.

    Args:
        name, args: the function, for which `cells_of` is not 0, and its arguments.
        make: as `Make`, with the number of the cell before all other arguments.
    """
    cell = CELLS[name.removesuffix("_cell")]
    if name.endswith("_cell"):
        x, state, *weights = args
        last = cell(partial(make, 0), x, _tuple(state), (*weights, None, None)[:4])
        return last if isinstance(state, tuple | list) else last[0]
    x, states, weights, has_biases, layers, rate, training, bidirectional, batch_first = args
    outer, kept = partial(make, 0), 4 if has_biases else 2
    x = outer("the input", torch.transpose, x, 0, 1) if batch_first else x
    ends: list[State] = []
    for layer in range(layers):
        outputs = []
        for reverse in (False, True)[: 2 if bidirectional else 1]:
            number = len(ends)
            at = partial(make, number)
            start = tuple(at("the state", torch.select, one, 0, number) for one in _tuple(states))
            of_cell = (*weights[kept * number : kept * (number + 1)], None, None)[:4]
            output, end = _over_time(cell, at, x, start, of_cell, reverse)
            outputs.append(output)
            ends.append(end)
        x = partial(make, 2 * layer)("both directions", torch.cat, outputs, -1) if bidirectional else outputs[0]
        if rate and training and layer < layers - 1:
            numbers = numbers_of_dropout(x, rate)
            x = partial(make, layer)("the layer's outputs", dropout, x, rate, True, False, numbers)
    x = outer("the outputs", torch.transpose, x, 0, 1) if batch_first else x
    return x, *(outer("the last states", torch.stack, list(of_all)) for of_all in zip(*ends, strict=True))


def _over_time(
    cell: Cell, make: Make, x: Tensor, state: State, weights: Weights, reverse: bool
) -> tuple[Tensor, State]:
    """Return the outputs of a cell over a sequence (T, ...), and its last state."""
    x = make("the sequence that is read backwards", torch.flip, x, (0,)) if reverse else x
    outputs = []
    for one in make("the sequence", torch.unbind, x, 0):
        state = cell(make, one, state, weights)
        outputs.append(state[0])
    output = make("the outputs", torch.stack, outputs, 0)
    return make("the outputs of the direction backwards", torch.flip, output, (0,)) if reverse else output, state


def _lstm(make: Make, x: Tensor, state: State, weights: Weights) -> State:
    h, c = state
    w_x, w_h, b_x, b_h = weights
    of_input, of_state = make("the input", F.linear, x, w_x, b_x), make("the state", F.linear, h, w_h, b_h)
    i, f, g, o = make("the gates", torch.chunk, make("the gates", torch.add, of_input, of_state), 4, -1)
    kept = make("the forget gate and the cell state", torch.mul, make("the forget gate", torch.sigmoid, f), c)
    i, g = make("the input gate", torch.sigmoid, i), make("the candidate", torch.tanh, g)
    c = make("the cell state", torch.add, kept, make("the input gate and the candidate", torch.mul, i, g))
    o, shown = make("the output gate", torch.sigmoid, o), make("the cell state", torch.tanh, c)
    return make("the output gate and the cell state", torch.mul, o, shown), c


def _gru(make: Make, x: Tensor, state: State, weights: Weights) -> State:
    (h,) = state
    w_x, w_h, b_x, b_h = weights
    assert w_h is not None, "a cell has weights"
    biases = (None,) * 3 if b_h is None else make("the state's biases", torch.chunk, b_h, 3)
    weights_of_state = make("the state's weights", torch.chunk, w_h, 3)
    r_x, z_x, n_x = make("the input", torch.chunk, make("the input", F.linear, x, w_x, b_x), 3, -1)
    r_h, z_h, n_h = (
        make(f"the state in the {gate}", F.linear, h, weight, bias)  # apart, since calls of the candidate may be moved
        for gate, weight, bias in zip(("reset gate", "update gate", "candidate"), weights_of_state, biases, strict=True)
    )
    r = make("the reset gate", torch.sigmoid, make("the reset gate", torch.add, r_x, r_h))
    z = make("the update gate", torch.sigmoid, make("the update gate", torch.add, z_x, z_h))
    of_state = make("the reset gate and the state", torch.mul, r, n_h)
    n = make("the candidate", torch.tanh, make("the candidate", torch.add, n_x, of_state))
    new = make("the update gate and the candidate", torch.mul, make("the update gate", torch.rsub, z, 1), n)
    return (make("the new state", torch.add, new, make("the update gate and the old state", torch.mul, z, h)),)


def _rnn(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(make: Make, x: Tensor, state: State, weights: Weights) -> State:
        w_x, w_h, b_x, b_h = weights
        of_input, of_state = make("the input", F.linear, x, w_x, b_x), make("the state", F.linear, *state, w_h, b_h)
        return (make("the new state", activation, make("the new state", torch.add, of_input, of_state)),)

    return cell


def _tuple(state: Any) -> State:
    return tuple(state) if isinstance(state, tuple | list) else (state,)


CELLS: dict[str, Cell] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn(torch.tanh), "rnn_relu": _rnn(torch.relu)}


def opened_product_attention(
    make: Make,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return scaled_dot_product_attention, computed by the calls that it consists of."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key = make("the keys", torch.repeat_interleave, key, groups, -3)
        value = make("the values", torch.repeat_interleave, value, groups, -3)
    scores = make("the scores", torch.matmul, query, make("the keys", torch.transpose, key, -2, -1))
    scores = make("the scores", torch.mul, scores, 1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = make("the mask", torch.logical_not, attn_mask)
        scores = make("the scores", torch.masked_fill, scores, hidden, -math.inf)
    elif attn_mask is not None:
        scores = make("the scores", torch.add, scores, attn_mask)
    weights = make("the scores", torch.softmax, scores, -1)
    if dropout_p:
        weights = make("the weights", dropout, weights, dropout_p, True, False, numbers_of_dropout(weights, dropout_p))
    return make("the values", torch.matmul, weights, value)


def dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, numbers: Tensor | None = None
) -> Tensor:
    """Return dropout with a mask of given uniform numbers in (0, 1), those below 1 - p; None: torch draws the mask."""
    if numbers is None or not (training and 0 < p < 1):
        return F.dropout(input, p, training, inplace)
    mask = (numbers < 1 - p).to(input.dtype) / (1 - p)
    return input.mul_(mask) if inplace else input * mask


def numbers_of_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
    """Return the numbers that the next call of dropout would draw; None: it draws none, or torch draws them."""
    return numbers_of_draw("bernoulli", input.shape) if training and 0 < p < 1 else None


OPENED: dict[str, Callable[..., Tensor]] = {"scaled_dot_product_attention": opened_product_attention}
