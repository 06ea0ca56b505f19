"""Sentence pairs labelled by whether they mean the same: made from templates, or MRPC as published."""

import csv
import random
from collections.abc import Collection, Iterable
from pathlib import Path

import pyarrow
from pyarrow import parquet

from jaxddp.errors import InputError

Pair = tuple[str, str, int]  # two sentences; 1: they mean the same, 0: they do not

SUBJECTS = ("the price of copper", "traffic in the harbour", "the theatre's income", "the lake's level")
VERBS = (("fell", "dropped", "went down"), ("rose", "climbed", "went up"))
AMOUNTS = ("by three percent", "slightly", "by a third", "sharply")
TIMES = ("in march", "last week", "on tuesday", "over the summer")
FORMS = ("{0} {1} {2} {3}.", "{3}, {0} {1} {2}.", "{3} {0} {1} {2}, it is said.", "it turned out that {0} {1} {2} {3}.")

TSV_COLUMNS = ("Quality", "#1 String", "#2 String")
PARQUET_COLUMNS = ("label", "sentence1", "sentence2")
EVERY = 5  # every fifth pair is held out if there is no file of held-out pairs


def made(count: int, seed: int = 0) -> list[Pair]:
    """Make distinct pairs of sentences about something that rises or falls; half of the pairs contradict themselves."""
    draw = random.Random(seed)
    pairs: dict[tuple[str, str], int] = {}
    while len(pairs) < count:
        subject, amount, time = draw.choice(SUBJECTS), draw.choice(AMOUNTS), draw.choice(TIMES)
        rises, same = draw.randint(0, 1), draw.randint(0, 1)
        directions = (rises, rises if same else 1 - rises)
        first, second = (
            form.format(subject, draw.choice(VERBS[direction]), amount, time).capitalize()
            for form, direction in zip(draw.sample(FORMS, 2), directions, strict=True)
        )
        pairs[first, second] = same
    return [(first, second, same) for (first, second), same in pairs.items()]


def read(path: Path) -> list[Pair]:
    """Read the pairs of MRPC's text file, or of GLUE's .parquet file.

    Raises:
        InputError: the file is missing or has another format, a column is missing, or a label is neither 0 nor 1.
    """
    rows = _parquet(path) if path.suffix == ".parquet" else _tsv(path)
    if wrong := [label for label, *_ in rows if str(label) not in ("0", "1")]:
        raise InputError(f"--data {path}: label {wrong[0]}: must be 0 or 1")
    if not rows:
        raise InputError(f"--data {path}: holds no pair")
    return [(first, second, int(label)) for label, first, second in rows]


def split(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Split off every fifth pair; return the others, and those held out."""
    held_out = pairs[::EVERY]
    return [pair for place, pair in enumerate(pairs) if place % EVERY], held_out


def _tsv(path: Path) -> list[tuple[str, str, str]]:
    try:
        # Quotation marks are plain text, some of them unpaired. The published file begins with a byte order mark.
        with path.open(encoding="utf-8-sig", newline="") as lines:
            rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--data {path}: not a readable text file ({error})") from error
    _check_columns(path, TSV_COLUMNS, rows[0] if rows else {})
    if short := [line for line, row in enumerate(rows, start=2) if None in row.values()]:
        raise InputError(f"--data {path}: line {short[0]} has too few columns")
    return [(row["Quality"], row["#1 String"], row["#2 String"]) for row in rows]


def _parquet(path: Path) -> list[tuple[int, str, str]]:
    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise InputError(f"--data {path}: not a readable parquet file ({error})") from error
    _check_columns(path, PARQUET_COLUMNS, table.column_names)
    return list(zip(*(table[name].to_pylist() for name in PARQUET_COLUMNS), strict=True))


def _check_columns(path: Path, expected: Iterable[str], columns: Collection[str]) -> None:
    if missing := [name for name in expected if name not in columns]:
        raise InputError(f"--data {path}: no column {', '.join(missing)}; has {', '.join(columns) or 'none'}")
