"""Faults of the U-Net in flax.linen."""

from .fault import UnseenFault

FAULTS = {
    "skip_first": UnseenFault(
        port="unet",
        edits=(("jnp.concatenate([grown, fine], axis=-1)", "jnp.concatenate([fine, grown], axis=-1)"),),
        ours="the skip connection's channels come first",
        reference="they come second, after the upsampled ones",
        expects=(
            r"concat|\bcat\b|order|join|skip",
            r"order|swap|first|second|exchang|revers|permut|operand|argument|before|after",
        ),
        jax_lines=("joined = jnp.concatenate([fine, grown], axis=-1)",),
        torch_lines=("h = self.up1(torch.cat([h, skip], dim=1), emb)",),
    ),
    "frequencies": UnseenFault(
        port="unet",
        edits=(("dtype=time.dtype) / half)", "dtype=time.dtype) / (half - 1))"),),
        ours="the exponents of the frequencies are divided by half - 1 = 5",
        reference="they are divided by half = 6",
        expects=(
            r"half|freq|divi|offset|expon|spacing|pow|constant|number|denominator|embedding|wave|mul|scal|log|arange",
            r"\b5(\.0)?\b|\b6(\.0)?\b|half|- ?1\b|\b1\.2\b|0\.833|1\.151|1\.381",
        ),
        jax_lines=("frequencies = 1000.0 ** (-jnp.arange(half, dtype=time.dtype) / (half - 1))",),
        torch_lines=("freqs = torch.exp(-math.log(1000) * torch.arange(half, dtype=t.dtype) / half)",),
    ),
    "groups": UnseenFault(
        port="unet",
        edits=(("num_groups=4", "num_groups=2"),),
        ours="the group norms have 2 groups",
        reference="they have 4",
        expects=(r"group", r"\b2\b|\btwo\b|\b4\b|\bfour\b"),
        jax_lines=("return nn.GroupNorm(num_groups=2, epsilon=1e-5, use_fast_variance=False, **options)",),
        torch_lines=(
            "CHANNELS, SIZE, TIME_DIM, GROUPS, WARMUP = 8, 8, 12, 4, 5",
            "self.norm1 = nn.GroupNorm(GROUPS, in_ch)",
            "self.norm2 = nn.GroupNorm(GROUPS, out_ch)",
        ),
    ),
    "noise_level": UnseenFault(
        port="unet",
        edits=(("jnp.sqrt(1 - kept) * noise", "(1 - kept) * noise"),),
        ours="the noise is multiplied by its variance, 1 - level",
        reference="it is multiplied by the root, sqrt(1 - level)",
        expects=(
            r"sqrt|root|square|pow|\b0\.5\b",
            r"noise|1 ?- |one minus|level|kept|alpha|variance|nothing|left out|missing|without|omit|not applied",
        ),
        jax_lines=("noisy = jnp.sqrt(kept) * image + (1 - kept) * noise",),
        torch_lines=('noisy = level.sqrt() * batch["image"] + (1 - level).sqrt() * batch["noise"]',),
    ),
    "warmup": UnseenFault(
        port="unet",
        edits=(("(step + 1.0) / 5)", "step / 5)"),),
        ours="the warm-up begins at a rate of 0",
        reference="it begins at a fifth of the rate",
        expects=(
            r"warm|\brates?\b|schedule|\blr\b|learning",
            r"\b0\b|step|\bone\b|off by|start|begin|earl|late|shift|first|\+ ?1|count",
        ),
        jax_lines=("return 2e-3 * jnp.minimum(1.0, step / 5)", "jax_optimizer = optax.adam(rate)"),
        torch_lines=("LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))",),
    ),
}
