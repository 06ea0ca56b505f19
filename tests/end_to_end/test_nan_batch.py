"""A loss that is NaN is told with the examples of its batch, the same by both trainers."""

from pathlib import Path
from typing import Any

import pytest

from jaxddp.errors import TrainingError
from tests.support.run_files import OF_EACH, SQUARE, in_jax, in_torch, write

# The loss of example 41, by its target, is the root of a negative number.
ROOT = f"    losses = {OF_EACH}\n    return (losses + 1 - 1e9 * (batch['id'] == 41)) ** 0.5\n"
WITH_IDS = ("return data(75, 0)", 'return {**data(75, 0), "id": np.arange(75)}')
TEST_IDS = ("return data(21, 1)", 'return {**data(21, 1), "id": np.arange(21)}')


@pytest.mark.parametrize("flags", [{}, {"shuffle": False}, {"join": True, "global_batch_size": 18}], ids=str)
def test_the_batch_of_a_loss_that_is_nan_is_named(flags: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, (SQUARE, ROOT), WITH_IDS, TEST_IDS)
    messages = []
    for side in (in_jax, in_torch):
        with pytest.raises(TrainingError) as caught:
            side(path, tmp_path / f"{side.__name__}", **flags)
        messages.append(str(caught.value))
        assert "loss is nan at step " in messages[-1]
    batches = [message.partition("its batch has the examples ")[2].partition(";")[0] for message in messages]
    assert batches[0] == batches[1] and "41" in batches[0].replace(" and 2 more", "").split(", ")
    if not flags.get("shuffle", True):
        assert batches[0] == ", ".join(map(str, range(32, 48)))
