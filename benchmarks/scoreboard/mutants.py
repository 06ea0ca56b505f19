"""Mutation tests of the project: plant one fault in the source, and see whether a test fails.

The faults are planted and tested in a copy of the repository.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import run
from jaxddp.errors import InputError

LIMIT = 300.0  # seconds for the tests of one mutant; measured: 2 to 51, on two busy cores
TESTS_FAILED = 1  # exit code of pytest; other codes: interrupted, misused, nothing collected
_FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A fault to plant.

    Attributes:
        name: name of the fault.
        file: source file, relative to the root of the repository.
        old: text that occurs in the file exactly once.
        new: text that replaces it.
        tests: pytest arguments that select the tests, one of which must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, text: str) -> str:
        """Return the source with the fault in it.

        Raises:
            InputError: the old text does not occur exactly once.

        >>> Mutant("sum", "mean.py", "/ n", "", ()).apply("y = x / n")
        'y = x '
        """
        if (count := text.count(self.old)) != 1:
            line = self.old.strip().splitlines()[0]
            raise InputError(f"mutant {self.name}: {self.file} contains {line!r} {count} times; must contain it once")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """Outcome of the tests of a mutant.

    Attributes:
        name: name of the mutant.
        killed: whether a test failed that passes without the mutant.
        by: the test that failed; if the mutant survives, what happened instead.
        seconds: duration of the tests with the mutant.
    """

    name: str
    killed: bool
    by: str
    seconds: float


def run_mutants(root: Path, mutants: Sequence[Mutant], limit: float = LIMIT) -> Iterator[Outcome]:
    """Plant each mutant in turn in a copy of the repository, and run its tests there.

    Args:
        root: root of a git repository; all files that git does not ignore are copied.
        mutants: mutants to plant.
        limit: seconds after which the tests of a mutant are killed.

    Raises:
        InputError: a mutant does not fit the source, or `root` is not a git repository.
    """
    if not mutants:
        return
    with tempfile.TemporaryDirectory(prefix="jaxddp-mutants-") as folder:
        copy = Path(folder).resolve()
        _copy_repository(root, copy)
        for mutant in mutants:
            mutant.apply((copy / mutant.file).read_text())
        _check_imports_come_from(copy, sorted({Path(mutant.file).parts[0] for mutant in mutants}))
        for mutant in mutants:
            yield _outcome(copy, mutant, limit)


def _outcome(copy: Path, mutant: Mutant, limit: float) -> Outcome:
    source, started = copy / mutant.file, time.monotonic()
    right = source.read_text()
    source.write_text(mutant.apply(right))
    try:
        code, output = _pytest(copy, mutant.tests, limit)
    finally:
        source.write_text(right)
    seconds = time.monotonic() - started
    failed = _FAILED_TEST.search(output)
    if code == 0:
        instead = "all of its tests pass"
    elif code != TESTS_FAILED or failed is None:
        instead = f"pytest exits with code {code}: {_last_line(output)}"
    elif _pytest(copy, [failed[1]], limit)[0] != 0:
        instead = f"{failed[1]} fails without the mutant too"
    else:
        return Outcome(mutant.name, True, failed[1], seconds)
    return Outcome(mutant.name, False, instead, seconds)


def _copy_repository(root: Path, copy: Path) -> None:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode:
        raise InputError(f"{root}: not a git repository ({_last_line(listed.stderr)})")
    for name in set(listed.stdout.split("\0")):
        if name and (root / name).is_file():  # git lists a deleted file until the deletion is committed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)


def _check_imports_come_from(copy: Path, packages: Sequence[str]) -> None:
    """Raise InputError if the packages are imported from elsewhere: they may be installed, without the mutant."""
    code = f"import {', '.join(packages)}\nprint(*[x.__file__ for x in ({', '.join(packages)},)], sep='\\n')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=copy, env=os.environ | _environment(copy), capture_output=True, text=True)
    files = done.stdout.splitlines()
    if len(files) != len(packages) or not all(Path(file).resolve().is_relative_to(copy) for file in files):
        raise InputError(f"{', '.join(packages)}: not imported from the copy in {copy} ({_last_line(done.stderr)})")


def _pytest(copy: Path, arguments: Sequence[str], limit: float) -> tuple[int, str]:
    """Return pytest's exit code and output; after `limit` seconds, kill it and all processes that it started."""
    every = ["-m", ""]  # the large tests too
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *every, *arguments]
    with tempfile.NamedTemporaryFile() as log:
        code, output = run(command, Path(log.name), limit, _environment(copy), copy)
    return (-signal.SIGKILL, f"timed out after {limit:.0f} s") if code is None else (code, output)


def _environment(copy: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
    # Python recognizes stale bytecode by the source's size and time in seconds; mutants change faster than that.
    return {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
