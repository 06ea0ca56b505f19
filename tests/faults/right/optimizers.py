"""Optimizers and schedules of the learning rate, each in several ways to write it that mean the same."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Written:
    """Something that both halves write: name of a style -> expressions or statements, with LR for the rate."""

    torch: Mapping[str, str]
    jax: Mapping[str, str]


OWN = '''
def at(count):
    return rate(count) if callable(rate) else rate


class Own(NamedTuple):
    count: jax.Array
    moments: tuple


def by_hand(size, rule):
    """Make a transformation of a rule for one tensor: (g, p, moments, count from 1) -> (direction, moments)."""

    def init(params):
        zeros = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(size))
        return Own(jnp.zeros((), jnp.int32), zeros)

    def update(grads, state, params):
        leaves, tree = jax.tree.flatten(grads)
        moments = zip(*map(jax.tree.leaves, state.moments))
        pairs = [rule(*args, state.count + 1) for args in zip(leaves, jax.tree.leaves(params), moments)]
        updates = [-at(state.count) * direction for direction, _ in pairs]
        moments = tuple(jax.tree.unflatten(tree, column) for column in zip(*(moved for _, moved in pairs)))
        return jax.tree.unflatten(tree, updates), Own(state.count + 1, moments)

    return optax.GradientTransformation(init, update)


'''
LION = """
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_(torch.sign(0.9 * moment + 0.1 * p.grad), alpha=-group["lr"])
                moment.lerp_(p.grad, 0.01)
"""
RULES = {
    "sgd": """
def rule(g, p, moments, t):
    moment = 0.9 * moments[0] + g + 0.01 * p
    return moment, (moment,)
""",
    "adam": """
def rule(g, p, moments, t):
    m, v = 0.9 * moments[0] + 0.1 * g, 0.99 * moments[1] + 0.01 * jnp.square(g)
    return m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.99**t)) + 1e-6), (m, v)
""",
    "rmsprop": """
def rule(g, p, moments, t):
    v = 0.99 * moments[0] + 0.01 * g * g
    return g / (jnp.sqrt(v) + 1e-8), (v,)
""",
    "adagrad": """
def rule(g, p, moments, t):
    total = moments[0] + g**2
    return g / (jnp.sqrt(total) + 1e-10), (total,)
""",
    "lion": """
def rule(g, p, moments, t):
    mixed = 0.9 * moments[0] + 0.1 * g
    return (mixed > 0).astype(g.dtype) - (mixed < 0), (moments[0] + 0.01 * (g - moments[0]),)
