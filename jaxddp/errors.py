"""Errors that a user can act on: one line, exit code 2, no traceback."""

import contextlib
import difflib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

BAD_INPUT, LOST, INTERRUPTED = 2, 69, 130  # exit codes; 69 is EX_UNAVAILABLE of sysexits.h
LONGEST = 10_000  # characters of an error's message or a printed line
PATIENCE = 30.0  # seconds between two lines that report a wait
# Packages that are imported only where they are needed -> what installs them.
# Package that an import may lack -> what installs it.
INSTALLED_BY = {
    **{"torch": "torch>=2.9", "mlflow": "mlflow-skinny", "PIL": "pillow", "ray": "ray[train]"},
    **{name: name for name in ("wandb", "matplotlib", "transformers", "tokenizers", "pyarrow", "equinox")},
}
OUT_OF_MEMORY = ("resource_exhausted", "can't allocate memory", "out of memory", "can't start new thread")


class _OneLineError(Exception):
    """An exception whose message is one line, whatever text of a user, a file or another process it quotes."""

    def __init__(self, message: object = ""):
        super().__init__(on_one_line(str(message)))


class InputError(_OneLineError, ValueError):
    """Bad input. The message names the flag or tensor, its value, and what would be right.

    The command line prints the message as one line and exits with code 2; library users can catch a `ValueError`.

    >>> print(InputError("--model a\\nb: unknown"))
    --model a\\nb: unknown

    Args:
        message: one line.
        frames: the user's lines of code through which it was raised, the innermost last.
    """

    def __init__(self, message: str = "", frames: tuple[str, ...] = ()):
        super().__init__(message)
        self.frames = frames


class TrainingError(_OneLineError, RuntimeError):
    """Training that cannot continue: the loss is not finite, or replicas differ.

    The command line prints the message as one line and exits with code 2.
    """


class NotFiniteError(TrainingError):
    """A loss or a gradient that is NaN or infinite."""


class MovedError(TrainingError):
    """A folder that was moved or removed while a run wrote to it."""


class LostError(TrainingError):
    """Another process of the run, or the connection to it, is lost: the same command may continue it (exit code 69)."""


class DriftError(TrainingError):
    """Replicas that should be equal and differ.

    Args:
        message: what differs, and on which replica.
        healthy: a replica whose arrays all equal the majority's; None: there is no majority.
    """

    def __init__(self, message: str, healthy: int | None = None):
        super().__init__(message)
        self.healthy = healthy


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that an error ends: the same for the command line and the other processes.

    >>> [exit_code(kind()) for kind in (InputError, TrainingError, LostError, KeyboardInterrupt, KeyError)]
    [2, 2, 69, 130, 1]
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, LostError):
        return LOST
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return BAD_INPUT if isinstance(error, InputError | TrainingError | OSError) or tells_of_memory(error) else 1


def tells_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, XLA or torch says that there is not enough memory."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in message for words in OUT_OF_MEMORY)
    )


def not_installed(error: BaseException) -> str:
    """Return how to install the optional package that an import lacks; "" for any other error.

    >>> not_installed(ModuleNotFoundError(name="torch")), not_installed(ModuleNotFoundError(name="torch.typo"))
    ('torch is not installed: pip install "torch>=2.9"', '')
    """
    package = error.name if isinstance(error, ModuleNotFoundError) else None
    return f'{package} is not installed: pip install "{INSTALLED_BY[package]}"' if package in INSTALLED_BY else ""


def check_name(flag: str, name: str, known: Iterable[str], synonyms: Mapping[str, str] = {}) -> None:
    """Raise `InputError` unless `name` is one of `known`; suggest the closest match.

    Args:
        synonyms: names of other programs -> one of `known`.

    >>> check_name("--model", "mpl", ["linear", "mlp"])
    Traceback (most recent call last):
    ...
    jaxddp.errors.InputError: --model mpl: unknown; did you mean mlp? (one of linear, mlp)
    """
    known = list(known)
    if name not in known:
        raise InputError(name_error(flag, name, known, synonyms))


def name_error(flag: str, name: str, known: Sequence[str], synonyms: Mapping[str, str] = {}) -> str:
    """Return the message about a name that is not known; see `check_name`.

    >>> name_error("--amp", "BF16", ["none", "bf16"])
    '--amp BF16: unknown; did you mean bf16? (one of none, bf16)'
    >>> name_error("--amp", "fp32", ["none", "bf16"], {"fp32": "none"})
    '--amp fp32: unknown; did you mean none? (one of none, bf16)'
    """
    words = {word.lower(): word for word in known}
    near = [synonyms[name.lower()]] if name.lower() in synonyms else []
    near += [words[word] for word in difflib.get_close_matches(name.lower(), words, n=1, cutoff=0.3)]
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{flag} {name}: unknown{hint} (one of {', '.join(known)})"


