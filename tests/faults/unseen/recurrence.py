"""Faults of the state spaces in flax.nnx with vmap over the heads."""

from .fault import ABSENT, UnseenFault

FAULTS = {
    "step_bias": UnseenFault(
        port="recurrence",
        edits=(
            (
                "jax.nn.softplus(steps + self.step_bias[...])",
                "jax.nn.softplus(steps) + self.step_bias[...]",
            ),
        ),
        ours="the bias of the step sizes is added after the softplus",
        reference="it is added before",
        expects=(r"bias|\badd|sum|\+", r"after|before|order|softplus|outside|moved|place|inside"),
        jax_lines=("steps = jax.nn.softplus(steps) + self.step_bias[...]",),
        torch_lines=("dt = F.softplus(dt + self.dt_bias)",),
    ),
    "late_output": UnseenFault(
        port="recurrence",
        edits=(
            ("state = jnp.exp(step * rate) * state", "after = jnp.exp(step * rate) * state"),
            ("return state, state @ c", "return after, state @ c"),
        ),
        ours="an output is read from the state before its input",
        reference="it is read from the state after its input",
        expects=(
            r"state|output|carry|scan|recurren|\bys?\b|einsum",
            r"before|previous|earlier|\bold\b|late|one step|delay|t ?- ?1|shift|after|\blag|updated",
        ),
        jax_lines=("return after, state @ c", "after = jnp.exp(step * rate) * state"),
        torch_lines=(
            'ys.append(torch.einsum("bhpn,bn->bhp", state, C[:, t]))',
            "state = decay * state + dBx",
        ),
    ),
    "window": UnseenFault(
        port="recurrence",
        edits=(('padding="CAUSAL"', 'padding="SAME"'),),
        ours="the convolution sees the previous, this and the next step",
        reference="it sees this step and the two before it",
        expects=(
            r"\bpad|causal|window|same|shift|conv|offset",
            r"causal|same|left|right|both|symmetr|future|next|shift|\bone\b|cent(re|er)|\b[12]\b|\bpad",
        ),
        jax_lines=('self.window = nnx.Conv(INNER, INNER, (3,), padding="SAME"', "x = nnx.silu(self.window(x))"),
        torch_lines=(
            "self.conv1d = nn.Conv1d(D_INNER, D_INNER, D_CONV, groups=D_INNER, padding=D_CONV - 1)",
            "x = self.conv1d(x.transpose(1, 2))[..., :length].transpose(1, 2)",
        ),
    ),
    "norm_before_gate": UnseenFault(
        port="recurrence",
        edits=(
            (
                "        y = y * nnx.silu(gate)\n"
                "        y = y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-5)\n",
                "        y = y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-5)\n"
                "        y = y * nnx.silu(gate)\n",
            ),
        ),
        ours="the gate multiplies the normalised outputs",
        reference="it multiplies the outputs, which are then normalised",
        expects=(r"norm|\brms|mean square|rsqrt|divi|gate|silu", r"before|after|order|moved|place|first|swap|\bthen\b"),
        jax_lines=(
            "y = y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-5)",
            "y = y * nnx.silu(gate)",
        ),
        torch_lines=(
            "x = x * F.silu(z)",
            "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight",
        ),
    ),
    "input_step": UnseenFault(
        port="recurrence",
        edits=((" + step * jnp.outer(x, b)", " + jnp.outer(x, b)"),),
        ours="the step size does not multiply the input of the state",
        reference="it multiplies the input",
        expects=(r"mul|times|scal|factor|product|weight|einsum|\bdt\b|step", ABSENT),
        jax_lines=("state = jnp.exp(step * rate) * state + jnp.outer(x, b)",),
        torch_lines=('dBx = torch.einsum("bh,bn,bhp->bhpn", dt[:, t], B[:, t], x[:, t])',),
    ),
}
