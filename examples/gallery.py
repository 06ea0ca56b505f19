"""Run every example of the gallery and write a page with their output.

    python -m examples.gallery --output docs/gallery.md

Each example is a package or module of `examples` that defines `EXAMPLE`.
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

Each example measures one claim of the documents that the project grew from, in JAX and in PyTorch. Run the commands
from the root of the repository, after `pip install -e ".[examples]"`.
"""
# In the order of the documents.
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
    """Page to write."""

    def __post_init__(self) -> None:
        check_file(self.output)


def examples() -> list[Example]:
    """Return the entry of every example."""
    return [importlib.import_module(f"examples.{name}").EXAMPLE for name in NAMES]


def printed(command: str) -> str:
    """Run an example and return its output.

    Raises:
        SystemExit: the example failed, or one of its claims does not hold.
    """
    _, *arguments = shlex.split(command)
    run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{command}\n{run.stdout}{run.stderr}")
    return run.stdout.rstrip()


def section(example: Example, output: str) -> str:
    """Format an example's section of the page."""
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
    """Run the examples and write the page."""
    pages = [section(example, printed(example.command)) for example in examples()]
    options.output.write_text("\n".join([HEAD, *pages]))


if __name__ == "__main__":
    with one_line_errors(show_traceback=False):
        main(parse_plain(Options, sys.argv[1:], "python -m examples.gallery"))
