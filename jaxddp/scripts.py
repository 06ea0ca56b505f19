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

from jaxddp.errors import PATIENCE, InputError, described, telling

PACKAGES = Path(__file__).resolve().parent
NOT_USERS = (PACKAGES, PACKAGES.parent / "torch_ref", *(Path(path).resolve() for path in (sys.prefix, sys.base_prefix)))

PREFIX = "run_"  # of the names of the modules that files become
_FOLDERS: set[Path] = set()  # of the files that have run
_RUNNING: set[tuple[int, Path]] = set()  # threads and the files whose top level they run


def run_file(path: Path) -> ModuleType:
    """Run a Python file and return it as a module.

    The file's folder is put first on `sys.path` for good, so that the file and its functions can import modules beside
    it. Modules of the same names that files in other folders have imported are imported anew. A file in a package may
    import from it as its modules do.

    Raises:
        InputError: the file is missing, is not a Python file, raises, or runs itself.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file")
    file = path.absolute()
    refuse_itself(file)
    running = threading.get_ident(), file
    root = import_root(file)
    name = ".".join([*file.parent.relative_to(root).parts, f"{PREFIX}{path.stem}"])
    spec = importlib.util.spec_from_file_location(name, path)
    if path.suffix != ".py" or not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"{path}: must be a Python file, *.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    for folder in dict.fromkeys((root, file.parent)):
        _put_first(folder)
    _RUNNING.add(running)
    try:
        with errors_located(path), _place_told(path):
            spec.loader.exec_module(module)
    finally:
        _RUNNING.remove(running)
    return module


def refuse_itself(file: Path | None = None) -> None:
    """Raise `InputError` if this thread is loading a file, or any one, whose top level calls this."""
    for thread, loading in _RUNNING:
        if thread == threading.get_ident() and file in (None, loading):
            fix = 'call it below `if __name__ == "__main__":`'
            raise InputError(f"{loading}: runs itself while it is loaded; {fix}")


def file_of_module(name: str) -> Path:
    """Return the file of a module as `python -m` finds it, which imports its packages.

    Raises:
        InputError: there is no such module, or a package raises.
    """
    _put_first(Path.cwd())
    try:
        spec = importlib.util.find_spec(name)
    except Exception as error:  # of a package's code
        raise InputError(f"-m {name}: {described(error)}") from error
    if spec is None or not spec.has_location:
        raise InputError(f"-m {name}: no such module in Python's path")
    return Path(os.path.relpath(spec.origin or ""))


def import_root(file: Path) -> Path:
    """Return the folder of a file, or the one that holds its outermost package."""
    return next(folder for folder in file.parents if not (folder / "__init__.py").is_file())


def _place_told(path: Path) -> contextlib.AbstractContextManager[None]:
    """Tell the line at which a file is, from time to time, if it takes long to run."""
    runner = threading.get_ident()

    def place(seconds: float) -> str:
        stack = traceback.extract_stack(sys._current_frames().get(runner))
        lines = [frame.lineno for frame in stack if Path(frame.filename).resolve() == path.resolve()]
        at = f" at line {lines[-1]}" if lines else ""
        return f"{path}: has run for {seconds:.0f} s, and is still{at}"

    return telling(place, PATIENCE)


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
        raise InputError(f"{where}{described(error)}") from error


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
    """Return a file's path by the script's; None for one outside of its import root, or of an installed package."""
    file, resolved = Path(filename).resolve(), script.resolve()
    if file == resolved:
        return script
    if _is_installed(file) or not file.is_relative_to(import_root(resolved)):
        return None
    return Path(os.path.normpath(script.parent / os.path.relpath(file, resolved.parent)))


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
