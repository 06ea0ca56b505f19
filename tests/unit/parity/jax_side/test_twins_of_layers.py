"""Modules of both sides are compared with each other only if they hold the same arrays."""

import jax
import jax.numpy as jnp
import torch
from flax import linen, traverse_util

from jaxddp.parity.convert import Converter
from jaxddp.parity.jax_side.layers import twins


class TorchPreNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fn = torch.nn.LayerNorm(4), torch.nn.Sequential(torch.nn.Linear(4, 4))


class PreNorm(linen.Module):
    fn: linen.Module

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fn(linen.LayerNorm()(x))


class Mixed(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(4)(x)


class Blocks(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = PreNorm(Mixed())(x)  # linen names Mixed_0 beside PreNorm_0, not within it
        return x


def test_a_block_is_no_twin_of_the_module_that_holds_several() -> None:
    shapes = jax.eval_shape(Blocks().init, jax.random.key(0), jnp.ones((1, 4)))["params"]
    names = {f"PreNorm_{i}.LayerNorm_0": f"{i}.norm" for i in range(2)}
    names |= {f"Mixed_{i}.Dense_0": f"{i}.fn.0" for i in range(2)}
    converter = Converter(
        torch.nn.Sequential(TorchPreNorm(), TorchPreNorm()),
        {".".join(path): x.shape for path, x in traverse_util.flatten_dict(shapes).items()},
        names,
    )
    layers = {names[name]: name for name in names}
    assert twins(converter) == layers | {"0.fn": "Mixed_0", "1.fn": "Mixed_1", "": ""}


def test_a_layer_is_no_twin_of_one_without_its_bias() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(3, 2))
    converter = Converter(layer, {"Dense_0.kernel": (3, 2), "shift": (2,)}, {"Dense_0": "0", "shift": "0.bias"})
    assert twins(converter) == {"": ""}


def test_modules_that_hold_shared_weights_on_one_side_are_twins() -> None:
    module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "head": torch.nn.ModuleDict()})
    module["head"]["norm"], module["head"]["out"] = torch.nn.LayerNorm(2), torch.nn.Linear(2, 3, bias=False)
    module["head"]["out"].weight = module["embed"].weight
    shapes = {"embed.embedding": (3, 2), "head.norm.scale": (2,), "head.norm.bias": (2,)}
    assert twins(Converter(module, shapes))["head"] == "head"
    assert twins(Converter(module, shapes | {"head.out.kernel": (2, 3)}))["head"] == "head"
