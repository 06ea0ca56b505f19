"""Faults of the decoder in functions of stacked parameters."""

from .fault import TIMES, UnseenFault

FAULTS = {
    "rotary_base": UnseenFault(
        port="decoder",
        edits=(("BASE = 10_000.0", "BASE = 1_000.0"),),
        ours="the base of the rotary embedding is 1,000",
        reference="it is 10,000",
        expects=(
            r"base|theta|freq|rotary|rope|angle|wavelength|pow|number|constant|speed",
            r"\b1[_,]?000\b|\b10[_,]?000\b|1e\+?0?[34]|6\.907|9\.210|factor (of )?10|10 times",
        ),
        jax_lines=("BASE = 1_000.0", "speeds = BASE **"),
        torch_lines=("def apply_rotary(x, base=10000.0):", "inv_freq = 1.0 / base **"),
    ),
    "rotary_pairs": UnseenFault(
        port="decoder",
        edits=(
            ("left, right = x[..., :half], x[..., half:]", "left, right = x[..., ::2], x[..., 1::2]"),
            ("return jnp.concatenate(turned, axis=-1)", "return jnp.stack(turned, axis=-1).reshape(x.shape)"),
        ),
        ours="the rotary embedding rotates neighbouring elements, (0, 1), (2, 3), ...",
        reference="it rotates an element of the first half with the same one of the second half",
        expects=(
            r"halv|half|(?<!repeat_)interleav|\beven\b|\bodd\b|pairs?\b|adjacent|::2|stride|neighbo|alternat|"
            r"every (second|other)",
            r"rotar|rotat|rope|order|layout|interleav|permut|pair|halv|element|feature|dim|chunk|split|slice",
        ),
        jax_lines=(
            "left, right = x[..., ::2], x[..., 1::2]",
            "return jnp.stack(turned, axis=-1).reshape(x.shape)",
        ),
        torch_lines=(
            "x1, x2 = x.chunk(2, dim=-1)",
            "return torch.cat((-x2, x1), dim=-1)",
            "emb = torch.cat((freqs, freqs), dim=-1)",
        ),
    ),
    "keys_tiled": UnseenFault(
        port="decoder",
        edits=(
            (
                "(jnp.repeat(y, HEADS // GROUPS, axis=2) for y in (k, v))",
                "(jnp.tile(y, (1, 1, HEADS // GROUPS, 1)) for y in (k, v))",
            ),
        ),
        ours="the heads of the keys and values are tiled: query heads get 0, 1, 0, 1",
        reference="each is repeated: query heads get 0, 0, 1, 1",
        expects=(
            r"tile|repeat|interleave|group|head|\bk\b|key",
            r"tile|tiling|repeat|(keys|values|heads?|groups?) (are )?interleav|order|cycl|consecutive|permut|assign|"
            r"which head|wrong (key|head)",
        ),
        jax_lines=("k, v = (jnp.tile(y, (1, 1, HEADS // GROUPS, 1)) for y in (k, v))",),
        torch_lines=(
            "k = k.repeat_interleave(N_HEADS // N_KV_HEADS, dim=1)",
            "v = v.repeat_interleave(N_HEADS // N_KV_HEADS, dim=1)",
        ),
    ),
    "silu_on_up": UnseenFault(
        port="decoder",
        edits=(
            (
                'jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])',
                '(x @ layer["gate"]) * jax.nn.silu(x @ layer["up"])',
            ),
        ),
        ours="SiLU acts on the up projection",
        reference="it acts on the gate projection",
        expects=(
            r"silu|swish|activation|sigmoid",
            r"\bup\b|up_proj|swap|exchang|other (branch|factor|operand|half|projection|argument)|cross|instead of",
        ),
        jax_lines=('return ((x @ layer["gate"]) * jax.nn.silu(x @ layer["up"])) @ layer["down"]',),
        torch_lines=("return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))",),
    ),
    "embedding_scale": UnseenFault(
        port="decoder",
        edits=((" * jnp.sqrt(WIDTH)", ""),),
        ours="the embedding is used as it is",
        reference="it is multiplied by sqrt(24)",
        expects=(TIMES + r"|sqrt|root", r"4\.8(9|98)|\b24\b|width|\bDIM\b|0\.204|embed"),
        jax_lines=('x = params["embedding"][tokens]',),
        torch_lines=("x = x * DIM**0.5",),
    ),
}
