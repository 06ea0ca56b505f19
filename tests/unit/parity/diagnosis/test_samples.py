"""Mistakes of samplers that are written here: each is named, and no other."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from jaxddp.parity.diagnosis.samples import SampleEvidence, explain_samples
from jaxddp.parity.diagnosis.search.decide import Ruling
from jaxddp.parity.fingerprints import Fingerprints, differing_share
from jaxddp.parity.report.sentences import line

RANKS, BATCH, SIZE = 2, 3, 20
STEPS = 10
EPOCH = 4  # steps: 20 examples are 10 for each replica, whose last batch is filled up with two of its first


def epoch_of(rank: int, epoch: int, drop_last: bool = False) -> np.ndarray:
    """Return a replica's examples in one epoch."""
    order = np.random.default_rng(epoch).permutation(SIZE)[rank::RANKS]
    if drop_last:
        return order[: len(order) // BATCH * BATCH]
    return np.concatenate([order, order[: -len(order) % BATCH]])


def stream(rank: int, drop_last: bool = False) -> np.ndarray:
    return np.concatenate([epoch_of(rank, epoch, drop_last) for epoch in range(STEPS)])


def examples(step: int, drop_last: bool = False) -> np.ndarray:
    return np.stack([stream(rank, drop_last)[step * BATCH :][:BATCH] for rank in range(RANKS)])


def hashed(of: np.ndarray, salt: int) -> np.ndarray:
    return (of.astype("uint64") * np.uint64(2654435761) + np.uint64(salt)) ** np.uint64(3)


def batch(of: np.ndarray, masks: np.ndarray) -> Fingerprints:
    return {"x": hashed(of, 7), "y": hashed(of % 5, 11), "mask": hashed(masks, 13)}


def masks(step: int) -> np.ndarray:
    return 1000 + step * 100 + np.arange(RANKS * BATCH).reshape(RANKS, BATCH)


def right(step: int) -> Fingerprints:
    return batch(examples(step), masks(step))


Faulty = Callable[[int], Fingerprints]


def ruling_of(torch: Faulty, jax: Faulty, epoch: int | None = EPOCH, restored_at: int | None = None) -> Ruling:
    records = ([of(step) for step in range(STEPS)] for of in (torch, jax))
    return explain_samples(SampleEvidence(*records, epoch, restored_at))


def names(faulty: Faulty, **options: int | None) -> set[tuple[str, ...]]:
    ruling = ruling_of(right, faulty, **options)
    assert all(hypothesis.residual == 0 for hypothesis in ruling.named)
    return {hypothesis.faults for hypothesis in ruling.named}


def first_order_again(step: int) -> Fingerprints:
    return batch(examples(step % EPOCH), masks(step))


def end_dropped(step: int) -> Fingerprints:
    return batch(examples(step, drop_last=True), masks(step))


def rank_zeros(step: int) -> Fingerprints:
    return batch(np.repeat(examples(step)[:1], RANKS, axis=0), masks(step))


def masks_of_rank_zero(step: int) -> Fingerprints:
    return batch(examples(step), np.repeat(masks(step)[:1], RANKS, axis=0))


def masks_written_again(step: int) -> Fingerprints:
    return batch(examples(step), masks(step + 1))


def contiguous_of_batch(step: int) -> Fingerprints:
    return batch(np.stack([examples(step).T.ravel()[r * BATCH :][:BATCH] for r in range(RANKS)]), masks(step))


def contiguous_of_epoch(step: int) -> Fingerprints:
    epoch, at = divmod(step, EPOCH)
    order = np.stack([epoch_of(rank, epoch) for rank in range(RANKS)]).T.ravel()
    shard = len(order) // RANKS
    return batch(np.stack([order[r * shard :][:shard][at * BATCH :][:BATCH] for r in range(RANKS)]), masks(step))


def labels_of_the_next(step: int) -> Fingerprints:
    fingerprints = right(step)
    moved = fingerprints["y"].copy()
    moved[1] = np.roll(moved[1], -1)
    return {**fingerprints, "y": moved}


def resumed_at(at: int) -> Faulty:
    beginning = at - at % EPOCH
    return lambda step: batch(examples(step if step < at else step - at + beginning), masks(step))


def shuffled(step: int) -> Fingerprints:
    return batch(np.random.default_rng((9, step)).permuted(examples(step), axis=1), masks(step))


@pytest.mark.parametrize(
    ("faulty", "name"),
    [
        (first_order_again, "set_epoch_missing"),
        (end_dropped, "padding_or_dropping"),
        (rank_zeros, "same_shard"),
        (contiguous_of_batch, "shards_in_blocks"),
        (contiguous_of_epoch, "shards_in_blocks"),
        (labels_of_the_next, "neighbours_values"),
        (masks_of_rank_zero, "same_dropout_mask"),
        (masks_written_again, "aliased_buffers"),
        (resumed_at(2), "sampler_offset_lost"),
        (resumed_at(7), "sampler_offset_lost"),
    ],
)
def test_each_mistake_is_named_and_no_other(faulty: Faulty, name: str) -> None:
    assert names(faulty) == {(name,)}


@pytest.mark.parametrize("at", [2, 7])
def test_a_known_restore_is_named_with_its_step(at: int) -> None:
    assert names(resumed_at(at), restored_at=at) == {("sampler_offset_lost",)}
    assert f"from step {at + 1} on" in line(ruling_of(right, resumed_at(at), restored_at=at).named[0])


def test_padding_is_named_where_the_reference_drops_the_last_batch() -> None:
    ruling = ruling_of(end_dropped, right, epoch=EPOCH - 1)
    assert {hypothesis.faults for hypothesis in ruling.named} == {("padding_or_dropping",)}
    assert re.fullmatch(r"each replica gets \d+ examples per epoch in jax and \d+ in torch", ruling.named[0].measured)


def test_without_the_length_of_an_epoch_only_mistakes_that_need_none_are_named() -> None:
    assert not names(first_order_again, epoch=None) & {("set_epoch_missing",)}
    assert names(rank_zeros, epoch=None) == {("same_shard",)}
    assert names(masks_of_rank_zero, epoch=None) == {("same_dropout_mask",)}


def test_another_order_gets_no_name() -> None:
    assert names(shuffled) == set()


def test_a_mistake_that_is_missing_at_one_step_is_not_named() -> None:
    assert names(lambda step: rank_zeros(step) if step != 5 else right(step)) == set()


def test_examples_are_recognised_under_other_entry_names() -> None:
    """Two loaders may give the arrays of a batch different names."""

    def renamed(of: Faulty) -> Faulty:
        return lambda step: {"image": of(step)["x"], "label": of(step)["y"], "keep": of(step)["mask"]}

    for step in range(STEPS):
        assert differing_share(right(step), renamed(right)(step)) == 0
        assert differing_share(right(step), renamed(shuffled)(step)) > 0
    everything = lambda step: {name: np.repeat(ids[:1], RANKS, axis=0) for name, ids in right(step).items()}  # noqa: E731
    assert names(renamed(everything)) == {("same_shard",)}


def with_ids(of: Faulty, values: int = 0) -> Faulty:
    """Add the numbers of the examples to a batch, and a number to the fingerprints of its images."""
    return lambda step: {**of(step), "ids": examples(step).astype("uint64"), "x": of(step)["x"] + np.uint64(values)}


def test_beside_ids_values_may_differ_but_not_change_places() -> None:
    equal = [differing_share(with_ids(right)(step), with_ids(right, 1)(step)) for step in range(STEPS)]
    assert not any(equal)
    ruling = ruling_of(with_ids(right), with_ids(labels_of_the_next, 1))
    (named,) = ruling.named
    assert named.faults == ("neighbours_values",)
    assert line(named) == 'each example of replica 1 has the next one\'s values (only the "y")'


def test_a_batch_of_another_size_is_named_by_both_sizes() -> None:
    def twice(step: int) -> Fingerprints:
        return {name: np.concatenate([ids, ids], 1) if step else ids for name, ids in right(step).items()}

    (named,) = ruling_of(right, twice).named
    size = len(examples(0)[0])
    assert line(named) == f"{2 * size} examples per replica, the reference has {size}"
    assert named.measured == "the batches of step 2"
