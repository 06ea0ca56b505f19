"""Rules of `names`, for jax arrays that do not correspond to one torch tensor in its layer's layout.

    names = {
        "blocks": "layers.{}",                        # an array (L, ...) holds torch's layers 0 .. L-1
        "qkv": fused("q", "k", "v"),                  # one jax layer holds the outputs of three torch layers
        "query": part("c_attn", 0, of=3),             # a jax layer is the first third of torch's outputs
        "user": part("table", 0, of=(6040, 3706)),    # a jax table is the first 6040 rows of torch's
        "cell.bias": summed("lstm.bias_ih_l0", "lstm.bias_hh_l0"),  # a cell with one bias, where torch has two
        "pos_embed": transposed("pos_embed", (1, 0, 2)),
        "Dense_0": flattened("fc1", (64, 7, 7)),      # torch flattens (C, H, W), jax (H, W, C)
    }

Rules only permute elements, so gradients, updates and moments convert like the weights; of a sum see
`jaxddp.parity.sums`. A name in a rule may contain "{}", too. Imports neither framework.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxddp.errors import InputError, shortened

NUMBER = "{}"  # placeholder for the number of a layer in a stack


@dataclass(frozen=True)
class Rule:
    """A torch layer, or several, whose arrays jax holds in another arrangement; its repr is its source text.

    Attributes:
        layers: torch's layers; jax's array holds the outputs of all of them, in this order.
        part: number of the part of the layer's outputs that jax's array holds, from 0; None: all outputs.
        of: number of equal parts, or the size of each.
        heads: number of heads H if fused outputs, or those that jax has a part of, are in the order (H, parts, D);
            None: (parts, outputs of each).
        axes: axes of torch's tensor in jax's order; None: the layout of torch's layer.
        image: shape (C, ...) of the image that torch flattens before the layer; jax flattens (..., C).
        summands: torch's vectors, or parts of them, whose sum jax's array is; (): it is no sum.
    """

    layers: tuple[str, ...]
    part: int | None = None
    of: int | tuple[int, ...] = 1
    heads: int | None = None
    axes: tuple[int, ...] | None = None
    image: tuple[int, ...] | None = None
    summands: tuple["Rule", ...] = ()

    def __repr__(self) -> str:
        if self.summands:
            summands = (quoted(x.layers[0]) if x.part is None else repr(x) for x in self.summands)
            return f"{summed.__name__}({', '.join(summands)})"
        names = ", ".join(map(quoted, self.layers))
        heads = "" if self.heads is None else f", heads={self.heads}"
        if self.axes is not None:
            return f"{transposed.__name__}({names}, {self.axes})"
        if self.image is not None:
            return f"{flattened.__name__}({names}, {self.image})"
        if self.part is not None:
            return f"{part.__name__}({names}, {self.part}, of={self.of}{heads})"
        return f"{fused.__name__}({names}{heads})"

    @property
    def depth(self) -> int:
        """Number of leading axes of jax's array that count the layers of a stack."""
        return self.layers[0].count(NUMBER)


Names = Mapping[str, str | Rule]


def fused(*layers: str, heads: int | None = None) -> Rule:
    """Map a jax layer to several torch layers; it concatenates their outputs, or their rows of embeddings.

    kernel = [k_1, ..., k_n] along the outputs, and the bias likewise; with `heads` H the outputs are in the order
    (H, n, D): for each head those of every layer.

    Args:
        layers: torch's layers.
        heads: number of heads H.

    Raises:
        InputError: there are fewer than two layers.

    >>> fused("q", "k", "v")
    fused("q", "k", "v")
    """
    rule = Rule(layers, heads=heads)
    if len(layers) < 2:
        raise InputError(f"names: {rule}: must name at least 2 layers")
    if len({layer.count(NUMBER) for layer in layers}) > 1:
        raise InputError(f"names: {rule}: all layers must have as many {NUMBER}")
    return _with_heads(rule)


def part(layer: str, index: int, of: int | tuple[int, ...], heads: int | None = None) -> Rule:
    """Map a jax layer to a part of a torch layer's outputs, or a jax table to a part of an embedding's rows.

    Args:
        layer: torch's layer.
        index: number of the part, from 0.
        of: number n of equal parts, or the size of each part.
        heads: number of heads H if torch's outputs are in the order (H, n, D).

    Raises:
        InputError: the part does not exist.

    >>> part("c_attn", 2, of=3)
    part("c_attn", 2, of=3)
    """
    sizes = of if isinstance(of, int) else tuple(of)
    rule = Rule((layer,), index, sizes, heads)
    number = sizes if isinstance(sizes, int) else len(sizes)
    if number < 2:
        raise InputError(f"names: {rule}: of must be at least 2 parts")
    if not 0 <= index < number:
        raise InputError(f"names: {rule}: must be one of the parts 0 to {number - 1}")
    if heads is not None and not isinstance(sizes, int):
        raise InputError(f"names: {rule}: heads needs equal parts, of={number}")
    return _with_heads(rule)


