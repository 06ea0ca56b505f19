"""Compiled programs, parsed from short texts."""

import pytest

from jaxddp.plan.hlo import arrays, parse

LOOP = """
HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  ROOT %next = (s32[], f32[4]{0}) tuple(%p, %p)
}

ENTRY %main.1 (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %init = (s32[], f32[4]{0}) tuple(%x)
  %loop = (s32[], f32[4]{0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %free = (s32[], f32[4]{0}) while(%init), condition=%cond, body=%body
  %choice = f32[4]{0} conditional(%x), branch_computations={%one, %two}
  %call = (bf16[2,3]{1,0}, u8[0]{0}) custom-call(%x, %loop), custom_call_target="__cudnn$convForward"
  ROOT %y = f32[4]{0} get-tuple-element(%loop), index=1
}
"""


def test_sizes_of_arrays_are_in_bytes() -> None:
    sizes = {one.dtype: one.bytes for one in arrays("(bf16[2,3]{1,0:T(8,128)}, pred[5], f8e4m3fn[4], s32[])")}
    assert sizes == {"bf16": 12, "pred": 5, "f8e4m3fn": 4, "s32": 4}


def test_instructions_have_operands_results_and_attributes() -> None:
    program = parse(LOOP)
    assert program.entry == "main.1" and list(program.computations) == ["body", "main.1"]
    names = program.by_name["main.1"]
    assert names["call"].operands == ("x", "loop")
    assert [array.shape for array in names["call"].results] == [(2, 3), (0,)]
    assert names["call"].text("custom_call_target") == "__cudnn$convForward"
    assert names["y"].is_root and not names["x"].is_root
    assert names["x"].operands == ()


def test_loops_and_branches_name_what_they_run() -> None:
    names = parse(LOOP).by_name["main.1"]
    assert names["loop"].called == ["body"] and names["loop"].passes == 7
    assert names["free"].passes is None
    assert names["choice"].called == ["one", "two"] and names["choice"].passes == 1


def test_a_text_without_an_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="ENTRY"):
        parse("%body (p: f32[]) -> f32[] {\n}")
