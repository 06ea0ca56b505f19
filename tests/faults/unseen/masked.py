"""Faults of the masked auto-encoder in Equinox."""

from .fault import TIMES, UnseenFault

FAULTS = {
    "pixel_variance": UnseenFault(
        port="masked",
        edits=(("patches.var(axis=1, ddof=1, keepdims=True)", "patches.var(axis=1, keepdims=True)"),),
        ours="the variance of a patch's pixels is biased, divided by 12",
        reference="it is unbiased, divided by 11",
        expects=(
            r"varian|\bvar\b|\bstd\b|deviation|ddof|unbiased|bessel|correction",
            r"biased|ddof|correction|bessel|n ?- ?1|\b11\b|\b12\b|1\.0909|0\.9166|1\.0444|0\.957",
        ),
        jax_lines=("wanted = centred / jnp.sqrt(patches.var(axis=1, keepdims=True) + 1e-6)",),
        torch_lines=("var = target.var(dim=-1, keepdim=True)",),
    ),
    "all_patches": UnseenFault(
        port="masked",
        edits=(("return errors[hidden].mean()", "return errors.mean()"),),
        ours="the loss is the mean over all 16 patches",
        reference="it is the mean over the 10 hidden patches",
        expects=(
            r"mask|hidden|\ball\b|every|visible|\b16\b|weigh|select|index",
            r"mean|averag|\bsum|loss|error|\b10\b|\b16\b",
        ),
        jax_lines=("return errors.mean()",),
        torch_lines=("return (loss * mask).sum() / mask.sum()",),
    ),
    "first_places": UnseenFault(
        port="masked",
        edits=(("self.places[1:][visible]", "self.places[1 : KEPT + 1]"),),
        ours="the visible patches get the first 6 positions",
        reference="each patch gets its own position, before the selection",
        expects=(
            r"position|place|pos_embed|gather|index|embedding|\brows?\b",
            r"first|gather|index|order|keep|kept|visible|shuffl|\b6\b|\brows?\b|select|permut|slice|wrong",
        ),
        jax_lines=("x = jax.vmap(self.embed)(patches[visible]) + self.places[1 : KEPT + 1]",),
        torch_lines=(
            "x = self.patch_embed(patches) + self.pos_embed[:, 1:]",
            "x = torch.gather(x, 1, ids_keep.unsqueeze(-1).expand(-1, -1, DIM))",
        ),
    ),
    "patch_layout": UnseenFault(
        port="masked",
        edits=(("pieces.transpose(1, 3, 2, 4, 0)", "pieces.transpose(1, 3, 0, 2, 4)"),),
        ours="a patch is flattened with the channels first",
        reference="it is flattened with the channels last",
        expects=(
            r"layout|order|transpos|permut|flatten|reshap|channel|\bax[ei]s|einsum",
            r"channel|order|first|last|1, 3, 0, 2, 4|permut|transpos|axes|flatten|nhwpqc|chw|hwc",
        ),
        jax_lines=("return pieces.transpose(1, 3, 0, 2, 4).reshape(COUNT, -1)",),
        torch_lines=(
            'x = torch.einsum("nchpwq->nhwpqc", x)',
            "return x.reshape(len(imgs), n * n, PATCH**2 * 3)",
        ),
    ),
    "attention_scale": UnseenFault(
        port="masked",
        edits=(("scores = q @ k.T / jnp.sqrt(q.shape[-1])", "scores = q @ k.T / q.shape[-1]"),),
        ours="the attention's scores are divided by the size of a head",
        reference="they are divided by its root",
        expects=(
            TIMES + r"|sqrt|root|pow|temperature",
            r"sqrt|root|\b8(\.0)?\b|2\.828|0\.353|0\.125|\bpow|head.?(size|dim)|\b6(\.0)?\b|2\.449|0\.408|0\.166",
        ),
        jax_lines=("scores = q @ k.T / q.shape[-1]",),
        torch_lines=(
            "self.scale = (dim // num_heads) ** -0.5",
            "attn = (q @ k.transpose(-2, -1)) * self.scale",
        ),
    ),
}
