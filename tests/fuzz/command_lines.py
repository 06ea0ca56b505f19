"""Random command lines and config.json files, right and wrong, from a seed."""

import dataclasses
import json
import random
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxddp.config import TrainConfig, choices
from jaxddp.config.checks import flag

KINDS = get_type_hints(TrainConfig)
NAMES = [field.name for field in dataclasses.fields(TrainConfig) if field.name != "resume"]
WORDS = [
    *(*choices.MODELS, *choices.DATASETS, *choices.OPTIMIZERS, *choices.SCHEDULES, *choices.COMM_HOOKS),
    *(*choices.DTYPES, *choices.AMP, *choices.PLATFORMS, *choices.BUFFERS, *choices.NAMED["lr_scaling"]),
    *("None", "True", "false", "", " ", "-", "--", "=", "*", "[", "**.weight", "a b", "\0", "\n", "\u202e", "é"),
    *("\udcff", "x" * 5000, "../..", "/dev/null", "/dev/zero", "/proc/self/mem", "~", "$HOME", "%s", "{}", "'", '"'),
]
INTEGERS = [0, 1, 2, 3, 4, 8, 10, 16, 30, 32, 64, 100, 1000, 2**15, 10**6, 10**8, 10**9, 2**31 - 1, 2**31, 2**32]
INTEGERS += [2**63, 2**64 - 1, 2**64, 10**30, 10**400, -1, -2, -(2**31), -(10**400)]
FLOATS = [0.0, -0.0, 0.1, 0.5, 0.9, 0.999, 1.0, 1.5, 2.0, 1e-3, 1e-8, 1e-320, 1e38, 1e39, 1e300, -1.0, -1e300]
FLOATS += [float("nan"), float("inf"), float("-inf")]
NUMBERS = ["9" * 5000, "1e400", "-1e400", "0x10", "1_000", "1e3", "٣", "1.", ".5", "+3", "--3", "nan", "infinity"]
NUMBERS += ["1,5"]


def value(rng: random.Random, kind: Any) -> Any:
    """Draw a value for a field of this type; one in eight is of another type."""
    parts = [part for part in get_args(kind) if part is not Ellipsis]
    if rng.random() < 0.125:
        return rng.choice([None, True, rng.choice(INTEGERS), rng.choice(FLOATS), rng.choice(WORDS), []])
    if get_origin(kind) is tuple:
        return [value(rng, parts[0]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 40]))]
    if get_origin(kind) is Literal:
        return rng.choice(parts)
    if parts:
        return value(rng, rng.choice(parts))
    return {int: rng.choice(INTEGERS), float: rng.choice(FLOATS), bool: rng.random() < 0.5}.get(kind, rng.choice(WORDS))


def flags(rng: random.Random) -> list[str]:
    """Draw a command line: flags with values, some misspelt, cut, joined, doubled, or without their value."""
    words: list[str] = []
    for name in rng.choices(NAMES, k=rng.choice([0, 1, 1, 2, 3, 5, 8])):
        drawn, written = value(rng, KINDS[name]), flag(name)
        if KINDS[name] is bool:
            words.append(written if drawn else f"--no-{written[2:]}")
            continue
        given = [str(part) for part in drawn] if isinstance(drawn, list) else [str(drawn)]
        if rng.random() < 0.1:
            given = [rng.choice(NUMBERS)]
        words += [f"{written}={given[0]}"] if given and rng.random() < 0.2 else [written, *given]
    if words and rng.random() < 0.3:
        place = rng.randrange(len(words))
        words[place : place + 1] = rng.choice([[], [words[place][1:]], [words[place]] * 2, [rng.choice(WORDS)]])
    return words


def config_file(rng: random.Random) -> bytes:
    """Draw the content of a config.json: right, wrong in a field, or damaged."""
    fields = {name: value(rng, KINDS[name]) for name in rng.sample(NAMES, k=rng.choice([0, 1, 1, 2, 5]))}
    if rng.random() < 0.1:
        fields[rng.choice(WORDS)] = rng.choice([[[1]], {"a": {}}, 1])
    if rng.random() < 0.1:
        fields[rng.choice(NAMES)] = rng.choice([[[]], {"a": 1}, [None], [[1, 2], "a"]])
    text = json.dumps(fields)
    damage = rng.choice([None, None, None, "bytes", "cut", "long", "deep", "other", "coded"])
    content = text.encode()
    if damage == "bytes":
        content = damaged(rng, content)
    elif damage == "cut":
        content = content[: rng.randrange(len(content) + 1)]
    elif damage == "long":
        content = b'{"epochs": ' + b"9" * 5000 + b"}"
    elif damage == "deep":
        content = rng.choice([b"[", b'{"model":']) * 100_000
    elif damage == "other":
        content = rng.choice([b"null", b"[]", b"1", b'""', b"NaN", b"\0" * 100, b"\xff\xfe"])
    elif damage == "coded":
        content = text.encode(rng.choice(["utf-16", "utf-8-sig", "utf-32"]))
    return content


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Change some bytes: flip, cut out, double, or put in others."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 10])):
        start = rng.randrange(len(changed) + 1)
        end = min(len(changed), start + rng.choice([1, 1, 4, 100]))
        changed[start:end] = rng.choice([rng.randbytes(end - start), b"", changed[start:end] * 2, rng.randbytes(8)])
    return bytes(changed)
