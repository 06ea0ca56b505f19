"""Sampler: equality with torch.utils.data.DistributedSampler, index for index, and the shard table."""

import random
import re
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler as TorchSampler

from jaxddp.data.sampler import DistributedSampler, epoch_indices, shard_table
from jaxddp.errors import InputError

SEEDS = (0, 1, 1337, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 2000)


def configurations(count):
    """Yield random arguments of `epoch_indices`: mostly small datasets, often fewer examples than replicas."""
    rng = random.Random(0)
    for number in range(count):
        largest = 50_000 if number % 100 == 99 else rng.choice((1, 20, 500, 500, 500))
        yield {
            "dataset_size": rng.randint(0, largest),
            "num_replicas": rng.randint(1, 17),
            "shuffle": rng.random() < 0.75,
            "seed": rng.choice(SEEDS) + rng.randint(0, 500),
            "epoch": rng.randint(0, 1000),
            "drop_last": rng.random() < 0.5,
        }


def torch_samplers(dataset_size, num_replicas, *, shuffle=True, seed=0, epoch=0, drop_last=False):
    for rank in range(num_replicas):
        sampler = TorchSampler(range(dataset_size), num_replicas, rank, shuffle, seed, drop_last)
        sampler.set_epoch(epoch)
        yield sampler


def torch_indices(**configuration):
    return np.array([list(sampler) for sampler in torch_samplers(**configuration)], dtype=np.int64)


def same(a, b):
    return a.shape == b.shape and bool((a == b).all())


def test_3000_configurations_equal_torchs_index_for_index():
    kinds = Counter()
    for configuration in configurations(3000):
        ours = epoch_indices(**configuration)
        assert ours.dtype == np.int64
        assert same(ours, torch_indices(**configuration)), configuration
        size, replicas = configuration["dataset_size"], configuration["num_replicas"]
        kinds["all"] += 1
        kinds["empty"] += size == 0
        kinds["more replicas than examples"] += 0 < size < replicas
        kinds["padding repeats the dataset"] += 0 < 2 * size < replicas and not configuration["drop_last"]
        kinds["nothing to drop"] += size > 0 and size % replicas == 0 and configuration["drop_last"]
        kinds["large"] += size > 500
    assert kinds["all"] == 3000
    assert min(kinds.values()) >= 20, kinds


def test_the_sampler_class_equals_torchs():
    for configuration in configurations(200):
        size = configuration["dataset_size"]
        for theirs in torch_samplers(**configuration):
            arguments = (theirs.num_replicas, theirs.rank, theirs.shuffle, theirs.seed, theirs.drop_last)
            for ours in (DistributedSampler(size, *arguments), DistributedSampler(range(size), *arguments)):
                ours.set_epoch(theirs.epoch)
                assert vars(theirs).items() <= vars(ours).items() | {("dataset", theirs.dataset)}
                assert len(ours) == len(theirs)
                assert list(ours) == list(theirs)


def test_torchs_dataloader_accepts_the_sampler():
    sampler = DistributedSampler(10, num_replicas=3, rank=1, seed=4)
    loader = torch.utils.data.DataLoader(range(10), batch_size=2, sampler=sampler)
    assert torch.cat(list(loader)).tolist() == epoch_indices(10, 3, seed=4)[1].tolist()


def pcg64(*, dataset_size, num_replicas, shuffle, seed, epoch, drop_last):
    dealt = epoch_indices(dataset_size, num_replicas, shuffle=False, drop_last=drop_last)
    order = np.random.default_rng(seed + epoch).permutation(dataset_size)
    return order[dealt] if shuffle else dealt


def contiguous(*, num_replicas, **others):
    indices = epoch_indices(num_replicas=num_replicas, **others)
    return indices.T.reshape(num_replicas, -1)


def padded_with_the_last(*, dataset_size, num_replicas, **others):
    indices = epoch_indices(dataset_size, num_replicas, **others).T.ravel()
    indices[dataset_size:] = indices[dataset_size - 1 : dataset_size]
    return indices.reshape(-1, num_replicas).T


