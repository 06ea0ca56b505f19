"""Casts to 16 bits that one side makes alone are told with their line."""

from pathlib import Path

import pytest

from tests.support.checks import Checked
from tests.support.small_port import Change, line_of, write

IN_LOSS = ("nnx.tanh(self.fc1(x))", 'nnx.tanh(self.fc1(x).astype("bfloat16"))')
IN_LAYER = ("nnx.Linear(5, 4, rngs", 'nnx.Linear(5, 4, dtype="float16", rngs')


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("change", "dtype"), [(IN_LOSS, "bfloat16"), (IN_LAYER, "float16")], ids=["loss", "layer"])
def test_a_cast_of_flax_alone_is_told_with_its_line(
    change: Change, dtype: str, checked: Checked, tmp_path: Path
) -> None:
    (difference,) = checked(change).differences
    where = line_of(write(tmp_path, change), "return self.fc2(nnx").rpartition("/")[2]
    assert (difference.stage, difference.cause) == ("local_loss", None)
    assert difference.detail == f"jax computes in {dtype} at {where}, and torch does not"


def test_a_difference_of_another_kind_has_no_such_line(checked: Checked) -> None:
    (difference,) = checked(("nnx.tanh(self.fc1(x))", "nnx.tanh(self.fc1(x) + 0.001)")).differences
    assert "jax computes in" not in difference.detail
