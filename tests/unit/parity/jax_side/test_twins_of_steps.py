"""Tables of names of ports with a `torch_step`: networks in the order of their use, and their flattened images."""

from pathlib import Path

import pytest

from jaxddp.parity.cases import PortCase
from jaxddp.parity.jax_side.twins import FindCrossedNames, FindTwins, FoundTwins
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


def test_nothing_is_proposed_that_neither_names_nor_losses_decide(tmp_path: Path) -> None:
    found = found_in(write(tmp_path, WRONG, text=STEP_PORT))
    assert found.names == {"ema.conv": "average.conv", "ema.fc2": "average.head"}  # by their names
    assert "ambiguous: ema.fc1, net.conv, net.fc1, ... may be in several places" in found.without_twin


# The same names on both sides, and another order of use, which would cross the networks.
AGREE: list[Change] = [
    *(("online", "q_network"), ("slow", "target_network"), ("average", "ema_network")),
    ('nets["target"]', 'nets["TargetNet_0"]'),
    ('nets["net"]', 'nets["QNet_0"]'),
    ('"target", "ema", "net"', '"TargetNet_0", "ema", "QNet_0"'),
    ('in ("target", "ema")', 'in ("TargetNet_0", "ema")'),
    ('    target = batch["r"]', '    nets["QNet_0"](batch["x"])\n    target = batch["r"]'),
]


FAULT: Change = ('+ 0.9 * nets["TargetNet_0"]', '+ 0.5 * nets["TargetNet_0"]')


@pytest.mark.parametrize("changes", [[], [FAULT]], ids=["right", "another fault"])
def test_networks_with_equal_shapes_are_not_crossed_where_names_agree(changes: list[Change], tmp_path: Path) -> None:
    names = found_in(write(tmp_path, *AGREE, *changes, text=STEP_PORT)).names
    for jax, torch in (("TargetNet_0", "target_network"), ("QNet_0", "q_network"), ("ema", "ema_network")):
        assert names[f"{jax}.fc2"] == f"{torch}.head"


@pytest.mark.parametrize(("changes", "finds"), [([], True), ([WRONG], False)], ids=["crossed", "another fault"])
def test_a_table_that_crosses_two_networks_is_suspected(changes: list[Change], finds: bool, tmp_path: Path) -> None:
    crossed = NAMES if not finds else NAMES.replace("online", "?").replace("slow", "online").replace("?", "slow")
    path = write(tmp_path, *changes, more=crossed, text=STEP_PORT)
    names, says = FindCrossedNames(PortCase(PortFile(str(path)), 1)).run(lambda where: None)
    words = "perhaps `names` crosses net and target: with the two swapped the losses agree"
    assert says == (words if finds else "")
    assert not finds or (names["net.fc2"], names["target.fc2"]) == ("online.head", "slow.head")
