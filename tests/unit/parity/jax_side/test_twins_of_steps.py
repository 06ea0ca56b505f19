"""Tables of names of ports with a `torch_step`: networks in the order of their use, and their flattened images."""

from pathlib import Path

import pytest

from jaxddp.parity.cases import PortCase
from jaxddp.parity.jax_side.twins import FindTwins, FoundTwins
from jaxddp.parity.port import PortFile
from tests.support.small_port import Change, write
from tests.support.step_ports import NAMES, STEP_PORT

WRONG: Change = ('+ 0.9 * nets["target"]', '+ 0.5 * nets["target"]')  # changes the loss under every table


def found_in(path: Path) -> FoundTwins:
    return FindTwins(PortCase(PortFile(str(path)), 1)).run(lambda where: None)


def test_networks_pair_off_in_the_order_of_their_use_and_copies_are_flattened_alike(tmp_path: Path) -> None:
    names = found_in(write(tmp_path, text=STEP_PORT)).names
    # Torch defines the network that learns first, and uses it second; it never calls the average.
    for jax, torch in (("target", "slow"), ("net", "online"), ("ema", "average")):
        assert names[f"{jax}.fc1"] == f'flattened("{torch}.body", (3, 2, 3))'
        assert names[f"{jax}.fc2"] == f"{torch}.head"


def test_images_that_flax_flattens_as_torch_does_need_no_rule(tmp_path: Path) -> None:
    transposed: Change = ("x.reshape(len(x), -1)", "x.transpose(0, 3, 1, 2).reshape(len(x), -1)")
    names = found_in(write(tmp_path, transposed, text=STEP_PORT)).names
    assert (names["net.fc1"], names["target.fc1"], names["ema.fc1"]) == ("online.body", "slow.body", "average.body")


@pytest.mark.parametrize("changes", [[], [WRONG]], ids=["right", "another fault"])
def test_a_table_that_is_complete_is_left_alone(changes: list[Change], tmp_path: Path) -> None:
    found = found_in(write(tmp_path, *changes, more=NAMES, text=STEP_PORT))
    assert found == FoundTwins(draws=())


def test_no_order_of_an_image_is_proposed_if_the_losses_differ_under_each(tmp_path: Path) -> None:
    names = found_in(write(tmp_path, WRONG, text=STEP_PORT)).names
    assert "flattened" not in str(names) and names["net.fc2"] == "online.head"
