"""Files of a port that patches edit: their texts as they are, and edited."""

import difflib
import os
from pathlib import Path

from jaxddp.parity.cases import PortCase
from jaxddp.parity.port import PortFile
from jaxddp.parity.port.draws import DrawnSource
from jaxddp.parity.port.replaced_files import Texts


class EditedFiles:
    """Texts of the files in a port's folder, which are never written.

    Args:
        port: the program.

    Attributes:
        texts: path -> text of the files that patches edit.
    """

    def __init__(self, port: Path):
        self.port = Path(os.path.realpath(port))
        self.texts: dict[str, str] = {}
        self._folder = self.port.parent
        self._first: dict[str, str] = {}  # texts of the files as they are

    def has(self, path: str) -> bool:
        """Return whether a file is in the port's folder."""
        return Path(os.path.realpath(path)).is_relative_to(self._folder)

    def text(self, path: str, texts: Texts) -> str | None:
        """Return the text of a file, edited or as it is; None if it cannot be read."""
        path = os.path.realpath(path)
        if path not in self._first:
            try:
                self._first[path] = Path(path).read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                return None
        return texts.get(path, self._first[path])

    def line(self, number: int, path: str, text: str) -> int:
        """Return the number of a line of a file, whose `text` was read before, in that text."""
        return moved(number, self._first[os.path.realpath(path)], text)

    def diff(self, before: Texts, after: Texts) -> str:
        """Return the unified diff of edits."""
        pairs = ((path, before.get(path, self._first[path]), text) for path, text in after.items())
        return "".join(unified(Path(path).relative_to(self._folder).as_posix(), *of_file) for path, *of_file in pairs)

    @property
    def whole(self) -> str:
        """Join all patches into one diff."""
        return self.diff(self._first, self.texts)


def edited_files(case: object) -> EditedFiles | None:
    """Return the files of a case's port; None: it is not in a file, or no port."""
    source = case.source if isinstance(case, PortCase) else None
    source = source.source if isinstance(source, DrawnSource) else source
    return EditedFiles(Path(source.path)) if isinstance(source, PortFile) else None


def moved(line: int, before: str, after: str) -> int:
    """Return the number of a line after edits.

    >>> moved(2, "a\\nb\\n", "a\\nnew\\nb\\n")
    3
    """
    matcher = difflib.SequenceMatcher(None, before.split("\n"), after.split("\n"), autojunk=False)
    for _, i1, i2, j1, j2 in matcher.get_opcodes():
        if i1 <= line - 1 < i2:
            return min(j1 + line - i1, max(j2, j1 + 1))
    return line


def unified(name: str, before: str, after: str) -> str:
    """Return the unified diff of a file, as `patch -p1` and `git apply` take it; "" if nothing differs.

    >>> print(unified("model.py", "x = 1\\n", "x = 2"), end="")
    --- a/model.py
    +++ b/model.py
    @@ -1 +1 @@
    -x = 1
    +x = 2
    \\ No newline at end of file
    """
    end = "\t" * (" " in name)  # as git ends names with spaces
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}{end}", f"b/{name}{end}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Cut text at its newlines, and nowhere else.

    >>> _lines("a\\x0cb\\nc")
    ['a\\x0cb\\n', 'c']
    """
    parts = text.split("\n")
    return [f"{line}\n" for line in parts[:-1]] + [parts[-1]] * bool(parts[-1])
