"""Faults of the normalizing flow in Equinox."""

from .fault import ABSENT, UnseenFault

FAULTS = {
    "scale_volume": UnseenFault(
        port="flow",
        edits=(("log_volume = self.log_scale.sum() + log_gain.sum()", "log_volume = log_gain.sum()"),),
        ours="the log-determinant leaves out the elements' log_scale",
        reference="it has their sum",
        expects=(r"log_?scale|log.?det|volume|jacobian|act_?norm|of_norm|\bsum|\badd", ABSENT),
        jax_lines=("log_volume = log_gain.sum()",),
        torch_lines=(
            "return (x + self.loc) * self.log_scale.exp(), self.log_scale.sum()",
            "log_det = log_det + of_norm + of_coupling",
        ),
    ),
    "other_half": UnseenFault(
        port="flow",
        edits=(("fixed, moved = jnp.split(x, 2)", "moved, fixed = jnp.split(x, 2)"),),
        ours="the second half moves the first",
        reference="the first half moves the second",
        expects=(
            r"half|halv|chunk|split|order|fixed|\bxa\b|\bxb\b|concat",
            r"swap|exchang|first|second|order|other|revers|interchang|wrong|cross|instead|permut",
        ),
        jax_lines=("moved, fixed = jnp.split(x, 2)", "return jnp.concatenate([fixed, moved]), log_volume"),
        torch_lines=("xa, xb = x.chunk(2, dim=1)", "return torch.cat([xa, yb], dim=1), s.sum(dim=1)"),
    ),
    "straight_through": UnseenFault(
        port="flow",
        edits=(("code = z + jax.lax.stop_gradient(nearest - z)", "code = nearest"),),
        ours="the flow's gradient goes to the codebook",
        reference="it goes straight through to the encoder, past the codebook",
        expects=(
            r"straight|stop_?gradient|detach|gradient|estimator|constant",
            r"straight|stop|detach|encoder|left out|missing|\bno\b|nothing|codebook|quanti|through|\bz\b",
        ),
        jax_lines=("code = nearest", "return code, pull + 0.25 * push"),
        torch_lines=("return z + (q - z).detach(), codebook_loss + COMMITMENT * commitment_loss",),
    ),
    "commitment": UnseenFault(
        port="flow",
        edits=(("return code, pull + 0.25 * push", "return code, 0.25 * pull + push"),),
        ours="0.25 is the weight of the codebook's loss",
        reference="0.25 is the weight of the commitment loss",
        expects=(
            r"\b0\.25\b|\b4(\.0)?\b|quarter|commit",
            r"swap|exchang|codebook|commit|other|term|pull|push|mse|wrong|both|encoder|scal|mul|weigh",
        ),
        jax_lines=("return code, 0.25 * pull + push",),
        torch_lines=(
            "return z + (q - z).detach(), codebook_loss + COMMITMENT * commitment_loss",
            "codebook_loss = F.mse_loss(q, z.detach())",
            "commitment_loss = F.mse_loss(z, q.detach())",
        ),
    ),
    "bound": UnseenFault(
        port="flow",
        edits=(("log_gain = 2 * jnp.tanh(0.5 * log_gain)", "log_gain = jnp.tanh(log_gain)"),),
        ours="the logarithm of the gain is tanh(s), between -1 and 1",
        reference="it is 2 tanh(s / 2), between -2 and 2",
        expects=(
            r"tanh|bound|scal|mul|divi|factor|times|clamp|limit",
            r"\b2(\.0)?\b|\b0\.5\b|\b-?1(\.0)?\b|half|twice|doubl",
        ),
        jax_lines=("log_gain = jnp.tanh(log_gain)",),
        torch_lines=("s = 2 * torch.tanh(s / 2)",),
    ),
}
