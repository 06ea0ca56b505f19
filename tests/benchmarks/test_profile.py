"""Profile of a step by kind of operation."""

import pytest

from benchmarks import profile
from benchmarks.trace import Kernel
from jaxddp.plan.hlo import parse

HLO = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%moved (p: f32[2,3]) -> f32[3,2] {
  %p = f32[2,3]{1,0} parameter(0)
  ROOT %t = f32[3,2]{1,0} transpose(%p), dimensions={1,0}
}

%product (p: f32[2,3]) -> f32[2,2] {
  %p = f32[2,3]{1,0} parameter(0)
  %c = f32[2,3]{1,0} tanh(%p)
  ROOT %d = f32[2,2]{1,0} dot(%c, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (x: f32[2,3]) -> f32[] {
  %x = f32[2,3]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %fusion.1 = f32[2,2]{1,0} fusion(%x), kind=kLoop, calls=%product
  %fusion.2 = f32[3,2]{1,0} fusion(%x), kind=kLoop, calls=%moved
  %tanh.1 = f32[2,3]{1,0} tanh(%x)
  ROOT %reduce.1 = f32[] reduce(%tanh.1, %zero), dimensions={0,1}, to_apply=%add
}
"""


def test_times_are_added_by_kind() -> None:
    """In a reduction, the addition of two numbers does not count as elementwise work; a program's frame not at all."""
    names = {"fusion.1": 4, "fusion.2": 2, "tanh.1": 3, "reduce.1": 1, "ThunkExecutor::Execute": 9}
    ran = [Kernel(name, 0, 2000 * milliseconds) for name, milliseconds in names.items()]
    times = profile.by_kind(ran, parse(HLO), steps=2)
    assert times == {"products": 4, "copies": 2, "elementwise": 3, "reductions": 1}


@pytest.mark.large
def test_a_convnet_spends_time_on_products() -> None:
    name, _, products, *_, rate = profile.profile("two_convs", small=True).split()
    assert name == "two_convs"
    assert float(products) > 0
    assert float(rate) > 0
