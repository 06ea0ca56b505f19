"""Match of a jax model's arrays with a torch module's tensors, under a table `names`."""

import itertools
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from torch import nn

from jaxddp.errors import InputError, listed
from jaxddp.parity.convert.entries import NoTwinError, RuleError
from jaxddp.parity.convert.layer_pairs import BIASES
from jaxddp.parity.convert.layouts import Shapes, word_for_outputs
from jaxddp.parity.convert.outputs import runs
from jaxddp.parity.convert.pieces import Piece, Pieces
from jaxddp.parity.port.rules import NUMBER, Names, Rule, source
from jaxddp.parity.records import COUNTER


class Match(NamedTuple):
    """The arrays that map, and those that do not.

    Attributes:
        pieces: each jax array, or part of one, paired with the torch tensor that holds the same values.
        unmapped: jax arrays without a twin -> a line that says so.
        lacking: torch tensors without a twin, or with one for some of their outputs -> a line that says so.
    """

    pieces: list[Piece]
    unmapped: dict[str, str]
    lacking: dict[str, str]


class Models:
    """Names and shapes of two models' arrays; see `Converter` for the arguments.

    Attributes:
        shapes, tensors: shapes of jax's arrays and of torch's tensors.
        modules: torch's modules by name.
        tied: further names of tied torch parameters to their first name.

    Raises:
        InputError: `no_twin` names a torch parameter, or nothing.
    """

    def __init__(
        self, module: nn.Module, shapes: Shapes, transpose_kernel: Collection[str] = (), no_twin: Collection[str] = ()
    ):
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.tensors = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        self.modules: Mapping[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
        self.tied = tied_names(module)
        self._transpose_kernel, self._no_twin = transpose_kernel, no_twin
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name in no_twin:
            if name in parameters:
                raise InputError(f"no_twin: torch's {name} is a parameter; must be a constant")
            if name not in self.tensors and name not in self.shapes:
                raise InputError(f"no_twin: {name} is in neither model")

    def match(self, names: Names) -> Match:
        """Match the arrays.

        Raises:
            RuleError: a rule does not fit the two models.
        """
        self._check_keys(names)
        search = Pieces(self.modules, self.tensors, names, self._transpose_kernel)
        of_arrays: dict[str, list[Piece]] = {}
        unmapped: dict[str, str] = {}
        for jax, shape in self.shapes.items():
            if jax in self._no_twin:
                continue
            try:
                of_arrays[jax] = search.of(jax, shape)
            except NoTwinError as error:
                unmapped[jax] = str(error)
        for jax, found in of_arrays.items():  # now that all shapes have shown the orders of their axes
            if any(piece.order for piece in found):
                of_arrays[jax] = search.of(jax, self.shapes[jax])
        pieces = [*itertools.chain.from_iterable(of_arrays.values())]
        lacking = self._lacking(pieces)
        layers = {tuple(name.rpartition(".")[0] or name for name in (piece.jax, piece.torch)) for piece in pieces}
        unmapped = {name: says + _remedy(name, layers, 0, self.tensors) for name, says in unmapped.items()}
        return Match(pieces, unmapped, {n: says + _remedy(n, layers, 1, self.shapes) for n, says in lacking.items()})

    def fits(self, names: Names, constants: Collection[str], lines: Names) -> bool:
        """Return whether these further lines give each array a twin, but for constants of either side."""
        try:
            match = self.match({**names, **lines})
        except RuleError:
            return False
        return {*match.unmapped, *match.lacking} <= {*constants}

    def _check_keys(self, names: Names) -> None:
        """Raise if a rule, or a stack, is about no array of the jax model."""
        for key, value in names.items():
            is_rule = isinstance(value, Rule) or NUMBER in value
            if is_rule and not any(jax == key or jax.startswith(f"{key}.") for jax in self.shapes):
                raise RuleError(f'names: "{key}": {source(value)}: jax has no {key}')

    def _lacking(self, pieces: list[Piece]) -> dict[str, str]:
        complete = {self.tied.get(piece.torch, piece.torch) for piece in pieces if not piece.torch_outputs}
        left: dict[str, np.ndarray] = {}
        for piece in pieces:
            if piece.torch_outputs:
                size = self.tensors[piece.torch][len(piece.torch_outputs) - 1]
                first = self.tied.get(piece.torch, piece.torch)
                left.setdefault(first, np.ones(size, bool))[piece.torch_outputs[-1]] = False
        lacking = {}
        for name, shape in self.tensors.items():
            first = self.tied.get(name, name)
            if first in complete or name.rpartition(".")[2] == COUNTER or name in self._no_twin:
                continue
            outputs = np.flatnonzero(left[first]) if first in left else None
            if outputs is None or len(outputs):
                word = word_for_outputs(self.modules.get(name.rpartition(".")[0]))
                of_outputs = "" if outputs is None else f" for its {word} {runs(outputs)}"
                lacking[name] = f"torch's {name} {shape} has no twin in jax{of_outputs}"
        return lacking


def _remedy(name: str, layers: Collection[tuple[str, ...]], side: int, others: Shapes) -> str:
    """Return what to do about a bias that only one side has; "" if it is none, or its layer has no twin without one.

    >>> print(_remedy("fc.bias", [("Dense_0", "fc")], 1, {"Dense_0.kernel": (2, 3)}))
    : give jax's Dense_0 a bias (use_bias=True), or torch's fc none (bias=False)
    """
    layer, _, leaf = name.rpartition(".")
    twins = sorted({pair[1 - side] for pair in layers if pair[side] == layer})
    if leaf not in BIASES or not twins or any(f"{twin}.{bias}" in others for twin in twins for bias in BIASES):
        return ""
    (own, switch), (other, its) = (("jax", "use_bias"), ("torch", "bias"))[:: 1 - 2 * side]
    return f": give {other}'s {listed(twins, joint=', ')} a bias ({its}=True), or {own}'s {layer} none ({switch}=False)"


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of parameters that have several, each with the first name.

    >>> twice = nn.Linear(1, 1, bias=False)
    >>> tied_names(nn.Sequential(twice, twice))
    {'1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return tied
