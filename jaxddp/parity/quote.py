"""Quotes of lines in the user's files."""

import linecache
from dataclasses import dataclass

from jaxddp.parity.operations import SourceLine

AROUND = 3  # lines before and after a quoted one


@dataclass(frozen=True)
class Quote:
    """A line of a user's file, with the lines around it.

    Attributes:
        path, line: the file, and the number of the line in it.
        first: number of the first line of `text`.
        text: the line and up to `AROUND` lines before and after it; empty if the file is gone.
    """

    path: str
    line: int
    first: int = 1
    text: tuple[str, ...] = ()

    @classmethod
    def of(cls, line: SourceLine | None) -> "Quote | None":
        """Return a line as it is written in its file."""
        if line is None:
            return None
        linecache.checkcache(line.path)  # the user may have changed it since an earlier check
        numbers = range(max(1, line.number - AROUND), line.number + AROUND + 1)
        text = [linecache.getline(line.path, number).rstrip("\n") for number in numbers]
        while text and not text[-1]:
            text.pop()
        return cls(line.path, line.number, numbers[0], tuple(text))

    @property
    def place(self) -> str:
        """File and line: "model.py:21"."""
        return str(SourceLine(self.path, self.line))

    @property
    def itself(self) -> str:
        """Return the line without its indentation."""
        index = self.line - self.first
        return self.text[index].strip() if index < len(self.text) else ""

    @property
    def statement(self) -> str:
        """Return the line with those after it that its brackets span, as far as they are known.

        >>> Quote("port.py", 1, 1, ("tx = optax.chain(", "    optax.trace(0.9),", "    optax.scale(-1)", ")")).statement
        'tx = optax.chain(optax.trace(0.9), optax.scale(-1))'
        """
        code = self.itself
        for line in self.text[self.line - self.first + 1 :]:
            if _open_brackets(code) <= 0:
                return code
            code += f"{'' if code.endswith(('(', '[', '{')) or line.strip()[:1] in tuple(')]}') else ' '}{line.strip()}"
        return f"{code} ..." if _open_brackets(code) > 0 else code


def _open_brackets(code: str) -> int:
    return sum(x in "([{" for x in code) - sum(x in ")]}" for x in code)
