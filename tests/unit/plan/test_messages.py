"""Messages between replicas, counted in compiled programs."""

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from jaxddp.plan.messages import all_reduces


def test_all_reduces_in_loops_count_once_per_pass() -> None:
    def program(x: jax.Array) -> jax.Array:
        x = lax.psum(x, "r")  # 5 floats, once

        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.sin(lax.psum(jnp.outer(carry, carry), "r")[0]), None  # 25 floats, 7 times

        return lax.scan(body, x, None, length=7)[0]

    mapped = jax.pmap(program, "r", devices=jax.devices("cpu")[:2])
    messages = all_reduces(mapped.lower(np.ones((2, 5), np.float32)).compile().as_text())
    assert (messages.count, messages.bytes) == (8, 4 * (5 + 7 * 25))


def test_a_program_without_all_reduces_has_none() -> None:
    text = jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, y: y + 1, x)).lower(np.ones(3)).compile().as_text()
    assert all_reduces(text).count == 0


HLO = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], bf16[2,3])) -> (s32[], bf16[2,3]) {
  %started = (f32[4]{0}, /*index=1*/bf16[2,3]{1,0}) all-reduce-start(%x, %y), to_apply=%add
  ROOT %done = (f32[4]{0}, bf16[2,3]{1,0}) all-reduce-done(%started)
}

ENTRY %main (p: f32[2]) -> f32[2] {
  %flags = pred[3]{0} all-reduce(%q), to_apply=%add
  ROOT %while.1 = (s32[], bf16[2,3]) while(%t), condition=%cond, body=%bodyTRIPS
}
"""


def test_asynchronous_all_reduces_of_all_dtypes_count() -> None:
    messages = all_reduces(HLO.replace("TRIPS", ', backend_config={"known_trip_count":{"n":"6"}}'))
    assert (messages.count, messages.bytes) == (1 + 6, 3 + 6 * (4 * 4 + 6 * 2))


@pytest.mark.parametrize(("text", "message"), [(HLO.replace("TRIPS", ""), "unknown length"), ("", "no compiled")])
def test_loops_of_unknown_length_and_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        all_reduces(text)
