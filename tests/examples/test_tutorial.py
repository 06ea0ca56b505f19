"""Tutorial of the check: docs/check_your_port.md quotes its files, and both of its scripts train."""

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PORTS = ROOT / "examples" / "ports"
PAGE = (ROOT / "docs" / "check_your_port.md").read_text()
QUOTED = ("tutorial_torch", "tutorial_torch", "tutorial_jax", "tutorial")
LOSS = re.compile(r"epoch \d: loss (\d\.\d{3})")


def text_of(name: str) -> str:
    return (PORTS / f"{name}.py").read_text()


def body(name: str) -> list[str]:
    """Lines after the docstring."""
    return text_of(name).split('"""\n', maxsplit=2 if name.startswith("tutorial_jax") else 1)[-1].splitlines()


def changes(old: str, new: str) -> list[str]:
    return [line for line in difflib.ndiff(body(old), body(new)) if line[0] in "+-" and line[2:].strip()]


def test_the_tutorial_shows_its_files() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == len(QUOTED)
    for name, block in zip(QUOTED, blocks, strict=True):
        assert block in text_of(name), name
    assert text_of("tutorial").endswith(blocks[-1])


def test_the_last_program_has_the_names_and_both_edits_of_the_tutorial() -> None:
    patch = re.findall(r"^ {9}([-+]) (self\.norm.*)$", PAGE, re.MULTILINE)
    by_hand = re.search(r"Edit line (\d+) of `tutorial_jax.py` by hand, .*\n.*`(.*)`", PAGE)
    assert by_hand and [sign for sign, _ in patch] == ["-", "+"]
    edited = text_of("tutorial_jax").splitlines()[int(by_hand[1]) - 1]
    assert changes("tutorial_jax", "tutorial_jax_fixed") == [
        *(f"{sign} {'':8}{line}" for sign, line in patch),
        f"- {edited}",
        f"+ {edited.replace('step / 100', by_hand[2])}",
    ]
    names = re.search(r"^names = \{\n(?: {4}.*\n)+\}\n", PAGE, re.MULTILINE)
    assert names and changes("tutorial", "tutorial_fixed") == [
        "- import tutorial_jax",
        "+ import tutorial_jax_fixed as tutorial_jax",
        *(f"+ {line}" for line in names[0].splitlines()),
    ]


@pytest.mark.large
@pytest.mark.parametrize("name", ["tutorial_torch", "tutorial_jax", "tutorial_jax_fixed"])
def test_a_script_of_the_tutorial_trains(name: str) -> None:
    ranks = 2 if name == "tutorial_torch" else 1
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    ended = subprocess.run([sys.executable, *launcher, f"{name}.py"], cwd=PORTS, capture_output=True, text=True)
    losses = [float(loss) for loss in LOSS.findall(ended.stdout)]
    assert len(losses) == 5 * ranks and max(losses[-ranks:]) < min(losses[:ranks]), ended.stderr
    assert ended.returncode == 0, ended.stderr
