"""Replica steps as text, correct as they are."""

from tests.support.small_port import Change, replaced

STEP = """
def jax_step(local_loss, optimizer, state, batch):
    from jaxddp.state import TrainState
    params, opt_state = state.params, state.opt_state
    (loss, buffers), gradients = jax.value_and_grad(local_loss, has_aux=True)(params, state.buffers, batch)
    stages = {"local_loss": loss, "local_gradients": gradients}
    gradients = jax.lax.pmean(gradients, axis_name)
    stages["gradients"] = gradients
    buffers = jax.tree.map(lambda b: jax.lax.all_gather(b, axis_name)[0], buffers)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    params = optax.apply_updates(params, updates)
    return TrainState(state.step + 1, params, buffers, opt_state), stages
"""
APPLY = "params = optax.apply_updates(params, updates)"
MEAN = "gradients = jax.lax.pmean(gradients, axis_name)"
SHARE = "buffers = jax.tree.map(lambda b: jax.lax.all_gather(b, axis_name)[0], buffers)"

LAST = f"if part == accumulation_steps - 1: {MEAN}"
ACCUMULATES = """
accumulation_steps = 3
def jax_step(local_loss, optimizer, state, batch):
    from jaxddp.state import TrainState
    params, buffers = state.params, state.buffers
    gradients = jax.tree.map(jnp.zeros_like, params)
    for part in range(accumulation_steps):
        def loss_of_part(params):
            loss, new = local_loss(params, buffers, {name: array[part] for name, array in batch.items()})
            return loss / accumulation_steps, new
        added, buffers = jax.grad(loss_of_part, has_aux=True)(params)
        gradients = jax.tree.map(jnp.add, gradients, added)
        if part == accumulation_steps - 1: gradients = jax.lax.pmean(gradients, axis_name)
    updates, opt_state = optimizer.update(gradients, state.opt_state, params)
    params, stages = optax.apply_updates(params, updates), {"gradients": gradients}
    return TrainState(state.step + 1, params, buffers, opt_state), stages
"""


def step(*changes: Change, text: str = STEP) -> str:
    """Return the replica step with pieces replaced."""
    return replaced(text, *changes)
