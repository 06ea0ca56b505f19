"""Python files of the user: running one, and locating the errors that its code raises."""

import contextlib
import importlib.util
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from jaxddp.errors import PATIENCE, InputError, TrainingError, described, shortened, telling

OWN = [Path(__file__).resolve().parent, Path(__file__).resolve().parents[1] / "torch_ref"]
# Python's own folders, and a virtual environment's; not all of /usr, where containers have a user's files too.
PYTHONS = [*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), f"{sys.prefix}/lib"]
NOT_USERS = [*OWN, *(Path(path).resolve() for path in PYTHONS)]
INSTALLED = {"site-packages", "dist-packages"}  # folders of packages, wherever they are
MOST_FRAMES = 10  # in an error
PREFIX = "run_"  # of the names of the modules that files become
_FOLDERS: set[Path] = set()  # of the files that have run
_RUNNING: set[tuple[int, Path]] = set()  # threads and the files whose top level they run


def run_file(path: Path) -> ModuleType:
    """Run a Python file and return it as a module.

    The file's folder is put first on `sys.path` for good, so that the file and its functions can import modules next
    to it. Modules of the same names that files in other folders have imported are imported again. A file in a package
    may import from it, like its modules.

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
    """Let imports find this folder's modules, and not those of the same names next to other files that have run."""
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
def errors_located(path: str | Path, only_users: bool = False) -> Iterator[None]:
    """Turn whatever the code of a user's file raises into one line with file, line number and message.

    The line is the innermost one of the file, or of a module in its folder.

    Args:
        path: the file.
        only_users: let errors pass that arise in this project's code, or in a package that it calls.

    Raises:
        InputError: in place of any other exception; has the user's frames.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        script = Path(path)
        if only_users and not _is_users(error, script):
            raise
        frames = [frame for raised in _users_frames(error, script) for frame in reversed(raised)]
        places = ((file, f.lineno) for f in frames if (file := users_file(f.filename, script)) is not None)
        file, line = next(places, (script, None))
        place = f"{_short(file)}{'' if line is None else f': line {line}'}"
        raise InputError(f"{place}: {described(error)}", users_frames(error, script)) from error


def users_frames(error: BaseException, script: Path = Path()) -> tuple[str, ...]:
    """Return the lines of the user's code in an error's traceback, the innermost last, after those of its cause.

    Args:
        error: the error.
        script: the user's file, even if it is in an installed package.
    """
    frames = [frame for raised in reversed([*_users_frames(error, script)]) for frame in raised]
    words = [f"{_short(Path(f.filename), script)}:{f.lineno}, {f.name}: {shortened(f.line or '')}" for f in frames]
    if len(words) > MOST_FRAMES:
        words[MOST_FRAMES // 2 : -MOST_FRAMES // 2] = [f"... {len(words) - MOST_FRAMES} more ..."]
    return tuple(words)


def _users_frames(error: BaseException | None, script: Path) -> Iterator[list[traceback.FrameSummary]]:
    """Yield the frames of the user's code in the traceback of an error, of its cause, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield [f for f in _frames(error) if users_file(f.filename, script) or is_of_user(f.filename)]
        error = error.__cause__ or error.__context__


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = [*traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>"))
    return frames


def users_file(filename: str, script: Path) -> Path | None:
    """Return a file's path by the script's; None for one outside of its import root, or of an installed package."""
    file, resolved = Path(filename).resolve(), script.resolve()
    if file == resolved:
        return script
    if not is_of_user(filename) or not file.is_relative_to(import_root(resolved)):
        return None
    return Path(os.path.normpath(script.parent / os.path.relpath(file, resolved.parent)))


@cache
def is_of_user(filename: str) -> bool:
    """Return whether a file is a user's, and not Python's, a package's or this project's.

    >>> [is_of_user(path) for path in ("/home/me/model.py", contextlib.__file__, __file__, "<frozen runpy>")]
    [True, False, False, False]
    """
    file = Path(filename).resolve()
    return not (filename.startswith("<") or INSTALLED & {*file.parts} or any(map(file.is_relative_to, NOT_USERS)))


def _is_users(error: BaseException, script: Path) -> bool:
    """Return whether an error's traceback leads from this project's code into the user's."""
    names = [frame.filename for frame in _frames(error)]
    ours = [number for number, name in enumerate(names) if any(map(Path(name).resolve().is_relative_to, OWN))]
    inner = names[ours[-1] + 1 :] if ours else names
    is_told = isinstance(error, TrainingError) or not isinstance(error, Exception)
    return not is_told and any(users_file(name, script) or is_of_user(name) for name in inner)


def _short(file: Path, script: Path = Path()) -> Path:
    """Return a path from the script's folder or the working directory, if it is in one of them."""
    folders = (script.resolve().parent, Path.cwd()) if script.name else (Path.cwd(),)
    return next((file.relative_to(folder) for folder in folders if file.is_relative_to(folder)), file)


def refuse_exits() -> None:
    """Raise where a user's file calls `os._exit` in this process, which would end a command without a word."""
    end, process = os._exit, os.getpid()

    def end_or_raise(status: int) -> NoReturn:
        caller = sys._getframe(1)
        file = Path(caller.f_code.co_filename)
        if os.getpid() != process or not is_of_user(f"{file}"):
            end(status)
        raise InputError(f"{file}: line {caller.f_lineno}: os._exit({status})")

    os._exit = end_or_raise
