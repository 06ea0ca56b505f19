"""Fingerprints are equal for every layout of an example and differ between examples."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jaxddp.parity.fingerprints import differing_share, differing_shares, fingerprints
from jaxddp.parity.recorder.batches import entries_of

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
IMAGES = arrays.arrays("float32", arrays.array_shapes(min_dims=3, max_dims=4, max_side=4), elements=NUMBERS)


def of(array: np.ndarray) -> list[int]:
    return fingerprints([{"x": array}])["x"].tolist()


@settings(max_examples=100, deadline=None)
@given(IMAGES)
def test_layout_and_dtype_do_not_change_the_fingerprint(images: np.ndarray) -> None:
    expected = of(images)
    assert len(expected) == len(images)
    assert of(np.moveaxis(images, 1, -1)) == expected
    assert of(images.astype("float64")) == expected
    assert of(np.asfortranarray(images)) == expected
    assert of(-images) == of(-images + np.float32(0))  # -0.0 is 0.0


@settings(max_examples=100, deadline=None)
@given(arrays.arrays("int16", (6, 3)), st.sampled_from(["int64", "uint16", "float32", "float64"]))
def test_integers_have_one_fingerprint_in_every_dtype_that_holds_them(tokens: np.ndarray, dtype: str) -> None:
    tokens = np.abs(tokens.astype("int64"))
    assert of(tokens.astype(dtype)) == of(tokens)


@settings(max_examples=200, deadline=None)
@given(arrays.arrays("float32", (2, 4), elements=NUMBERS))
def test_different_examples_have_different_fingerprints(examples: np.ndarray) -> None:
    assume(not np.array_equal(*examples))
    assert len(set(of(examples))) == 2
    images = examples.reshape(2, 2, 2)
    assert len(set(of(images))) == 2 - np.array_equal(*np.sort(examples, axis=1))


def test_the_order_of_tokens_changes_the_fingerprint() -> None:
    assert len(set(of(np.array([[1, 2, 3], [3, 2, 1], [1, 3, 2]])))) == 3


def test_the_smallest_change_of_one_pixel_changes_the_fingerprint() -> None:
    images = np.repeat(np.random.default_rng(0).normal(size=(1, 3, 8, 8)).astype("float32"), 193, axis=0)
    for changed in range(192):
        pixel = images[changed].reshape(-1)[changed : changed + 1]
        pixel[:] = np.nextafter(pixel, np.float32(np.inf))
    assert len(set(of(images))) == 193


def test_labels_and_sparse_rows_do_not_collide() -> None:
    labels = np.arange(100_000)
    assert len(set(of(labels))) == len(labels)
    sparse = np.zeros((2000, 8), "float32")
    sparse[np.arange(2000), np.arange(2000) % 8] = 1 + np.arange(2000)
    assert len(set(of(sparse))) == len(sparse)


@settings(max_examples=30, deadline=None)
@given(IMAGES, st.integers(1, 4))
def test_micro_batches_have_the_fingerprints_of_the_whole_batch(images: np.ndarray, pieces: int) -> None:
    batch = {"x": images, "y": np.arange(len(images))}
    cut = [
        {name: parts[piece] for name, parts in {n: np.array_split(a, pieces) for n, a in batch.items()}.items()}
        for piece in range(pieces)
    ]
    for name, expected in fingerprints([batch]).items():
        assert np.array_equal(fingerprints(cut)[name], expected)


def test_fingerprints_follow_entries_and_the_order_of_examples() -> None:
    batch = {"x": np.array([[1.0], [2.0]]), "y": np.array([1, 2])}
    result = fingerprints([batch])
    assert result.keys() == {"x", "y"}
    turned = fingerprints([{name: array[::-1] for name, array in batch.items()}])
    assert all(np.array_equal(turned[name], result[name][::-1]) for name in result)
    assert not np.array_equal(turned["x"], result["x"])


def test_beside_ids_only_values_that_change_places_make_examples_different() -> None:
    batches = [{"ids": np.array([7, 2]), "x": np.zeros(2)}, {"ids": np.array([5, 2]), "x": np.ones(2)}]
    result = fingerprints(batches)
    assert result["ids"].tolist() == [7, 2, 5, 2]
    one = {name: array[None] for name, array in result.items()}
    assert differing_share(one, one | {"x": one["x"] + np.uint64(1)}) == 0
    assert differing_share(one, one | {"x": np.roll(one["x"], 1, axis=1)}) == 0.5
    assert differing_share(one, one | {"ids": np.roll(one["ids"], 1, axis=1)}) == 1


def test_numbers_beyond_float32_are_hashed_without_a_warning() -> None:
    assert of(np.array([np.finfo("float64").min, 1.0])) == of(np.array([-np.inf, 1.0]))
    assert len(set(of(np.array([np.nan, 0.0, np.inf])))) == 3


def test_the_differing_share_counts_examples_and_not_entries() -> None:
    ranks, examples = 2, 3
    a = {"x": np.arange(6, dtype="uint64").reshape(ranks, examples), "y": np.zeros((ranks, examples), "uint64")}
    assert differing_share(a, a) == 0 and differing_shares(a, a) == [0, 0]
    b = {name: values.copy() for name, values in a.items()}
    b["x"][1, 2] += np.uint64(1)
    assert differing_share(a, b) == 1 / (ranks * examples)
    assert differing_shares(a, b) == [0, 1 / examples]
    b["y"][1, 2] += np.uint64(1)  # of the same example
    assert differing_share(a, b) == 1 / (ranks * examples)


def test_batches_of_different_sizes_differ_everywhere() -> None:
    a = {"x": np.arange(6, dtype="uint64").reshape(2, 3)}
    shorter = {"x": a["x"][:, :2]}
    assert differing_share(a, shorter) == 1 and differing_shares(a, shorter) == [1, 1]


def test_entries_under_other_names_are_compared_together() -> None:
    a = {"x": np.array([[1, 2]], "uint64"), "y": np.array([[5, 6]], "uint64")}
    renamed = {"image": a["x"], "label": a["y"]}
    assert differing_share(a, renamed) == 0
    assert differing_share(a, {**renamed, "label": a["y"] + np.uint64(1)}) == 1


@pytest.mark.parametrize("ids", [np.arange(8).reshape(4, 2), np.array([0.5, 1.0, 2.0, 3.0])])
def test_ids_that_are_no_vector_of_integers_are_an_entry_like_any_other(ids: np.ndarray) -> None:
    def of_replicas(ids: np.ndarray) -> dict[str, np.ndarray]:
        return {name: x[None] for name, x in fingerprints([{"ids": ids, "y": np.arange(4.0)}]).items()}

    assert differing_share(of_replicas(ids), of_replicas(ids)) == 0
    assert differing_share(of_replicas(ids), of_replicas(ids[::-1])) == 1


def test_a_vector_of_another_length_than_the_other_entries_identifies_no_examples() -> None:
    batch = {"ids": np.arange(2), "edges": np.ones((5, 2)), "kinds": np.arange(5)}
    result = fingerprints([batch])
    assert {name: x.shape for name, x in result.items()} == {"edges": (5,), "kinds": (5,)}
    assert entries_of(batch).keys() == {"edges", "kinds"}
    one = {name: x[None] for name, x in result.items()}
    assert differing_share(one, one | {"kinds": one["kinds"][:, ::-1]}) == 0.8
    of_graphs = {"graphs": np.arange(2), "edges": np.ones((5, 2)), "ids": np.arange(2)}  # several lengths: the first
    assert fingerprints([of_graphs]).keys() == entries_of(of_graphs).keys() == {"graphs", "ids"}
