"""Runs every example of the gallery and writes its page, with what they print.

    python -m examples.gallery --output docs/gallery.md

Each example is a package or module of `examples` with an `EXAMPLE`.
"""

import importlib
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from examples.entry import Example
from jaxddp.cli import one_line_errors, parse_plain
from jaxddp.files import check_file

HEAD = """\
# Gallery

The claims of the documents that the project grew from, each as a program that measures it, in JAX and in PyTorch. They
run from the root of the repository, once `pip install -e ".[examples]"` has brought what they need.
"""
# In the order of the seed documents.
NAMES: tuple[str, ...] = (
    "gradient_averaging",
    "ring",
    "gradient_hooks",
    "bubbles",
    "from_scratch",
    "fine_tune",
    "ddp_script",
    "same_updates",
    "multi_gpu",
)


@dataclass(frozen=True)
class Options:
    """Run the examples and write the page."""

    output: Path = Path("docs/gallery.md")
    """The page."""

    def __post_init__(self) -> None:
        check_file(self.output)


def examples() -> list[Example]:
    """What each says of itself."""
    return [importlib.import_module(f"examples.{name}").EXAMPLE for name in NAMES]


def printed(command: str) -> str:
    """What an example prints.

    Raises:
        SystemExit: it failed, or one of its claims does not hold.
    """
    _, *arguments = shlex.split(command)
    run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{command}\n{run.stdout}{run.stderr}")
    return run.stdout.rstrip()


def section(example: Example, output: str) -> str:
    """An example's part of the page."""
    picture = f"\n\n![{example.name}]({example.picture})" if example.picture else ""
    source = f"Document {example.seed}: " if example.seed else ""
    return f"""\
## {example.name}

{source}{example.claim} **{example.verdict}**{picture}

```
$ {example.command}
{output}
```
"""


def main(options: Options) -> None:
    """Write the page."""
    pages = [section(example, printed(example.command)) for example in examples()]
    options.output.write_text("\n".join([HEAD, *pages]))


if __name__ == "__main__":
    with one_line_errors(show_traceback=False):
        main(parse_plain(Options, sys.argv[1:], "python -m examples.gallery"))
