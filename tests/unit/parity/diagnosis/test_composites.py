"""Recurrent layers of torch, opened into the calls that they consist of, compute the same."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from jaxddp.parity.diagnosis.forward.call_trace import CallTrace
from jaxddp.parity.diagnosis.forward.composites import MOST_STEPS

CLOSE = 1e-14  # measured: up to 3e-16
INPUTS, HIDDEN, STEPS, EXAMPLES = 3, 4, 5, 2
LAYERS = (nn.LSTM, nn.GRU, lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options), nn.RNN)
OPTIONS = tuple(itertools.product((True, False), (1, 2), (True, False), (True, False)))


def outputs(layer: nn.Module, opened: bool, *args: Any) -> list[torch.Tensor]:
    """Return results and gradients."""
    torch.manual_seed(1)  # of dropout between the layers
    layer.zero_grad()
    with CallTrace(modules=[], reads=opened) as calls:
        results = [*leaves(layer(*args))]
    torch.stack([x.square().sum() for x in results]).sum().backward()
    assert any(call.within for call in calls.recorded) == opened
    return [*results, *(x.grad for x in layer.parameters() if x.grad is not None)]


def leaves(x: Any) -> Any:
    return [x] if isinstance(x, torch.Tensor) else itertools.chain.from_iterable(map(leaves, x))


def assert_equal(layer: nn.Module, *args: Any) -> None:
    for fused, opened in zip(outputs(layer, False, *args), outputs(layer, True, *args), strict=True):
        assert float((fused - opened).detach().norm()) <= CLOSE * float(fused.detach().norm())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bias, layers, bidirectional, batch_first", OPTIONS)
def test_an_opened_layer_computes_what_torch_computes(
    bias: bool, layers: int, bidirectional: bool, batch_first: bool
) -> None:
    torch.manual_seed(0)
    for make in LAYERS:
        options = {"bias": bias, "bidirectional": bidirectional, "batch_first": batch_first}
        layer = make(INPUTS, HIDDEN, layers, dropout=0.5 if layers > 1 else 0.0, **options).double()
        assert_equal(layer, torch.randn(STEPS, EXAMPLES, INPUTS).double())


def test_an_opened_layer_begins_with_the_given_state() -> None:
    torch.manual_seed(0)
    state = torch.randn(1, EXAMPLES, HIDDEN).double()
    x = torch.randn(STEPS, EXAMPLES, INPUTS).double()
    assert_equal(nn.LSTM(INPUTS, HIDDEN).double(), x, (state, 2 * state))
    assert_equal(nn.GRU(INPUTS, HIDDEN).double(), x, state)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_an_opened_cell_computes_what_torch_computes(cell: type[nn.Module]) -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        assert_equal(cell(INPUTS, HIDDEN, bias=bias).double(), torch.randn(EXAMPLES, INPUTS).double())


def test_a_call_of_a_cell_has_the_same_site_at_every_step_and_another_one_in_every_direction() -> None:
    layer = nn.GRU(INPUTS, HIDDEN, bidirectional=True)
    with CallTrace(modules=[], reads=True) as calls:
        layer(layer(torch.ones(STEPS, EXAMPLES, INPUTS))[0][..., :INPUTS])
    sites = [call.site for call in calls.recorded if call.words == "tanh of the candidate"]
    assert len(sites) == 2 * 2 * STEPS
    assert set(sites) == {("tanh of the candidate", 0), ("tanh of the candidate", 1)}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_long_layers_packed_sequences_and_projections_are_not_opened() -> None:
    x = torch.ones(MOST_STEPS + 1, 1, INPUTS)
    packed = nn.utils.rnn.pack_padded_sequence(x[:3], torch.tensor([2]))
    with CallTrace(modules=[], reads=True) as calls:
        nn.GRU(INPUTS, HIDDEN)(x), nn.LSTM(INPUTS, HIDDEN)(packed), nn.LSTM(INPUTS, HIDDEN, proj_size=2)(x[:3])
    assert not any(call.within for call in calls.recorded)


def test_sparse_results_of_calls_are_read_as_dense_ones() -> None:
    matrix = torch.eye(3, dtype=torch.float64)
    with CallTrace(modules=[], reads=True) as calls:
        torch.relu(matrix)
        torch.relu(matrix.to_sparse())
    dense, *_, sparse = [call.results for call in calls.recorded]
    assert sparse == dense
