"""Transcripts in README.md and docs/: blocks that begin with `$ command`, compared with what the command prints now.

    python -m tests.support.transcripts                       # print what differs
    python -m tests.support.transcripts --write first_draft   # of commands with a word; write it into the pages

Run from the root of the repository. A line "..." stands for any number of lines.
"""

import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```\n\$ (.+)\n((?:(?!```).*\n)*)```$", re.MULTILINE)
NOT_RUN = {"make test"}  # it would run itself
NUMBER = re.compile(r"(?<![\w.*])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?!\w|\.\w)")
# Rounding picks the step and the tensor of a stage that is equal, and the stage that float32 moves most.
PICKED = (
    (re.compile(r"the (?:step|input) limits: .*"), "what limits"),  # in a short run, the load of the machine
    (re.compile(r"^([a-z]+(?: [a-z]+)?) +\S+ +\S+ +\S+ +equal\b.*", re.MULTILINE), r"\1 equal"),
    (re.compile(r"(times torch's) \([a-z ]+\)"), r"\1"),
    (re.compile(r"^.*(?: s so far|\d left)\n", re.MULTILINE), ""),  # of a busy machine
)
WRAPPED = re.compile(r"\n {9}(?=\S)")  # a long line of a check


@dataclass(frozen=True)
class Transcript:
    """A command and its output as a page shows it."""

    page: Path
    command: str
    shown: str

    def printed(self) -> str:
        """Run the command in an empty folder with the repository's examples, and return what it prints."""
        command = self.command
        if command.startswith("make "):  # with the Python that runs this; nothing is installed
            target = command.split()[1]
            command = f"make --silent -o .venv/installed-{target} {target} BIN={Path(sys.executable).parent}"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ours = ("XLA_FLAGS", "MAKE", "MFLAGS")  # of the tests, and of `make test` around them
        env = {name: x for name, x in os.environ.items() if not name.startswith(ours)} | {"PATH": path}
        with tempfile.TemporaryDirectory() as folder:
            for name in ("Makefile", "examples"):
                Path(folder, name).symlink_to(ROOT / name)
            Path(folder, "docs").mkdir()
            ended = subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True)
        return "".join(f"{line.rstrip()}\n" for line in (ended.stdout.rstrip() or ended.stderr.rstrip()).splitlines())

    def difference(self, printed: str) -> str:
        """Return how the page differs from what was printed, apart from numbers; "" if it does not."""
        shown, now = _masked(self.shown), _masked(printed)
        pattern = "".join("(?:.*\n)*" if line == "..." else f"{re.escape(line)}\n" for line in shown)
        if re.fullmatch(pattern, "".join(f"{line}\n" for line in now)):
            return ""
        return "\n".join(difflib.unified_diff(shown, now, "page", "program", lineterm=""))

    def renewed(self, printed: str) -> str:
        """Return what was printed, with as many lines before and after "..." as the page has."""
        shown, now = self.shown.splitlines(), printed.splitlines()
        if "..." in shown:
            first = shown.index("...")
            last = len(shown) - first - 1
            now = [*now[:first], "...", *now[len(now) - last :]]
        return "".join(f"{line}\n" for line in now)


def transcripts() -> list[Transcript]:
    """Return the transcripts of all pages, without those that cannot be run."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [Transcript(page, *block) for page in pages for block in BLOCK.findall(page.read_text())]
    return [one for one in found if one.command not in NOT_RUN]


def _masked(text: str) -> list[str]:
    text = WRAPPED.sub(" ", text)
    for pattern, kept in PICKED:
        text = pattern.sub(kept, text)
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines()]


def main(words: list[str]) -> Iterator[str]:
    """Yield the differences of the transcripts whose commands have one of these words; "--write" mends them."""
    write, words = "--write" in words, [word for word in words if word != "--write"]
    for one in transcripts():
        if words and not any(word in one.command for word in words):
            continue
        printed = one.printed()
        difference = one.difference(printed)
        yield f"{one.page.relative_to(ROOT)}: {one.command}\n{difference or 'the same'}"
        if write:
            block = f"$ {one.command}\n"
            text = one.page.read_text()
            one.page.write_text(text.replace(f"{block}{one.shown}", f"{block}{one.renewed(printed)}"))


if __name__ == "__main__":
    for line in main(sys.argv[1:]):
        print(line, flush=True)
