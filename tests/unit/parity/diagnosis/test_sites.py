"""Faults of a large model are sought from the last equal layer to the first that differs."""

from collections import OrderedDict

import torch
from torch import nn

from jaxddp.parity.diagnosis.forward.call_changes import norm_epsilon
from jaxddp.parity.diagnosis.forward.calls import Call
from jaxddp.parity.diagnosis.forward.loss_causes import AT_LEAST, REPLAYS, replays_of
from jaxddp.parity.diagnosis.forward.sites import beginning_in, between, patches_of, trace

NET = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())


def calls_of_net() -> list[Call]:
    return trace(NET, lambda model, batch: {"loss": model(batch["x"]).sum()}, {"x": torch.ones(2, 4)})


def test_only_the_calls_between_two_layers_are_chosen() -> None:
    calls = calls_of_net()
    here = between(calls, "1", "2")
    assert [call.module for call in calls if call.site in here] == ["2"]
    assert [call.module for call in calls if call.site in between(calls, "", "1")] == ["0", "1"]


def test_a_fault_that_begins_at_another_layer_is_left_out() -> None:
    calls = calls_of_net()
    patches = [*patches_of((call, change) for call in calls for change in norm_epsilon(call))]
    first, later = ([*beginning_in(between(calls, *pair), patches, calls)] for pair in (("", "0"), ("1", "2")))
    assert {len(patch.sites) for patch in first} == {1, 2}  # the first norm alone, and both
    assert {len(patch.sites) for patch in later} == {1}


def test_a_set_of_sites_has_the_longest_name_that_fits() -> None:
    """And always the same: "blocks.*.*" and "blocks.*.norm" are the same sites here."""
    blocks = nn.Sequential(*(nn.Sequential(OrderedDict(norm=nn.LayerNorm(4), act=nn.GELU())) for _ in range(2)))
    net = nn.Sequential(OrderedDict(blocks=blocks, norm=nn.LayerNorm(4)))
    calls = trace(net, lambda model, batch: {"loss": model(batch["x"]).sum()}, {"x": torch.ones(2, 4)})
    patches = patches_of((call, change) for call in calls for change in norm_epsilon(call))
    assert {patch.where for patch in patches if len(patch.sites) == 2} == {"blocks.*.norm"}


def test_parts_of_one_name_in_several_modules_are_a_set() -> None:
    def block() -> nn.Module:
        return nn.Sequential(OrderedDict(first=nn.LayerNorm(4), second=nn.LayerNorm(4)))

    net = nn.Sequential(OrderedDict(down=block(), up=block()))
    calls = trace(net, lambda model, batch: {"loss": model(batch["x"]).sum()}, {"x": torch.ones(2, 4)})
    patches = patches_of((call, change) for call in calls for change in norm_epsilon(call))
    assert {patch.where for patch in patches if len(patch.sites) == 2} == {"down.*", "up.*", "*.first", "*.second"}


def test_a_search_over_a_larger_loss_makes_fewer_replays() -> None:
    def replays(layers: int, width: int) -> int:
        with torch.device("meta"):
            net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
            batch = {"x": torch.ones(2, width)}
            return replays_of(trace(net, lambda model, batch: {"loss": model(batch["x"]).sum()}, batch))

    assert AT_LEAST == replays(1, 10_000) < replays(4, 1_000) < replays(2, 1_000) < replays(9, 10) == REPLAYS
