"""Edit the layers of a port's JAX side so that they draw their weights like torch, and verify it by draws."""

import ast
import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxddp.errors import count
from jaxddp.parity.cases import PortCase
from jaxddp.parity.compare.initialisation import differences
from jaxddp.parity.compare.initialisers import BIAS, described, fitting_initialiser
from jaxddp.parity.initialisation import InitialWeights, initial_weights
from jaxddp.parity.operations import SourceLine
from jaxddp.parity.patch.edited_files import EditedFiles
from jaxddp.parity.patch.edits import with_option
from jaxddp.parity.patch.optimizers import imports
from jaxddp.parity.runs import Runs
from jaxddp.parity.user_code.file_text import FileText, calls, last_name

ARGUMENTS = {name: f"{name}_init" for name in ("kernel", "bias", "scale", "embedding")}
LAYERS = (
    *("Linear", "LinearGeneral", "Einsum", "Conv", "ConvTranspose", "Embed", "Dense", "DenseGeneral"),
    *("LayerNorm", "BatchNorm", "RMSNorm", "GroupNorm", "InstanceNorm"),
)
UNIFORM = "lambda *given: jax.random.uniform(*given, -{0}**-0.5, {0}**-0.5)"
OF_JAX = "jax.nn"


class Initialiser(NamedTuple):
    """An initialiser with which a layer would draw a tensor like torch.

    Attributes:
        tensor: its name in torch.
        jax: its name in jax.
        line: the line that makes it.
        code: the initialiser, without its module.
    """

    tensor: str
    jax: str
    line: SourceLine
    code: str

    @property
    def argument(self) -> str:
        """Name the layer's argument that takes the initialiser."""
        return ARGUMENTS[self.jax.rpartition(".")[2]]


def with_initialisers(runs: Runs, files: EditedFiles) -> str:
    """Edit the files of a port whose tensors are initialised otherwise; return a sentence on it, "" without an edit.

    Edits stay if the tensors then start as in torch, and no other one starts otherwise.
    """
    case = runs.case
    assert isinstance(case, PortCase), "only files are patched"
    before = initial_weights(runs, case, files.texts)
    if isinstance(before, str) or runs.types is None:
        return ""
    differing = _differing(before)
    wanted = [*_fitting(before, differing, runs)]
    while wanted:
        texts = {**files.texts, **dict(_edited(files, wanted))}
        after = initial_weights(runs, case, texts)
        if isinstance(after, str):  # the file may import jax elsewhere than a lambda needs it
            wanted = [one for one in wanted if not one.code.startswith("lambda")][: len(wanted) - 1]
            continue
        left = _differing(after)
        kept = [one for one in wanted if one.tensor not in left]
        if kept == wanted and left <= differing:
            files.texts = texts
            of_all = count(len(differing), "tensor")
            return f"With the patch, {len(differing - left)} of {of_all} start as in torch, which draws have shown."
        wanted = kept if len(kept) < len(wanted) else []
    return ""


def _differing(weights: InitialWeights) -> set[str]:
    return {difference.tensor for difference in differences(*weights)}


def _fitting(weights: InitialWeights, differing: set[str], runs: Runs) -> Iterator[Initialiser]:
    """Yield the initialisers of differing tensors that one argument of a known line gives."""
    assert runs.types is not None
    of_jax = runs.types[1]
    twins, held = dict(of_jax.twins), of_jax.of.get("parameters", {})
    for tensor in weights.jax:
        name = twins.get(tensor, "")
        known = tensor in differing and name in held and name.rpartition(".")[2] in ARGUMENTS
        line, code = held[name].line if known else None, ""
        if line is not None:
            side = described("torch", tensor, weights.torch)
            code = fitting_initialiser(side, weights.torch[tensor], weights.jax[tensor])
            if side.family == BIAS:
                layer = weights.torch[f"{tensor.removesuffix('bias')}weight"]
                code = UNIFORM.format(math.prod(layer.shape[1:]))
        if code and line is not None:
            yield Initialiser(tensor, name, line, code)


def _edited(files: EditedFiles, wanted: Sequence[Initialiser]) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file with the arguments added."""
    paths = {os.path.realpath(one.line.path): one.line.path for one in wanted if files.has(one.line.path)}
    for path, given in paths.items():
        of_file = [one for one in wanted if one.line.path == given]
        if (text := files.text(path, files.texts)) is None:
            continue
        lines = {one.line.number: files.line(one.line.number, path, text) for one in of_file}
        for argument in ARGUMENTS.values():
            source = FileText(text)
            pairs = [pair for number in sorted(lines) for pair in _pairs(source, lines, number, argument, of_file)]
            made = [(call, with_option(source, call, argument, code)) for call, code in pairs]
            text = source.edited(*made, *imports(source, " ".join(code for _, code in pairs)))
        if text != files.text(path, files.texts):
            yield path, text


def _pairs(
    source: FileText, lines: dict[int, int], number: int, argument: str, wanted: Sequence[Initialiser]
) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls of layers at a line with the initialiser of each, if it is clear which is whose."""
    of_line = [one for one in wanted if one.line.number == number and one.argument == argument]
    statement = source.at(lines[number])
    layers = [
        call
        for call in (calls(statement) if statement is not None else ())
        if last_name(call.func) in LAYERS and call.lineno <= lines[number] <= (call.end_lineno or call.lineno)
    ]
    codes = [one.code for one in of_line]
    if len(set(codes)) == 1:
        codes = codes[:1] * len(layers)
    if len(codes) == len(layers):
        yield from ((call, _in_module(source, call, code)) for call, code in zip(layers, codes, strict=True))


def _in_module(source: FileText, call: ast.Call, code: str) -> str:
    """Return an initialiser's code with its module: that of the layer, or jax's."""
    if code.startswith("lambda"):
        return code
    module = source.segment(call.func.value) if isinstance(call.func, ast.Attribute) else OF_JAX
    return f"{module}.initializers.{code}"
