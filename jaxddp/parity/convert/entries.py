"""Lines of the table `names`, and the arrays that fall under each."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxddp.errors import InputError
from jaxddp.parity.port.rules import NUMBER, Names, Rule, source


class RuleError(InputError):
    """A rule of `names` that does not fit the two models; the message names the entry."""


class NoTwinError(Exception):
    """An array without a twin, and why; never leaves the converter."""


@dataclass(frozen=True)
class Entry:
    """Line of `names` that applies to a jax array.

    Attributes:
        key: jax's prefix; None: there is no such line.
        value: torch's prefix, or a rule, as given.
        rule: the same as a rule.
        rest: what follows the prefix in the array's name.
    """

    key: str | None
    value: str | Rule
    rule: Rule
    rest: str

    def paths(self, numbers: Sequence[tuple[int, ...]] = ()) -> list[str]:
        """Return the array's names with torch's module names in place of jax's.

        Args:
            numbers: for each of the rule's layers, its numbers in torch's stacks; (): the names keep their `NUMBER`.
        """
        pairs = zip(self.rule.layers, numbers or [()] * len(self.rule.layers), strict=True)
        return [numbered(layer + self.rest, of_layer).lstrip(".") for layer, of_layer in pairs]

    def error(self, says: str) -> RuleError:
        """Return an error in this line."""
        return RuleError(f'names: "{self.key}": {source(self.value)}: {says}')


def find_entry(jax: str, names: Names) -> Entry:
    """Find the line with the longest prefix of a jax name.

    >>> find_entry("blocks.0.out.kernel", {"blocks": "layers", "blocks.0.out": "layers.0.proj"}).paths()
    ['layers.0.proj.kernel']
    """
    for prefix in sorted(names, key=len, reverse=True):
        if jax == prefix or jax.startswith(f"{prefix}."):
            value = names[prefix]
            return Entry(prefix, value, value if isinstance(value, Rule) else Rule((value,)), jax[len(prefix) :])
    return Entry(None, jax, Rule((jax,)), "")


def numbered(name: str, place: tuple[int, ...]) -> str:
    """Put the numbers of layers into a name.

    >>> numbered("stages.{}.layers.{}.fc", (1, 0))
    'stages.1.layers.0.fc'
    """
    for number in place:
        name = name.replace(NUMBER, str(number), 1)
    return name
