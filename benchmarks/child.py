"""Call a function in a child process with a time limit: each framework has one, and what may run out of memory.

    python -m benchmarks.child MODULE FUNCTION '{"argument": 1}'

prints what the function returns as JSON, on the last line.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PATIENCE = 5.0  # seconds that a child has to end after it was told to


class ChildFailed(Exception):
    """A child that crashed or took too long; the message has the last line that it printed."""


def call(
    module: str,
    function: str,
    arguments: Mapping[str, Any],
    log: Path,
    limit: float,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Call a function in a child process, and return its result.

    Args:
        module: module of the function.
        function: name of the function.
        arguments: its keyword arguments, which JSON can hold.
        log: file for what the child prints.
        limit: seconds that it may take; then it is ended with all that it has started.
        env: variables that are set besides this process's.

    Raises:
        ChildFailed: it crashed, took too long, or returned something that JSON cannot hold.
    """
    command = [sys.executable, "-m", "benchmarks.child", module, function, json.dumps(arguments)]
    # Without a buffer, an error is the last line.
    code, printed = run(command, log, limit, {"PYTHONUNBUFFERED": "1", **(env or {})})
    said = [line.strip() for line in printed.splitlines() if line.strip()] or ["no output"]
    if code != 0:
        reason = f"stopped after {limit:.0f} s" if code is None else f"exit code {code}"
        raise ChildFailed(f"{reason}; {said[-1]}")
    return json.loads(said[-1])


def run(
    command: Sequence[str], log: Path, limit: float, env: Mapping[str, str], folder: Path | None = None
) -> tuple[int | None, str]:
    """Run a command; return its exit code and what it printed. After `limit` seconds, end it; its code is None then.

    Args:
        command: command and arguments.
        log: file for what it prints.
        limit: seconds that it may take.
        env: variables that are set besides this process's.
        folder: folder to run it in; None: this one.
    """
    with log.open("w") as output, _ended(command, output, {**os.environ, **env}, folder) as process:
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
    return code, log.read_text(errors="replace")


@contextlib.contextmanager
def _ended(
    command: Sequence[str], output: Any, env: Mapping[str, str], folder: Path | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; end it with all that it has started, whatever happens inside."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=env, cwd=folder
    )
    try:
        yield process
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)


if __name__ == "__main__":
    _module, _function, _arguments = sys.argv[1:]
    _result = getattr(importlib.import_module(_module), _function)(**json.loads(_arguments))
    print(json.dumps(_result), flush=True)
