"""Entry of an example in the gallery and in the README."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """An entry of the gallery.

    Attributes:
        name: heading on the page.
        seed: number of the document that the example is about; "" if there is none.
        claim: the document's claim, in one sentence.
        verdict: whether the claim is true, in a few words.
        command: command that runs the example.
        picture: picture that the command draws, relative to docs/; None if there is none.
    """

    name: str
    seed: str
    claim: str
    verdict: str
    command: str
    picture: str | None = None

    @property
    def row(self) -> str:
        """Row of the README's table: the name, linked to its section of docs/gallery.md, and the command.

        >>> Example("Ring all-reduce", "001", "", "", "python -m examples.ring").row
        '| [Ring all-reduce](docs/gallery.md#ring-all-reduce) | `python -m examples.ring` |'
        """
        anchor = re.sub(r"[^\w -]", "", self.name.lower()).replace(" ", "-")
        return f"| [{self.name}](docs/gallery.md#{anchor}) | `{self.command}` |"