FAULTS = {
    "epoch ignored": lambda epoch, **others: epoch_indices(**others),
    "epoch counted from 1": lambda epoch, **others: epoch_indices(epoch=epoch + 1, **others),
    "seed ignored": lambda seed, **others: epoch_indices(**others),
    "always shuffled": lambda shuffle, **others: epoch_indices(**others),
    "padding missing": lambda drop_last, **others: epoch_indices(drop_last=True, **others),
    "drop_last ignored": lambda drop_last, **others: epoch_indices(**others),
    "padding repeats the last example": padded_with_the_last,
    "contiguous shards": contiguous,
    "PCG64 instead of MT19937": pcg64,
    "a step's replicas reversed": lambda **arguments: epoch_indices(**arguments)[::-1],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_detects_a_fault(fault):
    caught = sum(
        not same(FAULTS[fault](**configuration), torch_indices(**configuration)) for configuration in configurations(99)
    )
    assert caught >= 10, f"{fault}: caught in {caught} of 99 configurations"


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((10, 2, 2), "rank 2: must be from 0 to 1"),
        ((10, 2, -1), "rank -1: must be from 0 to 1"),
        ((10, 0, 0), "num_replicas 0: must be at least 1"),
        ((-1, 2, 0), "dataset_size -1: must be at least 0"),
    ],
)
def test_errors_name_the_bad_argument(arguments, words):
    with pytest.raises(InputError, match=words):
        DistributedSampler(*arguments)


def test_seed_plus_epoch_must_be_a_valid_torch_seed():
    with pytest.raises(InputError, match="seed 18446744073709551616"):
        epoch_indices(10, 2, seed=2**64 - 1, epoch=1)
    with pytest.raises(ValueError, match="Overflow"):
        torch_indices(dataset_size=10, num_replicas=2, seed=2**64 - 1, epoch=1)


def table(dataset_size, num_replicas, batch_size, **options):
    indices = epoch_indices(dataset_size, num_replicas, **options)
    return shard_table(indices, batch_size, dataset_size)


def lines(text):
    return text.strip("\n").split("\n")


def test_shard_table_names_dropped_examples():
    assert table(9, 2, 3, shuffle=False, drop_last=True).split("\n") == lines("""
          | step 1   | step 2
----------+----------+-------
replica 0 | x1 x3 x5 | x7
replica 1 | x2 x4 x6 | x8

9 examples on 2 replicas: 1 dropped, so that all get equally many: x9
""")


def test_a_wide_table_continues_below():
    text = table(1437, 2, 32)
    assert max(map(len, text.split("\n"))) <= 100
    blocks = text.split("\n\n")
    headings = [block.split("\n")[0].strip(" |") for block in blocks[:4]]
    assert headings == ["step 1", "step 1 continued", "step 1 continued", "step 2"]
    for rank, expected in enumerate(epoch_indices(1437, 2)):
        row = " ".join(line.split("|", 1)[1] for line in text.split("\n") if line.startswith(f"replica {rank}"))
        assert [int(number) - 1 for number in re.findall(r"x(\d+)", row)] == expected.tolist()
    assert blocks[-1] == "1437 examples on 2 replicas: 1 repeated (*), so that all get equally many: x516"


def test_small_steps_are_side_by_side():
    assert table(20, 2, 1, shuffle=False).split("\n") == lines("""
          | step 1 | step 2 | step 3 | step 4 | step 5 | step 6 | step 7 | step 8 | step 9 | step 10
----------+--------+--------+--------+--------+--------+--------+--------+--------+--------+--------
replica 0 | x1     | x3     | x5     | x7     | x9     | x11    | x13    | x15    | x17    | x19
replica 1 | x2     | x4     | x6     | x8     | x10    | x12    | x14    | x16    | x18    | x20

20 examples on 2 replicas: each used once
""")


@pytest.mark.parametrize(
    "dataset_size, num_replicas, options, closing",
    [
        (3, 5, {"drop_last": True}, "3 examples on 5 replicas: 3 dropped, so that all get equally many: x1 x2 x3"),
        (2, 5, {"shuffle": False}, "2 examples on 5 replicas: 3 repeated (*), so that all get equally many: x1 x2 x1"),
        (1, 1, {}, "1 example on 1 replica: each used once"),
        (0, 4, {}, "0 examples on 4 replicas: each used once"),
        (
            29,
            15,
            {"shuffle": False, "drop_last": True},
            "29 examples on 15 replicas: 14 dropped, so that all get equally many: "
            "x16 x17 x18 x19 x20 x21 x22 x23 x24 x25 x26 x27 ...",
        ),
    ],
)
def test_shard_table_ends_with_the_repeated_and_dropped_examples(dataset_size, num_replicas, options, closing):
    assert table(dataset_size, num_replicas, 4, **options).split("\n")[-1] == closing


def test_shard_table_refuses_a_batch_size_below_one():
    with pytest.raises(InputError, match="per_replica_batch_size 0"):
        table(9, 2, 0)
