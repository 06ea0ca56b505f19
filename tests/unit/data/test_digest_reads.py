"""A digest of sampled data reads each sample once, and few again; data that augment themselves keep their digest."""

import numpy as np

from jaxddp.data.sources.digests import PROBES, SAMPLES, example_digest


def test_each_sample_is_read_once_and_few_again() -> None:
    reads: list[int] = []

    def read(index: int) -> dict[str, np.ndarray]:
        reads.append(index)
        return {"x": np.full(2, index)}

    first = example_digest(10**6, read)
    assert len(reads) <= SAMPLES + PROBES and len({*reads}) == SAMPLES
    assert first == example_digest(10**6, lambda index: {"x": np.full(2, index)})
    assert first != example_digest(10**6, lambda index: {"x": np.full(2, index + (index == 0))})


def test_data_that_augment_themselves_keep_their_digest() -> None:
    random = np.random.default_rng(0)
    digests = {example_digest(1000, lambda index: {"x": random.normal(size=2)}) for _ in range(3)}
    assert len(digests) == 1
