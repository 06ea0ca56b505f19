"""Python files of the user: running one, and locating the errors that its code raises."""

import contextlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from jaxddp.errors import InputError, not_installed

PACKAGES = Path(__file__).resolve().parent
NOT_USERS = (PACKAGES, PACKAGES.parent / "torch_ref", *(Path(path).resolve() for path in (sys.prefix, sys.base_prefix)))

PATIENCE = 30.0  # seconds

_FOLDERS: set[Path] = set()  # of the files that have run


def run_file(path: Path) -> ModuleType:
    """Run a Python file and return it as a module.

    The file's folder is put first on `sys.path` for good, so that the file and its functions can import modules beside
    it. Modules of the same names that files in other folders have imported are imported anew.

    Raises:
        InputError: the file is missing, is not a Python file, or raises.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(f"run_{path.stem}", path)
    if path.suffix != ".py" or not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"{path}: must be a Python file, *.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    _put_first(path.parent.absolute())
    with errors_located(path), _place_told(path):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _place_told(path: Path) -> Iterator[None]:
    """Tell the line at which a file is, from time to time, if it takes long to run."""
    ended, runner = threading.Event(), threading.get_ident()

    def tell() -> None:
        seconds = 0.0
        while not ended.wait(PATIENCE):
            seconds += PATIENCE
            stack = traceback.extract_stack(sys._current_frames().get(runner))
            lines = [frame.lineno for frame in stack if Path(frame.filename).resolve() == path.resolve()]
            at = f" at line {lines[-1]}" if lines else ""
            print(f"{path}: has run for {seconds:.0f} s, and is still{at}", file=sys.stderr, flush=True)

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _put_first(folder: Path) -> None:
    """Let imports find the modules of this folder, and not those of the same names beside other files that have run."""
    others = _FOLDERS - {folder}
    for name in {entry.stem for entry in folder.iterdir()} & sys.modules.keys():
        file = Path(getattr(sys.modules[name], "__file__", None) or "")
        if not others.isdisjoint([file.parent, *([file.parent.parent] if file.stem == "__init__" else [])]):
            for stale in [module for module in sys.modules if f"{module}.".startswith(f"{name}.")]:
                del sys.modules[stale]
    _FOLDERS.add(folder)
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))


@contextlib.contextmanager
def errors_located(path: str | Path) -> Iterator[None]:
    """Turn whatever the code of a user's file raises into one line with file, line number and message.

    The line is the innermost one of the file, or of a module in its folder.

    Raises:
        InputError: in place of any other exception.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        file, line = _place(error, Path(path)) or (Path(path), None)
        if file.is_relative_to(Path.cwd()):
            file = file.relative_to(Path.cwd())
        where = f"{file}: " if line is None else f"{file}: line {line}: "
        raise InputError(f"{where}{not_installed(error) or f'{type(error).__name__}: {_first_line(error)}'}") from error


def _place(error: BaseException | None, script: Path) -> tuple[Path, int] | None:
    """Return the user's file and line in which an error arose, or else its cause; None if no traceback shows one."""
    seen: set[int] = set()
    while error is not None and script.is_file() and id(error) not in seen:
        seen.add(id(error))
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError):
            frames.append((error.filename or "", error.lineno))
        for filename, line in reversed(frames):
            if line is not None and (file := users_file(filename, script)) is not None:
                return file, line
        error = error.__cause__ or error.__context__
    return None


def users_file(filename: str, script: Path) -> Path | None:
    """Return a file's path beside the script's; None for a file outside of its folder, or of an installed package."""
    file, folder = Path(filename).resolve(), script.resolve().parent
    if file == script.resolve():
        return script
    return None if _is_installed(file) or not file.is_relative_to(folder) else script.parent / file.relative_to(folder)


def _is_installed(file: Path) -> bool:
    return "site-packages" in file.parts or any(file.is_relative_to(root) for root in NOT_USERS)


def refuse_exits() -> None:
    """Raise where a user's file calls `os._exit` in this process, which would end a command without a word."""
    end, process = os._exit, os.getpid()

    def end_or_raise(status: int) -> NoReturn:
        caller = sys._getframe(1)
        file = Path(caller.f_code.co_filename)
        if os.getpid() != process or not file.is_file() or _is_installed(file.resolve()):
            end(status)
        raise InputError(f"{file}: line {caller.f_lineno}: os._exit({status})")

    os._exit = end_or_raise


def _first_line(error: BaseException) -> str:
    """Return the first line of a message, without the pages that frameworks append."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or "without a message"