""",
}
MOMENTS = {"adam": 2}
OWN_RULE = "by_hand(MOMENTS, rule)"
GROUPS = '[{"params": [p for p in params if p.ndim > 1], OF_MATRICES}, {"params": [p for p in params if p.ndim <= 1]}]'
IS_MATRIX = "lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)"
OPTIMIZERS = {
    "sgd": Written(
        {"stock": "torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=0.01)"},
        {
            "optax": "optax.chain(optax.add_decayed_weights(0.01), optax.sgd(rate, momentum=0.9))",
            "trace": "optax.chain(optax.add_decayed_weights(0.01), optax.trace(0.9), "
            "optax.scale_by_learning_rate(rate))",
            "jaxddp": "optim.sgd(rate, momentum=0.9, weight_decay=0.01)",
            "by_hand": OWN_RULE,
        },
    ),
    "nesterov": Written(
        {"stock": "torch.optim.SGD(params, lr=LR, momentum=0.8, nesterov=True)"},
        {
            "optax": "optax.sgd(rate, momentum=0.8, nesterov=True)",
            "trace": "optax.chain(optax.trace(decay=0.8, nesterov=True), optax.scale_by_learning_rate(rate))",
            "jaxddp": "optim.sgd(rate, momentum=0.8, nesterov=True)",
        },
    ),
    "adam": Written(
        {"stock": "torch.optim.Adam(params, lr=LR, betas=(0.9, 0.99), eps=1e-6)"},
        {
            "optax": "optax.adam(rate, b2=0.99, eps=1e-6)",
            "chain": "optax.chain(optax.scale_by_adam(0.9, 0.99, 1e-6), optax.scale_by_learning_rate(rate))",
            "injected": "optax.inject_hyperparams(optax.adam)(learning_rate=rate, b1=0.9, b2=0.99, eps=1e-6)",
            "jaxddp": "optim.adam(rate, betas=(0.9, 0.99), eps=1e-6)",
            "by_hand": OWN_RULE,
        },
    ),
    "adamw": Written(
        {
            "groups": f"torch.optim.AdamW({GROUPS}, lr=LR, weight_decay=0.0)".replace(
                "OF_MATRICES", '"weight_decay": 0.1'
            )
        },
        {
            "mask": f"optax.adamw(rate, weight_decay=0.1, mask={IS_MATRIX})",
            "chain": f"optax.chain(optax.scale_by_adam(), optax.masked(optax.add_decayed_weights(0.1), {IS_MATRIX}), "
            "optax.scale_by_learning_rate(rate))",
            "partition": "optax.partition({True: optax.adamw(rate, weight_decay=0.1), False: optax.adam(rate)}, "
            f"{IS_MATRIX})",
        },
    ),
    "two_rates": Written(
        {"groups": f"torch.optim.Adam({GROUPS}, lr=LR)".replace("OF_MATRICES", '"lr": LR / 2')},
        {
            "partition": "optax.multi_transform({True: optax.chain(optax.adam(rate), optax.scale(0.5)), "
            f"False: optax.adam(rate)}}, {IS_MATRIX})",
            "scaled": "optax.chain(optax.adam(rate), optax.stateless("
            "lambda tree, _: jax.tree.map(lambda x: x / 2 if x.ndim > 1 else x, tree)))",
            "masked": f"optax.chain(optax.adam(rate), optax.masked(optax.scale(0.5), {IS_MATRIX}))",
        },
    ),
    "rmsprop": Written(
        {"stock": "torch.optim.RMSprop(params, lr=LR)"},
        {
            "optax": "optax.rmsprop(rate, decay=0.99, eps_in_sqrt=False)",
            "jaxddp": "optim.rmsprop(rate)",
            "by_hand": OWN_RULE,
        },
    ),
    "adagrad": Written(
        {"stock": "torch.optim.Adagrad(params, lr=LR)"},
        {"jaxddp": "optim.adagrad(rate)", "by_hand": OWN_RULE},
    ),
    "adamax": Written(
        {"stock": "torch.optim.Adamax(params, lr=LR)"},
        {"optax": "optax.adamax(rate)", "jaxddp": "optim.adamax(rate)"},
    ),
    "adadelta": Written(
        {"stock": "torch.optim.Adadelta(params, lr=LR)"},
        {"optax": "optax.adadelta(rate, rho=0.9, eps=1e-6)"},
    ),
    "nadam": Written({"stock": "torch.optim.NAdam(params, lr=LR)"}, {"jaxddp": "optim.nadam(rate)"}),
    "radam": Written({"stock": "torch.optim.RAdam(params, lr=LR)"}, {"jaxddp": "optim.radam(rate)"}),
    "lion": Written({"by_hand": "Lion(params, LR)"}, {"by_hand": OWN_RULE}),
}
_T = "torch.optim.lr_scheduler."
SCHEDULES = {
    "constant": Written({"none": ""}, {"none": "rate = LR"}),
    "steps": Written(
        {"StepLR": f"{_T}StepLR(optimizer, 3, 0.5)", "lambda": f"{_T}LambdaLR(optimizer, lambda t: 0.5 ** (t // 3))"},
        {
            "optax": "rate = optax.exponential_decay(LR, 3, 0.5, staircase=True)",
            "function": "def rate(count):\n    return LR * 0.5 ** (count // 3)",
            "jaxddp": "rate = schedules.step(LR, 3, 0.5)",
        },
    ),
    "milestones": Written(
        {"MultiStepLR": f"{_T}MultiStepLR(optimizer, [4, 30], 0.3)"},
        {
            "optax": "rate = optax.piecewise_constant_schedule(LR, {4: 0.3, 30: 0.3})",
            "function": "def rate(count):\n    return LR * jnp.where(count < 4, 1.0, jnp.where(count < 30, 0.3, 0.09))",
        },
    ),
    "exponential": Written(
        {"ExponentialLR": f"{_T}ExponentialLR(optimizer, 0.95)"},
        {
            "optax": "rate = optax.exponential_decay(LR, 1, 0.95)",
            "function": "def rate(count):\n    return LR * 0.95**count",
        },
    ),
    "linear": Written(
        {"LinearLR": f"{_T}LinearLR(optimizer, 0.1, total_iters=5)"},
        {
            "optax": "rate = optax.linear_schedule(0.1 * LR, LR, 5)",
            "function": "def rate(count):\n    return LR * (0.1 + 0.9 * jnp.minimum(count, 5) / 5)",
        },
    ),
    "inverse_root": Written(
        {
            "lambda": f"{_T}LambdaLR(optimizer, lambda t: min((t + 1) / 4, (4 / (t + 1)) ** 0.5))",
            "branches": f"{_T}LambdaLR(optimizer, lambda t: (t + 1) / 4 if t < 4 else 2 * (t + 1) ** -0.5)",
        },
        {
            "minimum": "def rate(count):\n    return LR * jnp.minimum((count + 1) / 4, 2 / jnp.sqrt(count + 1))",
            "where": "def rate(count):\n    "
            "return LR * jnp.where(count < 4, (count + 1) / 4, 2 * lax.rsqrt(count + 1.0))",
        },
    ),
    "cosine": Written(
        {"CosineAnnealingLR": f"{_T}CosineAnnealingLR(optimizer, 8)"},
        {
            "function": "def rate(count):\n    return 0.5 * LR * (1 + jnp.cos(jnp.pi * count / 8))",
            "jaxddp": "rate = cycles.cosine(LR, 8)",
        },
    ),
    "polynomial": Written(
        {
            "PolynomialLR": f"{_T}PolynomialLR(optimizer, 12, 2.0)",
            "lambda": f"{_T}LambdaLR(optimizer, lambda t: max(0.0, 1 - t / 12) ** 2)",
        },
        {
            "optax": "rate = optax.polynomial_schedule(LR, 0.0, 2.0, 12)",
            "function": "def rate(count):\n    return LR * jnp.square(jnp.maximum(1 - count / 12, 0.0))",
        },
    ),
    "warm_then_steps": Written(
        {
            "SequentialLR": f"{_T}SequentialLR(optimizer, [{_T}LinearLR(optimizer, 0.25, total_iters=4), "
            f"{_T}StepLR(optimizer, 3, 0.5)], [4])"
        },
        {
            "optax": "rate = optax.join_schedules([optax.linear_schedule(LR / 4, LR, 4), "
            "optax.exponential_decay(LR, 3, 0.5, staircase=True)], [4])",
            "function": "def rate(count):\n    "
            "return LR * jnp.where(count < 4, 0.25 + 0.1875 * count, 0.5 ** ((count - 4) // 3))",
        },
    ),
    "restarts": Written(
        {"CosineAnnealingWarmRestarts": f"{_T}CosineAnnealingWarmRestarts(optimizer, 4)"},
        {
            "function": "def rate(count):\n    return 0.5 * LR * (1 + jnp.cos(jnp.pi * (count % 4) / 4))",
            "jaxddp": "rate = cycles.cosine_restarts(LR, 4)",
        },
    ),
    "held": Written(
        {"ConstantLR": f"{_T}ConstantLR(optimizer, 0.5, 3)"},
        {
            "function": "def rate(count):\n    return jnp.where(count < 3, 0.5 * LR, LR)",
            "optax": "rate = optax.join_schedules([optax.constant_schedule(LR / 2), optax.constant_schedule(LR)], [3])",
        },
    ),
}
CLIPS = {
    "none": ("", ""),
    "option": ("clip_grad_norm = 0.3", ""),
    "jaxddp": (
        "torch_clip_grad_norm = 0.3",
        "optax.stateless(lambda tree, _: optim.clip_by_global_norm(tree, 0.3)[0])",
    ),
    "by_hand": (
        "torch_clip_grad_norm = 0.3",
        "optax.stateless(lambda tree, _: jax.tree.map("
        "lambda x: x * jnp.minimum(1.0, 0.3 / (optax.tree.norm(tree) + 1e-6)), tree))",
    ),
}
MEANS = {
    "pmean": 'lax.pmean(gradients, "replica")',
    "psum": 'jax.tree.map(lambda x: lax.psum(x, "replica") / lax.psum(1, "replica"), gradients)',
    "gather": 'jax.tree.map(lambda x: lax.all_gather(x, "replica").mean(axis=0), gradients)',
}
STEP = """
def jax_step(loss, optimizer, state, batch):
    (value, buffers), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, state.buffers, batch)
    averaged = MEAN
    updates, opt_state = optimizer.update(averaged, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    shown = {"local_loss": value, "local_gradients": gradients, "gradients": averaged}
    return TrainState(state.step + 1, params, buffers, opt_state), shown
"""
