"""What an example says of itself, for the gallery and the README."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """An entry of the gallery.

    Attributes:
        name: as its heading.
        seed: the number of the document that it is about; "": none.
        claim: what the document says, in one sentence.
        verdict: whether that is so, in a few words.
        command: runs it.
        picture: that it draws, relative to docs/; None: none.
    """

    name: str
    seed: str
    claim: str
    verdict: str
    command: str
    picture: str | None = None

    @property
    def row(self) -> str:
        """Its row of the README's table."""
        return f"| {self.seed or '-'} | {self.claim} | {self.verdict} | `{self.command}` |"
