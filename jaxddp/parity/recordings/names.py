"""Pair the arrays of a JAX recording with the tensors of a torch recording."""

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from jaxddp.errors import InputError, described, reason
from jaxddp.parity.convert import Converter, NamesError
from jaxddp.parity.convert.converter import tied_names
from jaxddp.parity.convert.layouts import CONVOLUTIONS, transposition
from jaxddp.parity.port.names_block import NAME
from jaxddp.parity.port.rules import RULES, Names, Rule, check_names, flattened, transposed
from jaxddp.parity.recordings.run import Recording
from jaxddp.parity.records import Tensors

Table = dict[str, str | Rule]

SAME = 1e-6  # relative difference of norms of one tensor on both sides; measured: up to 2e-8 in float32
MOST_FACTORS = 200  # pairs (height, width) of a flattened image that are tried


@dataclass(frozen=True)
class Twins:
    """Pairing of the arrays of a JAX recording with the tensors of a torch recording.

    Attributes:
        converter: converts arrays; None: the arrays do not pair off.
        names: the table that was found or given.
        by_order: groups of JAX's layers that neither names nor values distinguish: their order pairs them.
        left_out: constants of either side without a twin.
        problem: why the arrays do not pair off; "": they do.
    """

    converter: Converter | None
    names: Table = field(default_factory=dict)
    by_order: Sequence[tuple[str, ...]] = ()
    left_out: tuple[str, ...] = ()
    problem: str = ""


def find_twins(torch_run: Recording, jax_run: Recording, names: Names | None = None) -> Twins:
    """Pair the arrays by `names`, else by names and shapes and, if these leave several ways, by their first values.

    Args:
        torch_run, jax_run: recordings.
        names: lines of a program's table; None: none are given.
    """
    model, given = _Models(torch_run, jax_run), dict(names or {})
    twins = _proposed(model, given, ()) or _proposed(model, given, model.constants(given))
    return Twins(None, given, problem=model.problem(given)) if twins is None else _by_layout(model, twins)


