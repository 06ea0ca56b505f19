"""Differences between the examples of two batches are reported by entry, replica and row, and by their rule."""

import numpy as np
import pytest

from jaxddp.parity.compare.examples import examples_in_words
from jaxddp.parity.records import NO_EXAMPLE

BATCH = np.array([[3, 1, 4], [7, 6, 5]], "uint64")  # fingerprints of two replicas' examples


@pytest.mark.parametrize(
    ("flax", "expected"),
    [
        ([[3, 1], [7, 6]], "2 examples per replica in jax, 3 in torch"),
        ([[3, 1], [7, NO_EXAMPLE]], "at most 2 examples per replica in jax, 3 in torch"),  # 2 and 1
        ([[4, 3, 1], [7, 6, 5]], "the examples of replica 0, all rows: rolled by 1 row"),
        ([[1, 4, 3], [6, 5, 7]], "the examples of all replicas, all rows: rolled by -1 row"),
        ([[1, 4, 9], [6, 5, 8]], "the examples of all replicas, all rows: each row has the next one's values"),
        ([[9, 3, 1], [8, 7, 6]], "the examples of all replicas, all rows: each row has the values of the one before"),
        ([[1, 3, 4], [7, 6, 5]], "the examples of replica 0, rows 0, 1: the same rows in another order"),
        ([[5, 1, 4], [7, 6, 3]], "the examples of all replicas, rows 0, 2: the same examples, dealt to the replicas"),
        ([[7, 6, 5], [3, 1, 4]], "the examples of all replicas, all rows: the same examples, dealt to the replicas in"),
        ([[9, 1, 4], [7, 6, 5]], "the examples of replica 0, row 0: other values"),
    ],
)
def test_the_rule_by_which_examples_differ_is_told(flax: list[list[int]], expected: str) -> None:
    assert examples_in_words({"x": BATCH}, {"x": np.array(flax, "uint64")}).startswith(expected)


def test_the_entry_that_differs_is_named_and_single_rows_follow_no_rule() -> None:
    one, other = {"x": BATCH[:, :1], "y": BATCH[:, 1:2]}, {"x": BATCH[:, :1], "y": BATCH[:, 2:]}
    assert examples_in_words(one, other) == '"y" of all replicas, row 0: other values'
