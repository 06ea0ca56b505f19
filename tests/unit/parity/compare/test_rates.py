"""Updates of which a learning rate in float32 is all that differs are equal."""

import numpy as np
import pytest

from jaxddp.parity.compare.judge import judge
from jaxddp.parity.port import Facts
from tests.unit.parity.compare.test_judge import Shown, forced, reference, ruled


def test_an_update_of_0_is_no_difference_where_the_rates_are_float32_roundings_of_each_other() -> None:
    def stop(record: Shown, step: int) -> None:
        if step == 0:
            record["update"] = {name: 0 * value for name, value in record["update"].items()}

    theirs = reference(Facts())
    theirs[0]["update"] = {name: 1e-8 * value for name, value in theirs[0]["update"].items()}
    for group in theirs[0].notes["groups"]:
        group["lr"] = 1e-9
    ours = forced(theirs)
    stop(ours[0], 0)
    assert "update" not in judge(theirs, ours, Facts(), "AdamW", highest=0.1).first  # type: ignore[arg-type]
    assert 0.5 < ruled(stop).first["update"].residual <= 1.0  # 0 is no rounding of 0.1


@pytest.mark.parametrize(
    ("share", "equal"),
    [
        (float(np.float32(0.1)) / 0.1, True),
        (float(np.nextafter(np.float32(0.1), np.float32(1))) / 0.1, True),
        (1 + 1.5e-8, False),  # clipping without the epsilon, say
        (float(np.float32(0.1001)) / 0.1, False),  # another rate
    ],
    ids=["float32", "next float32", "no float32", "another rate"],
)
def test_a_rate_in_float32_is_no_difference(share: float, equal: bool) -> None:
    def change(record: Shown, step: int) -> None:
        record["update"]["fc.weight"] *= share

    judgement = ruled(change)
    assert ("update" not in judgement.first) == equal
    assert judgement.rate_rounding == (pytest.approx(abs(share - 1), rel=1e-6) if equal else 0.0)
    assert (judgement.results()["update"].tensors["fc.weight"][1] < 1e-15) == equal
