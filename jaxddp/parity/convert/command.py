"""jaxddp convert PROGRAM.py WEIGHTS.safetensors OUT.safetensors"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
from tyro.conf import Positional, arg

from jaxddp import cli
from jaxddp.cli.flags import parse_known, parse_plain
from jaxddp.errors import InputError, check_name, on_one_line
from jaxddp.files import check_files
from jaxddp.parity.port import errors_located, load_port
from jaxddp.parity.port.loading import check_flags_of_port

PROG = "jaxddp convert"


@dataclass(frozen=True)
class ConvertOptions:
    """Convert a file of weights between a port's two models, torch to jax or jax to torch.

    torch's side is a state_dict; jax's is flat arrays with dotted names ("blocks.0.fc1.kernel").
    Every tensor must have a twin on the other side. Dtypes stay.
    """

    port: Annotated[Positional[Path], arg(metavar="PROGRAM.py")]
    """Program with torch_model, jax_model and, if they differ, names; it is executed. Its options may follow as flags:
    --layers 12."""
    weights: Annotated[Positional[Path], arg(metavar="WEIGHTS.safetensors")]
    """File to convert."""
    out: Annotated[Positional[Path], arg(metavar="OUT.safetensors")]
    """File to write."""
    to: Literal["jax", "torch"] | None = None
    """Framework to convert to. None: the one that the file's names do not belong to."""
    force: bool = False
    """Replace OUT if it exists."""
    quiet: bool = False
    """Print one line in all instead of one per tensor."""


def convert(options: ConvertOptions, flags: Sequence[str] = ()) -> None:
    """Convert the file and print which array became which.

    Args:
        flags: those of a program's options.

    Raises:
        InputError: the port or the file cannot be used, or they do not match; nothing is written then.
    """
    from jaxddp.parity.convert.weight_files import FRAMEWORKS, ModelPair, read, write  # torch, which --help lacks

    if options.to is not None:
        check_name("--to", options.to, FRAMEWORKS)
    check_files({"PROGRAM.py": (options.port, None), "OUT": (options.out, b"")})
    if options.out.exists() and not options.force:
        raise InputError(f"{options.out}: exists; --force replaces it")
    port = load_port(options.port, flags=flags)
    with errors_located(options.port):
        twins = ModelPair.of_port(port)
    weights = read(options.weights)
    try:
        to = options.to or twins.other_side(set(weights))
        converted = twins.translated(weights, to)
    except InputError as error:
        raise InputError(f"{options.weights}: {error}") from None
    write(options.out, converted, to)
    if not options.quiet:
        arrow = "<-" if to == "jax" else "->"
        for piece in twins.converter.pieces:
            order = f"  taken as {piece.order}" if piece.order else ""
            line = f"{piece.jax_name} {piece.jax_shape}{order}  {arrow}  {piece.torch_name} {piece.torch_shape}"
            print(on_one_line(line))
    print(f"{options.out}: {len(converted)} arrays for {to}, from {len(weights)} of {options.weights}")


def run(argv: Sequence[str]) -> None:
    """Run the command line."""
    jax.config.update("jax_platforms", "cpu")  # only names and shapes are needed, so leave the GPUs free
    show_traceback = "--traceback" in argv
    with cli.one_line_errors(show_traceback):
        words = [word for word in argv if word != "--traceback"]
        options, flags = parse_known(ConvertOptions, words, PROG)
        if flags:
            check_flags_of_port(str(options.port), flags, lambda: parse_plain(ConvertOptions, words, PROG))
        convert(options, flags)
