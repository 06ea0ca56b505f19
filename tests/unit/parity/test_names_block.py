"""Tables of names are written into programs, with the import that their rules need."""

import pytest

from jaxddp.parity.port import flattened, fused
from jaxddp.parity.port.names_block import import_line, names_block, with_names

TABLE = {"a": "b", "qkv": fused("q", "k", "v"), "fc": 'flattened("fc1", (3, 2))'}
BLOCK = 'names = {\n    "a": "b",\n    "qkv": fused("q", "k", "v"),\n    "fc": flattened("fc1", (3, 2)),\n}\n'
FUTURE = "from __future__ import annotations\n"
IMPORT = "from jaxddp.parity import flattened, fused\n"


def test_rules_are_written_as_their_source() -> None:
    assert names_block(TABLE) + "\n" == BLOCK
    assert import_line(TABLE) + "\n" == IMPORT
    assert import_line({"a": "b"}) == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"""A port."""\n\nimport torch\nx = 1\n', f'"""A port."""\n\nimport torch\n{IMPORT}x = 1\n\n{BLOCK}'),
        ("x = 1\n", f"{IMPORT}x = 1\n\n{BLOCK}"),
        (f"{FUTURE}x = 1\n", f"{FUTURE}{IMPORT}x = 1\n\n{BLOCK}"),
        (f"{IMPORT}names = {{}}\ny = 2\n", f"{IMPORT}{BLOCK}y = 2\n"),
        (
            "from jaxddp.parity import fused\nnames = {}\n",
            f"from jaxddp.parity import fused\nfrom jaxddp.parity import flattened\n{BLOCK}",
        ),
    ],
    ids=["docstring", "no import", "future", "has both", "has one"],
)
def test_the_import_is_added_where_it_is_missing(before: str, after: str) -> None:
    written = with_names(before, TABLE)
    assert written == after
    names: dict = {}
    exec(written, names)
    assert names["names"] == TABLE | {"fc": flattened("fc1", (3, 2))}
    assert with_names(written, TABLE) == written


def test_constants_are_written_beside_the_table() -> None:
    written = with_names(before := 'x = 1\nno_twin = ["old"]\n', {"a": "b"}, ["old", "mask"])
    assert written == 'x = 1\nno_twin = ["old", "mask"]\n\nnames = {\n    "a": "b",\n}\n'
    assert with_names(before, {}, ["mask"]) == 'x = 1\nno_twin = ["mask"]\n'
    assert with_names("x = 1\n", {}, ["mask"]) == 'x = 1\n\nno_twin = ["mask"]\n'