def check_weights(name: str, shape: tuple[int, ...], weights: Any) -> None:
    """Check that a (losses, weights) pair has one weight per loss; a scalar loss takes weights of any shape.

    Args:
        name: name of the loss function, for the message.
        shape: shape of the losses.
        weights: weights of the losses; None: none are given.

    Raises:
        InputError: the shapes differ.

    >>> check_weights("jax_loss", (8,), "accuracy")
    Traceback (most recent call last):
    ...
    jaxddp.errors.InputError: jax_loss: returns losses (8,) and weights of str; must have one weight for each loss
    """
    given = tuple(getattr(weights, "shape", ()))
    if weights is not None and shape and given != tuple(shape):
        beside = f"{given}" if given else f"of {type(weights).__name__}"
        raise InputError(
            f"{name}: returns losses {tuple(shape)} and weights {beside}; must have one weight for each loss"
        )


def listed(problems: Sequence[str], most: int = 3, joint: str = "; ") -> str:
    """Join the first few problems or names into one line.

    >>> listed(["a", "b", "c", "d"])
    'a; b; c; ...'
    """
    return joint.join([*problems[:most], *["..."] * (len(problems) > most)])


def count(number: int, noun: str) -> str:
    """Format a number with its noun.

    >>> count(1, "replica"), count(2, "replica")
    ('1 replica', '2 replicas')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def on_one_line(text: str, most: int = LONGEST) -> str:
    """Escape line breaks, control characters and others that are not printable; leave out the middle of a long text.

    Its own output passes unchanged.

    >>> print(on_one_line("--model a\\nb\\x1b[2J: unknown"), on_one_line("1234567890", most=9))
    --model a\\nb\\x1b[2J: unknown 123...890
    """
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def shortened(text: str, most: int = 100) -> str:
    """Put text of a file or another process on one line; cut the end off a long one, and say how long it was.

    >>> shortened("short"), shortened("1" * 300, most=10)
    ('short', '1111111111... (300 characters)')
    """
    start = on_one_line(text[:most])
    return start if len(text) <= most else f"{start}... ({len(text)} characters)"


def reason(error: BaseException, most: int = 300) -> str:
    """Return what an exception says, without the pages that frameworks append; or its type, if it says nothing.

    That is its first line, and the second after a colon.

    >>> reason(ValueError("Cannot read:\\n  no file\\nFor simplicity, ...")), reason(KeyError())
    ('Cannot read: no file', 'KeyError')
    """
    says = error.msg if isinstance(error, SyntaxError) else str(error)  # its place is said elsewhere
    lines = [line.strip() for line in says.strip().splitlines() if line.strip()]
    return shortened(" ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]), most) or type(error).__name__


def described(error: BaseException, most: int = 300) -> str:
    """Return an exception's type and what it says, in one line; of a missing package, what installs it.

    >>> described(ZeroDivisionError("division by zero")), described(KeyError())
    ('ZeroDivisionError: division by zero', 'KeyError: without a message')
    >>> described(ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow"))
    'pyarrow is not installed: pip install "pyarrow"'
    """
    says = reason(error, most) if str(error).strip() else "without a message"
    return not_installed(error) or f"{type(error).__name__}: {says}"


def tell(line: str) -> None:
    """Print one line on stderr, unless it is closed, in one write, which a launcher does not mix with others."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{on_one_line(line)}\n", end="", file=sys.stderr, flush=True)


def telling(line: Callable[[float], str], every: float = PATIENCE) -> contextlib.AbstractContextManager[None]:
    """Print a line on stderr from time to time while the body of the `with` statement runs.

    Args:
        line: returns the line, after so many seconds of the body.
        every: seconds between two lines.

    >>> with telling(lambda seconds: f"waited {seconds:.0f} s"):
    ...     pass
    """
    return repeating(lambda seconds: tell(line(seconds)), every)


@contextlib.contextmanager
def repeating(act: Callable[[float], None], every: float) -> Iterator[None]:
    """Call a function from time to time, in a thread, while the body of the `with` statement runs.

    Args:
        act: called with the seconds since the body began.
        every: seconds between two calls.
    """
    ended, begun = threading.Event(), time.monotonic()

    def repeat() -> None:
        while not ended.wait(every):
            act(time.monotonic() - begun)

    thread = threading.Thread(target=repeat, name="repeating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def differences(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Describe each array that is missing, left over, or of another shape.

    Args:
        actual, expected: name -> array, or any other object with a `shape`.

    Returns:
        One line per problem; empty if names and shapes are equal.

    >>> import numpy as np
    >>> differences({"a": np.zeros(2), "c": np.zeros(1)}, {"a": np.zeros(3), "b": np.zeros(1)})
    ['a has shape (2,) and not (3,)', 'left over c', 'missing b']
    """
    problems = [f"missing {name}" for name in expected.keys() - actual.keys()]
    problems += [f"left over {name}" for name in actual.keys() - expected.keys()]
    problems += [
        f"{name} has shape {tuple(actual[name].shape)} and not {tuple(expected[name].shape)}"
        for name in expected.keys() & actual.keys()
        if tuple(actual[name].shape) != tuple(expected[name].shape)
    ]
    return sorted(problems)


def complex_error(field: str, name: str, dtype: object) -> InputError:
    """Return the error for a complex array of a model.

    >>> str(complex_error("torch_model", "a", "complex64"))
    'torch_model: a is complex64; must be two real arrays, its real and its imaginary part'
    """
    return InputError(f"{field}: {name} is {dtype}; must be two real arrays, its real and its imaginary part")
