"""Faults of the ConvNeXt in flax.nnx."""

from .fault import UnseenFault

FAULTS = {
    "scale_after_sum": UnseenFault(
        port="convnext",
        edits=(("return x + self.scale[...] * y", "return self.scale[...] * (x + y)"),),
        ours="the layer scale multiplies the sum of the shortcut and the branch",
        reference="it multiplies the branch only, before the sum",
        expects=(
            r"gamma|scale|mul|times|factor",
            r"resid|shortcut|\bskip|sum|add|after|before|order|both|whole|moved|swap|outside|\+",
        ),
        jax_lines=("return self.scale[...] * (x + y)",),
        torch_lines=("x = self.gamma * self.pwconv2(x)", "return shortcut + x.permute(0, 3, 1, 2)"),
    ),
    "shortcut_of_depthwise": UnseenFault(
        port="convnext",
        edits=(("y = self.depthwise(x)", "x = y = self.depthwise(x)"),),
        ours="the shortcut begins after the depthwise convolution",
        reference="it begins before, at the block's input",
        expects=(
            r"resid|shortcut|\bskip|add|sum|\+|branch",
            r"depthwise|dwconv|conv|later|(another|other) (place|point|tensor)|output of",
        ),
        jax_lines=("x = y = self.depthwise(x)", "return x + self.scale[...] * y"),
        torch_lines=("shortcut = x", "return shortcut + x.permute(0, 3, 1, 2)", "x = self.dwconv(x)"),
    ),
    "response_axes": UnseenFault(
        port="convnext",
        edits=(("axis=(1, 2), keepdims=True)", "axis=(2, 3), keepdims=True)"),),
        ours="the response normalisation takes the norm over axes (2, 3), width and channels",
        reference="it takes the norm over axes (1, 2), height and width",
        expects=(
            r"\bax[ei]s|\bdims?\b|dimension|over|along|reduc",
            r"2, ?3|1, ?2|width|height|channel|last two|spatial|another|other|wrong",
        ),
        jax_lines=("energy = jnp.sqrt(jnp.sum(x * x, axis=(2, 3), keepdims=True))",),
        torch_lines=("gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)",),
    ),
    "pooled_maximum": UnseenFault(
        port="convnext",
        edits=(("pooled = x.mean(axis=(1, 2))", "pooled = x.max(axis=(1, 2))"),),
        ours="the head gets the maximum over the image",
        reference="it gets the mean",
        expects=(r"(\b|_)a?max|maxim|largest", r"mean|average|avg|pool"),
        jax_lines=("pooled = x.max(axis=(1, 2))",),
        torch_lines=("x = x.mean([-2, -1])",),
    ),
    "vector_decay": UnseenFault(
        port="convnext",
        edits=((", mask=is_matrix)", ")"),),
        ours="weight decay acts on all parameters",
        reference="it acts on those of two dimensions or more, not on biases, norms and scales",
        expects=(
            r"decay",
            r"bias|1-?d|one dim|vector|norm|\ball\b|every|mask|dimension|matri|group|gamma|tensors",
        ),
        jax_lines=("jax_optimizer = optax.adamw(2e-3, weight_decay=0.05)",),
        torch_lines=(
            'groups = [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}]',
            "no_decay = [p for p in model.parameters() if p.ndim == 1]",
            "return torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.05)",
        ),
    ),
}