def read_names(path: Path) -> Table:
    """Read a table from a file: `names = {...}` of a program, which is not executed, or only the braces.

    Raises:
        InputError: the file has no such table.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "names.py").write_text('names = {"Dense_0": flattened("fc1", (8, 4, 4))}')
    ...     read_names(Path(folder, "names.py"))
    {'Dense_0': flattened("fc1", (8, 4, 4))}
    """
    try:
        body = ast.parse(path.read_text("utf-8")).body
        values = [node.value for node in body if isinstance(node, ast.Assign) and _is_names(node)]
        values += [node.value for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Dict)]
        table = _evaluated(values[0])
    except (SyntaxError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise InputError(f"--names {path}: must have a table {NAME} = {{...}}: {reason(error)}") from None
    check_names(table)
    return dict(table)


def _is_names(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == NAME for target in node.targets)


def _evaluated(node: ast.expr) -> Any:
    """Evaluate a literal that may call rules, and nothing else."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {ast.literal_eval(key): _evaluated(value) for key, value in pairs if key is not None}
    if isinstance(node, ast.Call):
        rules = {rule.__name__: rule for rule in RULES}
        make = rules.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if make is None:
            raise ValueError(f"calls {ast.unparse(node.func)}")
        options = {one.arg: ast.literal_eval(one.value) for one in node.keywords if one.arg is not None}
        return make(*map(_evaluated, node.args), **options)
    return ast.literal_eval(node)


class _Models:
    """Both models as far as the recordings describe them."""

    def __init__(self, torch_run: Recording, jax_run: Recording):
        try:
            self.module = _rebuilt(torch_run)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            says = described(error, most=100)
            raise InputError(f"{torch_run.folder}: the description of its model is damaged: {says}") from None
        self.tensors, self.shapes = torch_run.shapes, jax_run.shapes
        self._buffers = {*torch_run.of_kind("buffer")}, {*jax_run.of_kind("buffer")}
        firsts = [next(iter(run.steps.values())) for run in (torch_run, jax_run)]
        self._start: list[Tensors] = [{**first["params"], **first["buffers"]} for first in firsts]

    def converter(self, table: Names, constants: Sequence[str] = ()) -> Converter | NamesError:
        """Return the converter by a table, or why the table does not pair off all arrays."""
        try:
            return Converter(self.module, self.shapes, table, no_twin=constants)
        except NamesError as error:
            return error

    def problem(self, table: Names) -> str:
        """Describe the arrays without a twin."""
        refused = self.converter(table)
        return refused.why if isinstance(refused, NamesError) else ""

    def constants(self, table: Names) -> tuple[str, ...]:
        """Return the buffers of either side that have no twin by this table."""
        refused = self.converter(table)
        if not isinstance(refused, NamesError):
            return ()
        unpaired = (refused.unpaired.torch, refused.unpaired.jax)
        return tuple(name for names, own in zip(unpaired, self._buffers, strict=True) for name in names if name in own)

    def values(self, side: int, layer: str) -> list[tuple[int, float]]:
        """Return size and norm of each array of a layer at the first step, whatever their names and layouts."""
        of_layer = {n: x for n, x in self._start[side].items() if n == layer or n.startswith(f"{layer}.")}
        return sorted((x.size, float(np.linalg.norm(x.astype(float)))) for x in of_layer.values())

    def distance(self, converter: Converter, layer: str) -> float:
        """Return how far a layer's small arrays are from torch's at the first step, relative to torch's."""
        arrays = {n: x for n, x in self._start[1].items() if n.startswith(f"{layer}.") and x.shape == self.shapes[n]}
        pairs = [(x, self._start[0].get(n)) for n, x in converter.to_torch(arrays).items()]
        known = [(x, y) for x, y in pairs if y is not None and x.shape == y.shape]
        scale = math.hypot(*(float(np.linalg.norm(y)) for _, y in known))
        return math.hypot(*(float(np.linalg.norm(x - y)) for x, y in known)) / (scale or 1.0)


def _proposed(model: _Models, given: Table, constants: tuple[str, ...]) -> Twins | None:
    """Return the pairing that names, shapes and order propose; values decide between doubtful layers."""
    made = model.converter(given, constants)
    if isinstance(made, Converter):
        return Twins(made, given, left_out=constants)
    proposal = made.propose(constants=constants)
    if not proposal.is_complete or given.keys() & proposal.lines.keys():  # a line that is given counts
        return None
    lines: Table = {**given, **proposal.lines}
    by_order: list[tuple[str, ...]] = []
    for group in proposal.by_order:
        found = _by_values(model, group, lines)
        lines |= found
        if not found:
            by_order.append(tuple(group))
    made = model.converter(lines, constants)
    return Twins(made, lines, by_order, constants) if isinstance(made, Converter) else None


def _by_values(model: _Models, group: Sequence[str], lines: Table) -> Table:
    """Pair off the layers of a group by the norms of their arrays; {} unless each has exactly one counterpart."""
    others = [str(lines[layer]) for layer in group if isinstance(lines.get(layer), str)]
    found: Table = {}
    for layer in group:
        mine = model.values(1, layer)
        alike = [other for other in others if _are_close(mine, model.values(0, other))]
        if len(alike) != 1:
            return {}
        found[layer] = alike[0]
    return found if len({*found.values()}) == len(group) else {}


def _are_close(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> bool:
    return len(one) == len(other) and all(
        a == b and math.isclose(x, y, rel_tol=SAME) for (a, x), (b, y) in zip(one, other, strict=True)
    )


def _by_layout(model: _Models, twins: Twins) -> Twins:
    """Try other layouts of the layers whose arrays have torch's norms and other values."""
    assert twins.converter is not None, "checked by find_twins"
    for piece in [one for one in twins.converter.pieces if one.is_entire and len(one.torch_shape) == 2]:
        layer, other = piece.jax.rpartition(".")[0], piece.torch.rpartition(".")[0]
        one, two = model.values(1, layer), model.values(0, other)
        if not one or not _are_close(one, two) or model.distance(twins.converter, layer) <= SAME:
            continue
        for rule in _other_layouts(model, piece.torch, piece.torch_shape):
            table = {**twins.names, layer: rule}
            converter = model.converter(table, twins.left_out)
            if isinstance(converter, Converter) and model.distance(converter, layer) <= SAME:
                twins = Twins(converter, table, twins.by_order, twins.left_out)
                break
    return twins


def _other_layouts(model: _Models, tensor: str, shape: tuple[int, ...]) -> Iterator[Rule]:
    """Yield the rules that may be right for a matrix: transposed, or after a flattened image of some shape."""
    layer = tensor.rpartition(".")[0]
    if shape[0] == shape[1]:
        yield transposed(layer, transposition((0, 1)).axes)
        yield transposed(layer, transposition((1, 0)).axes)
    channels = {one.out_channels for one in model.module.modules() if isinstance(one, CONVOLUTIONS)}
    for count in sorted(count for count in channels if shape[1] % count == 0 and shape[1] > count):
        area = shape[1] // count
        heights = [height for height in range(1, area + 1) if area % height == 0][:MOST_FACTORS]
        for height in sorted(heights, key=lambda h: abs(h - math.sqrt(area))):
            yield flattened(layer, (count, height, area // height))


def _rebuilt(run: Recording) -> nn.Module:
    """Return a module with the classes, sizes and shapes of the recorded one; its tensors have no values."""
    modules: Mapping[str, tuple[str, Mapping[str, int]]] = run.header["modules"]
    root = nn.Module()
    made: dict[str, nn.Module] = {"": root}
    for name, (kind, sizes) in sorted(modules.items(), key=lambda item: item[0].count(".") + bool(item[0])):
        made[name] = _shell(kind, sizes)
        if name:
            parent, _, leaf = name.rpartition(".")
            made[parent].register_module(leaf, made[name])
    tied: Mapping[str, str] = run.header["tied"]
    shared: dict[str, nn.Parameter] = {}
    for name, (shape, _, kind) in run.header["tensors"].items():
        parent, _, leaf = name.rpartition(".")
        owner, empty = made.get(parent, root), torch.empty(shape, device="meta")
        if kind == "parameter":
            first = tied.get(name, name)
            owner.register_parameter(leaf, shared.setdefault(first, nn.Parameter(empty, requires_grad=False)))
        else:
            owner.register_buffer(leaf, empty)
    if tied_names(made[""]).keys() != tied.keys():
        raise ValueError("tied parameters")
    return made[""]


def _shell(kind: str, sizes: Mapping[str, int]) -> nn.Module:
    """Return a module of a class of torch.nn without its tensors: only its class and its sizes matter."""
    made = type("Conv1D", (nn.Module,), {}) if kind == "Conv1D" else getattr(nn, kind, nn.Module)
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        made = nn.Module
    shell: nn.Module = made.__new__(made)
    nn.Module.__init__(shell)
    vars(shell).update({name: size for name, size in sizes.items() if name.isidentifier()})
    return shell
