"""Floating-point operations and bytes, against numbers counted by hand."""

import pytest

from jaxddp.plan.attention import score_bytes
from jaxddp.plan.costs import Cost, Costs
from jaxddp.plan.hlo import parse

B, T, D = 2, 64, 8  # attention: heads, tokens, width of a head
PROGRAM = """
%gemm (a: bf16[16,32], b: bf16[32,8]) -> f32[16,8] {
  %a = bf16[16,32]{1,0} parameter(0)
  %b = bf16[32,8]{1,0} parameter(1)
  %dot = f32[16,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = f32[16,8]{1,0} multiply(%dot, %dot)
}

%part (full: f32[1000]) -> f32[10] {
  %full = f32[1000]{0} parameter(0)
  %bits = f32[10,100]{1,0} bitcast(%full)
  %cut = f32[1,10]{1,0} slice(%bits), slice={[0:1], [0:10]}
  ROOT %out.1 = f32[10]{0} bitcast(%cut)
}

%put (full.1: f32[1000], new: f32[10], at: s32[]) -> f32[1000] {
  %full.1 = f32[1000]{0} parameter(0)
  %new = f32[10]{0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %changed = f32[1000]{0} dynamic-update-slice(%full.1, %new, %at)
}

%scores (q: bf16[2,64,8], k: bf16[2,8,64]) -> f32[2,64,64] {
  %q = bf16[2,64,8]{2,1,0} parameter(0)
  %k = bf16[2,8,64]{2,1,0} parameter(1)
  ROOT %s = f32[2,64,64]{2,1,0} dot(%q, %k), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, \
rhs_contracting_dims={1}
}

ENTRY %main (p0: bf16[16,32]) -> f32[16,8] {
  %p0 = bf16[16,32]{1,0} parameter(0)
  %p1 = bf16[32,8]{1,0} parameter(1)
  %p2 = f32[1000]{0} parameter(2)
  %p3 = f32[10]{0} parameter(3)
  %i = s32[] parameter(4)
  %x = bf16[4,14,14,3]{3,2,1,0} parameter(5)
  %w = bf16[5,3,3,3]{3,2,1,0} parameter(6)
  %g = bf16[4,7,7,5]{3,2,1,0} parameter(7)
  %q0 = bf16[2,64,8]{2,1,0} parameter(8)
  %k0 = bf16[2,8,64]{2,1,0} parameter(9)
  %fused = f32[16,8]{1,0} fusion(%p0, %p1), kind=kCustom, calls=%gemm
  %sliced = f32[10]{0} fusion(%p2), kind=kLoop, calls=%part
  %updated = f32[1000]{0} fusion(%p2, %p3, %i), kind=kLoop, calls=%put
  %plain = f32[16,8]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %narrow = f32[16,16]{1,0} dot(%fused, %fused), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %exact = f32[16,16]{1,0} dot(%fused, %fused), lhs_contracting_dims={1}, rhs_contracting_dims={1}, \
operand_precision={highest,highest}
  %forward = (bf16[4,7,7,5]{3,2,1,0}, u8[0]{0}) custom-call(%x, %w), window={size=3x3 stride=2x2 pad=1_1x1_1}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %input = (bf16[4,14,14,3]{3,2,1,0}, u8[0]{0}) custom-call(%g, %w), window={size=3x3 stride=2x2 pad=1_1x1_1}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %filter = (bf16[5,3,3,3]{3,2,1,0}, u8[0]{0}) custom-call(%x, %g), window={size=3x3 stride=2x2 pad=1_1x1_1}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %gemm.1 = (f32[16,8]{1,0}, s8[0]{0}) custom-call(%p0, %p1), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %tokens = f32[2,64,64]{2,1,0} fusion(%q0, %k0), kind=kCustom, calls=%scores
  %softmax = bf16[2,64,64]{2,1,0} convert(%tokens)
  ROOT %sum = f32[16,8]{1,0} add(%fused, %plain)
}
"""


def cost(name: str, text: str = PROGRAM) -> Cost:
    program = parse(text)
    return Costs(program).of(program.entry, program.by_name[program.entry][name])


PRODUCT = 2 * 16 * 32 * 8


@pytest.mark.parametrize("name", ["fused", "plain", "gemm.1"])
def test_a_matrix_product_takes_2_m_k_n(name: str) -> None:
    assert cost(name).matrix == PRODUCT
    assert cost(name).dtype == "bf16"


def test_a_fusion_reads_its_operands_once_and_writes_its_result() -> None:
    assert cost("fused").bytes == 2 * 16 * 32 + 2 * 32 * 8 + 4 * 16 * 8
    assert cost("fused").rest == 16 * 8  # the multiplication after the product


def test_a_slice_of_a_large_array_costs_the_slice() -> None:
    assert cost("sliced").bytes == 40 + 40
    assert cost("updated").bytes == 40 + 4 + 40


def test_the_full_array_is_not_read_through_a_slice_by_mistake() -> None:
    """Planted fault: a second use, of the full array is not seen."""
    used = PROGRAM.replace("ROOT %out.1 = f32[10]{0} bitcast(%cut)", "ROOT %out.1 = f32[1000]{0} negate(%full)")
    assert cost("sliced", used).bytes == 4000 + 4000


@pytest.mark.parametrize("name", ["forward", "input", "filter"])
def test_all_three_convolutions_of_a_layer_take_as_many_operations(name: str) -> None:
    assert cost(name).convolution == 2 * (4 * 7 * 7) * 5 * (3 * 3 * 3)


def test_float32_products_are_tf32_unless_they_ask_for_precision() -> None:
    assert cost("narrow").dtype == "tf32"
    assert cost("exact").dtype == "f32"


def test_parameters_cost_nothing() -> None:
    assert cost("p0") == Cost()


def test_attention_scores_are_found_by_their_size() -> None:
    size = B * T * T
    assert score_bytes(parse(PROGRAM)) == 4 * size + 4 * size + 2 * size  # written, read, written as bf16
    assert score_bytes(parse(PROGRAM.replace(f"{T},{D}", f"{T},{T}"))) == 0  # heads as wide as the sequence is long
