"""Pairs of layers of one shape: names that agree decide, the order of use where none do."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MEANINGS = {"q": "query", "k": "key", "v": "value", "o": "out", "output": "out", "ema": "average", "avg": "average"}
SHORTEST = 3  # letters of a beginning that abbreviates a word, as "emb" for "embedding"
# Words for kinds of layers, which all layers of one shape may have.
GENERIC = {
    *("net", "network", "module", "model", "layer", "layers", "block", "blocks", "proj", "projection", "w", "b", "l"),
    *("linear", "dense", "fc", "conv", "norm", "layernorm", "ln", "bn", "kernel", "weight", "bias", "params"),
}


class PairedNames(NamedTuple):
    """Pairs of jax's names with torch's.

    Attributes:
        pairs: the pairs, jax's names first.
        by_order: jax's names that only their order pairs off, if there are several.
    """

    pairs: dict[str, str]
    by_order: tuple[str, ...]


def pair_off(jax: Sequence[str], torch: Sequence[str]) -> PairedNames:
    """Pair as many names of each side: those that agree, then the others in their order.

    Names with the same words are a group; two groups agree that have more in common with each other than with any
    other group, and as many names, which their numbers order.

    >>> pair_off(["q_network.fc", "target_network.fc"], ["target.l", "QNet_0.l"])
    PairedNames(pairs={'q_network.fc': 'QNet_0.l', 'target_network.fc': 'target.l'}, by_order=())
    >>> pair_off(["Dense_0", "critic_2", "critic_1", "Dense_1"], ["b", "critic.0", "a", "critic.1"])[1]
    ('Dense_0', 'Dense_1')
    """
    agreed: dict[str, str] = {}
    for names, twins in _agreeing(_groups(jax), _groups(torch)):
        numbers = [[_numbers(name) for name in side] for side in (names, twins)]
        if len(names) == len(twins) and all(len({*map(tuple, of_side)}) == len(of_side) for of_side in numbers):
            agreed |= zip(sorted(names, key=_numbers), sorted(twins, key=_numbers), strict=True)
    rest = [name for name in jax if name not in agreed]
    others = [name for name in torch if name not in agreed.values()]
    pairs = agreed | dict(zip(rest, others, strict=True))
    return PairedNames({name: pairs[name] for name in jax}, tuple(rest) if len(rest) > 1 else ())


def _agreeing(
    jax: dict[frozenset[str], list[str]], torch: dict[frozenset[str], list[str]]
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield groups that are nearer to each other than to all others, and then the nearest of the others."""
    jax, torch = dict(jax), dict(torch)
    while True:
        nearness = {(one, other): _nearness(one, other) for one in jax for other in torch}
        best = [
            pair
            for pair, near in nearness.items()
            if near > 0
            and all(near > value for at, value in nearness.items() if (at[0] == pair[0]) != (at[1] == pair[1]))
        ]
        if not best:
            return
        for one, other in best:
            yield jax.pop(one), torch.pop(other)


def _nearness(one: frozenset[str], other: frozenset[str]) -> float:
    """Return the number of words in common over the number of all."""
    common = sum(any(_is_same(word, twin) for twin in other) for word in one)
    return common / max(1, len(one) + len(other) - common)


def _is_same(one: str, other: str) -> bool:
    return one == other or (min(len(one), len(other)) >= SHORTEST and (one.startswith(other) or other.startswith(one)))


def _groups(names: Sequence[str]) -> dict[frozenset[str], list[str]]:
    groups: dict[frozenset[str], list[str]] = {}
    for name in names:
        found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
        words = frozenset(MEANINGS.get(word, word) for word in map(str.lower, found) if word not in GENERIC)
        groups.setdefault(words, []).append(name)
    return groups


def _numbers(name: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", name))]
