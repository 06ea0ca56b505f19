"""Faults of the PPO loss in pure functions."""

from .fault import UnseenFault

FAULTS = {
    "advantage_gradient": UnseenFault(
        port="policy",
        edits=(("    advantages = jax.lax.stop_gradient(advantages)\n", ""),),
        ours="the policy's loss has a gradient through the advantages, and so trains the critic",
        reference="the advantages are constants",
        expects=(
            r"gradient|detach|no_grad|backprop|differentia|\bconstant",
            r"advantage|stop|detach|no_grad|critic|value|missing|left out|through|constant",
        ),
        jax_lines=(
            "advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)",
            'advantages = advantages_of(batch["reward"].T, values.T, alive.T).T',
        ),
        torch_lines=(
            "with torch.no_grad():",
            'advantages = estimate(batch["reward"], values, batch["done"])',
            "advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)",
        ),
    ),
    "done_shift": UnseenFault(
        port="policy",
        edits=(('alive = 1 - batch["done"][:, 1:]', 'alive = 1 - batch["done"][:, :-1]'),),
        ours="step t is cut off by done of observation t",
        reference="it is cut off by done of observation t + 1",
        expects=(
            r"done|terminal|alive|mask|time|step|index|slice|shift|column",
            r"shift|step|next|previous|index|\b1:|:-1|\bone\b|time|earlier|later|slice|off by|column|t ?\+ ?1",
        ),
        jax_lines=('alive = 1 - batch["done"][:, :-1]',),
        torch_lines=("nextnonterminal = 1.0 - dones[:, t + 1]",),
    ),
    "ratio": UnseenFault(
        port="policy",
        edits=(('ratios = jnp.exp(chosen - batch["logprob"])', 'ratios = jnp.exp(batch["logprob"] - chosen)'),),
        ours="the ratio is that of the old probability to the new one",
        reference="it is that of the new probability to the old one",
        expects=(
            r"ratio|subtract|\bsub|difference|order|sign|negat|minus|inver|reciprocal|operand|logprob",
            r"swap|order|sign|negat|inver|revers|reciprocal|\bold\b|other|exchang|operand|minus|-1\b|opposite|b ?- ?a",
        ),
        jax_lines=('ratios = jnp.exp(batch["logprob"] - chosen)',),
        torch_lines=('logratio = newlogprob - batch["logprob"]', "ratio = logratio.exp()"),
    ),
    "larger_gain": UnseenFault(
        port="policy",
        edits=(("jnp.minimum(gains, bounded)", "jnp.maximum(gains, bounded)"),),
        ours="the larger of the two gains counts",
        reference="the smaller gain counts: the larger of the losses",
        expects=(r"\bmax|maxim|larger", r"\bmin|smaller|instead|opposite"),
        jax_lines=("policy_gain = jnp.maximum(gains, bounded).mean()",),
        torch_lines=("pg_loss = torch.max(pg_loss1, pg_loss2).mean()",),
    ),
    "rates_swapped": UnseenFault(
        port="policy",
        edits=(
            ('"actor": optax.adam(3e-4, eps=1e-5)', '"actor": optax.adam(1e-3, eps=1e-5)'),
            ('"critic": optax.adam(1e-3, eps=1e-5)', '"critic": optax.adam(3e-4, eps=1e-5)'),
        ),
        ours="the actor learns at 1e-3, the critic at 3e-4",
        reference="the actor learns at 3e-4, the critic at 1e-3",
        expects=(
            r"\brates?\b|\blr\b|\blearns? at",
            r"actor|critic|group|swap|exchang|3e-0?4|0\.0003|1e-0?3|0\.001",
        ),
        jax_lines=(
            '"actor": optax.adam(1e-3, eps=1e-5),',
            '"critic": optax.adam(3e-4, eps=1e-5),',
            "jax_optimizer = optax.multi_transform(",
        ),
        torch_lines=(
            'groups = [{"params": model.actor.parameters(), "lr": 3e-4}, {"params": model.critic.parameters(),',
            "return torch.optim.Adam(groups, eps=1e-5)",
        ),
    ),
}
