"""The model's own tree: masks, labels and states of optimizers that go by path, for nnx and for linen."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.replicas import Replicas
from jaxddp.nn.functional import Functional
from jaxddp.nn.linen import LinenFunctional
from jaxddp.nn.model_tree import ModelTree, seeing

DECAY = 0.5


def kernels(params: Any) -> Any:
    """Mask all but the biases, by path."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "bias", params)


def labels(params: Any) -> Any:
    """Label the first layer "slow" and all others "fast", by path."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "slow" if path[1].key == 0 else "fast", params)


def model() -> nnx.Module:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs))


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "mask": lambda: optax.adamw(0.1, weight_decay=DECAY, mask=kernels),
    "masked": lambda: optax.masked(optax.sgd(0.1, momentum=0.9), kernels),
    "labels": lambda: optax.multi_transform({"slow": optax.sgd(0.1), "fast": optax.adam(0.1)}, labels),
    "shown": lambda: optax.inject_hyperparams(optax.adamw, static_args="mask")(0.1, weight_decay=DECAY, mask=kernels),
    "every 2": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_sees_what_nnx_hands_it(name: str) -> None:
    """Three updates equal those of optax with the module's own state, and the kept state is flat."""
    functional, optimizer = Functional(model()), OPTIMIZERS[name]()
    params: Any = functional.params
    own = nnx.as_pure(nnx.state(model(), nnx.Param))
    flat = seeing(functional.param_tree, optimizer)
    opt_state, own_state = flat.init(params), optimizer.init(own)
    for _ in range(3):
        updates, opt_state = flat.update(params, opt_state, params)
        own_updates, own_state = optimizer.update(own, own_state, own)
        params, own = optax.apply_updates(params, updates), optax.apply_updates(own, own_updates)
    for path, value in nnx.to_flat_state(own):
        np.testing.assert_array_equal(params[".".join(map(str, path))], value)
    is_state = lambda node: isinstance(node, nnx.State)  # noqa: E731
    assert not any(map(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))
    nested = functional.param_tree.nest_within(opt_state)
    assert jax.tree.structure(nested) == jax.tree.structure(own_state)


def test_data_parallel_decays_by_path() -> None:
    """A mask by path spares the biases; a flat dictionary has paths of one key, "layers.0.bias"."""

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return 0 * model(batch["x"])[:, 0]

    decay = optax.chain(optax.add_decayed_weights(DECAY, kernels), optax.scale(-1.0))
    ddp = DistributedDataParallel(model(), decay, loss_fn, replicas=Replicas(jax.devices()[:2]))
    state, before = ddp.init(), ddp.functional.params
    biased = {name: value + 1 for name, value in before.items()}
    state, _ = ddp.steps(ddp.init(biased), MicroBatches(None, ddp.replicas.shard({"x": np.ones((2, 1, 4, 2), "f4")})))
    for name, value in ddp.values(state)[0].items():
        left = 1.0 if name.endswith("bias") else 1 - DECAY
        np.testing.assert_allclose(value, left * biased[name], rtol=1e-6)  # measured: 0


def test_parameters_without_a_gradient_are_left_out_of_the_tree() -> None:
    tree = ModelTree({"a.w": ("a", "w"), "b.w": ("b", "w")})
    optimizer = seeing(tree, optax.trace(0.5))
    opt_state = optimizer.init({"a.w": jnp.ones(1)})
    updates, opt_state = optimizer.update({"a.w": jnp.ones(1)}, opt_state, None)
    assert updates.keys() == opt_state.trace.keys() == {"a.w"}


def test_linen_modules_keep_their_collections() -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.BatchNorm(use_running_average=False)(linen.Dense(3)(x))

    functional = LinenFunctional(Net(), lambda model, batch: model(batch["x"]).sum(-1), {"x": jnp.ones((2, 2))})
    own = Net().init(jax.random.key(0), jnp.ones((2, 2)))
    assert jax.tree.structure(functional.param_tree.nest(functional.params)) == jax.tree.structure(own["params"])
    buffers = functional.buffer_tree.nest(functional.buffers)
    assert jax.tree.structure(buffers) == jax.tree.structure({"batch_stats": own["batch_stats"]})
    assert functional.buffer_tree.flat(own).keys() == functional.buffers.keys()
    masked = seeing(functional.param_tree, optax.add_decayed_weights(1.0, kernels))
    updates, _ = masked.update(functional.params, masked.init(functional.params), functional.params)
    doubled = {name for name, value in updates.items() if (value != functional.params[name]).any()}
    assert doubled == {"Dense_0.kernel", "BatchNorm_0.scale"}
