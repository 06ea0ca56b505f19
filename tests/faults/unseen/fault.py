"""What a fault of the exam is, and the program of a port."""

import ast
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
USED = {
    "torch": ("torch_model", "torch_loss", "torch_optimizer", "torch_scheduler", "configure_optimizers", "batch"),
    "jax": ("jax_model", "jax_loss", "jax_optimizer", "names", "no_twin"),
}

# Words of a cause, as parts of regular expressions.
ABSENT = (
    r"left out|leaves? out|missing|omit|without|not applied|nothing|lacks?|dropp|absent|skip|does not|doesn't|is not|"
    r"are not|\bno\b|\bnot\b|\bonly\b|remov|never|ignor|instead|\bnone\b|reference (has|also|multipl|adds)|forg[eo]t"
)
TIMES = r"mul|times|scal|factor|product|weight|divid|\bdiv|gain"


@dataclass(frozen=True)
class UnseenFault:
    """A fault, planted by edits of the text of `<port>_jax.py`.

    Attributes:
        port: name of the port.
        edits: (old, new) pairs of text; each old text occurs in the file exactly once.
        ours: what the edited port does, in words.
        reference: what the reference does, in words.
        expects: regular expressions (case ignored); any text that names the right cause contains all of them.
        jax_lines: texts, each in exactly one line of the EDITED jax file: the lines that may rightly be called the
            wrong one.
        torch_lines: texts, each in exactly one line of the torch file: the lines that the wrong one should mirror.
    """

    port: str
    edits: tuple[tuple[str, str], ...]
    ours: str
    reference: str
    expects: tuple[str, ...]
    jax_lines: tuple[str, ...]
    torch_lines: tuple[str, ...]


def source(port: str, half: str) -> str:
    """Read one half of a port, "torch" or "jax"."""
    return (FOLDER / f"{port}_{half}.py").read_text()


def edited(port: str, *faults: UnseenFault) -> str:
    """Return the JAX half of a port with these faults."""
    text = source(port, "jax")
    for old, new in (edit for fault in faults for edit in fault.edits):
        if text.count(old) != 1:
            raise ValueError(f"{port}: {text.count(old)} x {old!r}")
        text = text.replace(old, new)
    return text


def program(port: str) -> str:
    """Return the text of `port.py`, which imports what both halves define."""
    lines = []
    for half, used in USED.items():
        targets = [
            name
            for node in ast.parse(source(port, half)).body
            for name in (
                [node.name]
                if isinstance(node, ast.FunctionDef)
                else [ast.unparse(target) for target in node.targets]
                if isinstance(node, ast.Assign)
                else []
            )
        ]
        lines.append(f"from {port}_{half} import {', '.join(name for name in used if name in targets)}\n")
    return "".join(lines)


def write(folder: Path, port: str, *faults: UnseenFault) -> Path:
    """Write a port with these faults into a folder, and return its program."""
    (folder / f"{port}_torch.py").write_text(source(port, "torch"))
    (folder / f"{port}_jax.py").write_text(edited(port, *faults))
    (folder / "port.py").write_text(program(port))
    return folder / "port.py"