def summed(*names: str | Rule) -> Rule:
    """Map a jax vector to the sum of torch's, such as a cell's only bias to the two of torch's LSTM.

    Args:
        names: torch's vectors, or parts; the first is the longest, and shorter ones are added to its first elements.

    Raises:
        InputError: there are fewer than two, or another rule among them.

    >>> summed("gru.bias_ih_l0", part("gru.bias_hh_l0", 0, of=(8, 4)))
    summed("gru.bias_ih_l0", part("gru.bias_hh_l0", 0, of=(8, 4)))
    """
    summands = tuple(x if isinstance(x, Rule) else Rule((x,)) for x in names)
    rule = Rule(tuple(x.layers[0] for x in summands), summands=summands)
    if len(names) < 2 or any(x.layers[1:] or x.axes or x.image for x in summands):
        raise InputError(f"names: {rule}: must be at least 2 names, or parts")
    return rule


def transposed(name: str, axes: tuple[int, ...]) -> Rule:
    """Map a jax array to a torch tensor whose axes are in another order: jax = transpose(torch, axes).

    Args:
        name: torch's tensor; or a layer, whose arrays with as many axes are transposed.
        axes: axes of torch's tensor in jax's order.

    Raises:
        InputError: `axes` is not a permutation.

    >>> transposed("pos_embed", (1, 0, 2))
    transposed("pos_embed", (1, 0, 2))
    """
    rule = Rule((name,), axes=tuple(axes))
    if sorted(axes) != list(range(len(axes))):
        raise InputError(f"names: {rule}: axes must be a permutation of 0 to {len(axes) - 1}")
    return rule


def flattened(layer: str, shape: tuple[int, ...]) -> Rule:
    """Map a jax layer to a torch layer that follows a flattened image: torch flattens (C, H, W), jax (H, W, C).

    Args:
        layer: torch's Linear, or a norm before it.
        shape: shape (C, H, W) of the image in torch; any number of spatial axes.

    Raises:
        InputError: `shape` has fewer than 2 axes.

    >>> flattened("fc1", (64, 7, 7))
    flattened("fc1", (64, 7, 7))
    """
    rule = Rule((layer,), image=tuple(shape))
    if len(shape) < 2 or not all(isinstance(size, int) and size > 0 for size in shape):
        raise InputError(f"names: {rule}: must be the shape of an image in torch, channels first")
    return rule


RULES = (fused, part, summed, transposed, flattened)


def _with_heads(rule: Rule) -> Rule:
    if rule.heads is not None and rule.heads < 1:
        raise InputError(f"names: {rule}: heads must be at least 1")
    return rule


def quoted(word: str) -> str:
    """Return a string literal in double quotes.

    >>> print(quoted("fc1"))
    "fc1"
    """
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def source(value: str | Rule) -> str:
    """Return the source text of a value of `names`; a rule's text stays as it is.

    >>> print(source("fc1"), source(fused("q", "k")), source('fused("q", "k")'))
    "fc1" fused("q", "k") fused("q", "k")
    """
    return quoted(value) if isinstance(value, str) and not rules_in([value]) else str(value)


def rules_in(values: Iterable[str | Rule]) -> list[str]:
    """Return the names of the functions that make these rules or texts of rules; ignore names of layers."""
    known = {rule.__name__ for rule in RULES}
    calls = (re.findall(r"(\w+)\(", re.sub(r'"(\\.|[^"\\])*"', "", str(value))) for value in values)
    return sorted({name for of_value in calls for name in of_value} & known)


def check_names(names: Names) -> None:
    """Check that `names` maps strings to strings or rules.

    Raises:
        InputError: a value is neither, or `names` is not a dictionary.
    """
    if not isinstance(names, Mapping):
        raise InputError(f"names: must be a dictionary, and is {type(names).__name__}")
    for jax, torch in names.items():
        if not isinstance(jax, str) or not isinstance(torch, str | Rule):
            known = ", ".join(rule.__name__ for rule in RULES)
            raise InputError(f"names: {jax!r}: must be a name in torch, or {known}; is {shortened(repr(torch))}")
