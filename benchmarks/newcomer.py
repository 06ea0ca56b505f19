"""Do what a newcomer does, in an empty environment, and time it: `make newcomer`. Needs only Python's own modules.

The commands are those of the README: install, doctor, train, check the first draft, apply its patch, check again. They
run in a copy of the repository's files, with a new virtual environment and an empty home, so that the cache of compiled
programs is cold; `--pip-cache` lets pip use the user's own.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PORT = Path("examples", "ports", "first_draft.py")


@dataclass(frozen=True)
class Step:
    """A command of the newcomer's.

    Attributes:
        command: the command, in the shell.
        code: its exit code.
        prints: regular expression of what it must print.
    """

    command: str
    code: int = 0
    prints: str = ""


def steps() -> list[Step]:
    """Return the newcomer's commands; those of the README as it has them."""
    readme = (ROOT / "README.md").read_text()
    install = re.search(r"^(pip install -e \S+)", readme, re.MULTILINE)
    assert install is not None, "the README says how to install"
    patch = f"patch -p1 -d {PORT.parent} < fixes.diff"
    return [
        Step(f"{sys.executable} -m venv .venv"),
        Step(f"{install[1]} --quiet --disable-pip-version-check"),
        Step("jaxddp doctor", prints=r"(?s)^jaxddp .*\ncache .*"),
        Step("jaxddp train", prints=r"(?s)test accuracy 0\.9[78].* replicas identical"),
        Step(
            f"jaxddp check {PORT} --patch fixes.diff", 1, r"(?s)\[gelu_approximation\].*\[decay_value\].*apply it with"
        ),
        Step(patch, prints="patching file first_draft.py"),
        Step(f"jaxddp check {PORT}", 0, r"\nequal: "),
    ]


def tracked(folder: Path) -> None:
    """Copy the repository's files, as they are now, into a folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def environment(folder: Path, pip_cache: bool) -> dict[str, str]:
    """Return variables with an empty home, and with the new virtual environment first on the path."""
    of_network = ("PIP_", "SSL_", "http", "HTTP", "no_proxy", "NO_PROXY", "LANG")
    given = {name: value for name, value in os.environ.items() if name.startswith(of_network)}
    if pip_cache:
        command = [sys.executable, "-m", "pip", "cache", "dir"]
        given["PIP_CACHE_DIR"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    home = folder.parent / "home"
    home.mkdir()
    return {**given, "HOME": f"{home}", "PATH": f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def run(pip_cache: bool) -> Iterator[str]:
    """Yield a line for each command, and one for all of them.

    Raises:
        SystemExit: a command ended otherwise than it should.
    """
    with tempfile.TemporaryDirectory(prefix="newcomer-") as name:
        folder = Path(name, "jaxddp")
        tracked(folder)
        variables, whole = environment(folder, pip_cache), 0.0
        for step in steps():
            began = time.monotonic()
            ended = subprocess.run(
                step.command, shell=True, cwd=folder, env=variables, capture_output=True, text=True, check=False
            )
            seconds = time.monotonic() - began
            whole += seconds
            if ended.returncode != step.code or not re.search(step.prints, ended.stdout):
                sys.exit(
                    f"{ended.stdout}\n{ended.stderr}\n{step.command}: exit code {ended.returncode}, not {step.code}"
                )
            yield f"{seconds:6.1f} s  {step.command}"
        pip = "warm" if pip_cache else "cold"
        yield f"{whole:6.1f} s  in all, on {os.cpu_count()} cores; pip's cache {pip}, compiled programs cold"


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="make newcomer", description=__doc__)
    parser.add_argument("--pip-cache", action="store_true", help="let pip use your own cache")
    for line in run(parser.parse_args(argv).pip_cache):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
