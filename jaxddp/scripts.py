"""Python files of the user: running one, and locating the errors that its code raises."""

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from jaxddp.errors import InputError

PACKAGES = Path(__file__).resolve().parent
NOT_USERS = (PACKAGES, PACKAGES.parent / "torch_ref", *(Path(path).resolve() for path in (sys.prefix, sys.base_prefix)))

_FOLDERS: set[Path] = set()  # of the files that have run


def run_file(path: Path) -> ModuleType:
    """Run a Python file and return it as a module.

    The file's folder is put first on `sys.path` for good, so that the file and its functions can import modules beside
    it. Modules of the same names that files in other folders have imported are imported anew.

    Raises:
        InputError: the file is missing, is not a Python file, or raises.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(f"port_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: must be a Python file, *.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    _put_first(path.parent.absolute())
    with errors_located(path):
        spec.loader.exec_module(module)
    return module


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
        file, line = _place(error, Path(path)) or (path, None)
        where = f"{file}: " if line is None else f"{file}: line {line}: "
        raise InputError(f"{where}{type(error).__name__}: {_first_line(error)}") from error


def _place(error: BaseException | None, script: Path) -> tuple[Path, int] | None:
    """Return the user's file and line in which an error arose, or else its cause; None if no traceback shows one."""
    seen: set[int] = set()
    while error is not None and script.is_file() and id(error) not in seen:
        seen.add(id(error))
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError):
            frames.append((error.filename or "", error.lineno))
        for filename, line in reversed(frames):
            if line is not None and (file := _users_file(filename, script)) is not None:
                return file, line
        error = error.__cause__ or error.__context__
    return None


def _users_file(filename: str, script: Path) -> Path | None:
    """Return a file's path beside the script's; None for a file outside of its folder, or of an installed package."""
    file, folder = Path(filename).resolve(), script.resolve().parent
    if file == script.resolve():
        return script
    installed = "site-packages" in file.parts or any(file.is_relative_to(root) for root in NOT_USERS)
    return None if installed or not file.is_relative_to(folder) else script.parent / file.relative_to(folder)


def _first_line(error: BaseException) -> str:
    """Return the first line of a message, without the pages that frameworks append."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or "without a message"
