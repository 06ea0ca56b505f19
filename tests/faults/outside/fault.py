"""Faults outside of the catalogue: edits of the JAX file of an ordinary port, and what a diagnosis should say of each.

Nothing here imports the parity check: a fault is text that replaces other text, and the expected words are data.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
# Names of a program that the two files of a port may define.
FIELDS = {
    "torch": ("torch_model", "torch_loss", "torch_step", "torch_batch", "torch_optimizer", "torch_scheduler")
    + ("configure_optimizers", "batch", "steps_per_epoch", "clip_grad_norm", "torch_clip_grad_norm"),
    "jax": ("jax_model", "jax_loss", "jax_step", "jax_batch", "jax_optimizer", "jax_start", "names", "no_twin"),
}
# Number of steps of each port: two epochs or the whole schedule, where there is one.
STEPS = {
    **{"mlp": 9, "convnet": 3, "gpt": 5, "encoder": 4, "recurrent": 3},
    **{"vae": 3, "diffusion": 3, "actor_critic": 3, "contrastive": 3},
}
WORLD_SIZE = 2


@dataclass(frozen=True)
class OutsideFault:
    """A fault, planted by edits of the text of `<port>_jax.py`.

    Attributes:
        port: name of the port.
        kind: kind of the fault: "constant", "call", "call dropped", "axis", "order", "schedule", "samples", ...
        edits: (old, new) pairs of text; each old text occurs in the file exactly once.
        ours: what the port does or has, in words.
        reference: what the reference does or has, in words.
        expects: regular expressions, all of which the words of the right cause contain, in any case of letters.
        place: regular expression of the layer, tensor or call that a location names if the fault stays unnamed.
        jax_line: text that one line of the edited JAX file contains, the line that is wrong.
        torch_line: text that one line of the torch file contains, the line that the wrong one should mirror.
        stage: the first stage that differs.
        step: the first step that differs there, from 1.
        known: name in the catalogue, of a fault that it has already.
    """

    port: str
    kind: str
    edits: tuple[tuple[str, str], ...]
    ours: str
    reference: str
    expects: tuple[str, ...]
    place: str
    jax_line: str
    torch_line: str
    stage: str = "local_loss"
    step: int = 1
    known: str = ""

    @property
    def files(self) -> tuple[str, str]:
        """Names of the JAX file and of the torch file."""
        return f"{self.port}_jax.py", f"{self.port}_torch.py"

    @property
    def lines(self) -> tuple[int, int]:
        """Numbers of the lines of the fault, in the edited JAX file and in the torch file."""
        return line_of(edited(self.port, self.edits), self.jax_line), line_of(source(self.files[1]), self.torch_line)

    def named_by(self, words: str) -> bool:
        """Return whether the words of a cause say this fault."""
        return all(re.search(one, words, re.IGNORECASE) for one in self.expects)


def source(file: str) -> str:
    """Return the text of a file of this folder."""
    return (FOLDER / file).read_text()


def edited(port: str, edits: tuple[tuple[str, str], ...]) -> str:
    """Return the text of a port's JAX file after edits.

    Raises:
        ValueError: an old text does not occur exactly once.
    """
    text = source(f"{port}_jax.py")
    for old, new in edits:
        if (count := text.count(old)) != 1:
            raise ValueError(f"{port}_jax.py: has {old!r} {count} times; must have it once")
        text = text.replace(old, new)
    return text


def line_of(text: str, snippet: str) -> int:
    """Return the number of the only line that contains the snippet.

    >>> line_of("one\\ntwo\\n", "w")
    2

    Raises:
        ValueError: no line contains it, or several do.
    """
    found = [number for number, line in enumerate(text.splitlines(), start=1) if snippet in line]
    if len(found) != 1:
        raise ValueError(f"{snippet!r}: is in {len(found)} lines; must be in one")
    return found[0]


def port_texts(port: str, edits: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return the texts of a port's files by name: two source files, one of them edited, and "port.py" that joins them.

    >>> [*port_texts("mlp", ())]
    ['mlp_torch.py', 'mlp_jax.py', 'port.py']
    """
    texts = {"torch": source(f"{port}_torch.py"), "jax": edited(port, edits)}
    lines = [f'"""Port of {port}_torch.py to JAX."""\n']
    for side, text in texts.items():
        names = [name for name in FIELDS[side] if name in defined(text)]
        lines += [f"from {port}_{side} import {', '.join(names)}  # noqa: F401"]
    return {**{f"{port}_{side}.py": text for side, text in texts.items()}, "port.py": "\n".join(lines) + "\n"}


def write_files(port: str, edits: tuple[tuple[str, str], ...], folder: Path) -> Path:
    """Write the files of `port_texts`; return the path of the program."""
    for name, text in port_texts(port, edits).items():
        (folder / name).write_text(text)
    return folder / "port.py"


def defined(text: str) -> set[str]:
    """Return the names that a Python file defines at its top level.

    >>> sorted(defined("a, b = 1, 2\\ndef f(): c = 3"))
    ['a', 'b', 'f']
    """
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    return found
