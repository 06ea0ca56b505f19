"""Optimizers by groups of parameters, which are chosen by patterns of their names: torch's `param_groups`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import optax
from flax import nnx

from jaxddp.config.name_patterns import first_match, grouped_names
from jaxddp.errors import InputError
from jaxddp.torch_layout import dotted, torch_name

OPTION = "grouped"  # in messages

Groups = Mapping[str, optax.GradientTransformation | None]


class Grouped(optax.GradientTransformation):
    """Optimizer of groups of parameters.

    Attributes:
        frozen: checks the patterns with the names of all parameters, and returns those that do not learn.
        group_of: returns the number of a parameter's group.
        of_learning: the same optimizer, of whatever parameters are left; none of its patterns needs to match.
    """

    frozen: Callable[[Iterable[str]], tuple[str, ...]]
    group_of: Callable[[str], int]
    of_learning: optax.GradientTransformation

    def having(self, **attributes: Any) -> "Grouped":
        """Set the attributes, which a named tuple cannot be made with."""
        for name, value in attributes.items():
            setattr(self, name, value)
        return self

    def for_step(
        self, names: Iterable[str], frozen: Iterable[str]
    ) -> tuple[optax.GradientTransformation, dict[str, Any]]:
        """Return the optimizer that a replica step takes, and the options of the step that make it the same.

        Args:
            names: names of all parameters.
            frozen: what the step's option `frozen` has otherwise.
        """
        return self.of_learning, {"frozen": (*frozen, *self.frozen(names)), "group_of": self.group_of}


def grouped(groups: Groups, names: Callable[[str], str] = torch_name) -> Grouped:
    """Give groups of parameters an optimizer each, by the first pattern that matches the parameter's name.

    Args:
        groups: pattern, as in `fnmatch` ("encoder.*"), -> optimizer, or None for parameters that do not learn.
            `DistributedDataParallel` computes no gradients of these, so that they do not count in the clipped norm; it
            cannot look into an `optax.chain`.
        names: function from a parameter's path, joined by dots, to the name that patterns see, by default torch's
            ("fc.weight" for "fc.kernel"); `str` keeps the path.

    Raises:
        InputError: there are no groups; or at the first use, a pattern matches no parameter, or only parameters of
            patterns before it, or no pattern matches a parameter.

    Source: torch.optim's param_groups; `torch_ref.optim.param_groups` makes them of the same patterns.

    >>> from jaxddp import optim
    >>> optimizer = grouped({"head.*": None, "*.bias": optim.sgd(0.1), "*": optim.sgd(0.1, weight_decay=0.5)})
    >>> params = {"fc": {"kernel": 2.0, "bias": 2.0}, "head": {"kernel": 2.0}}
    >>> updates, state = optimizer.update(jax.tree.map(lambda _: 1.0, params), optimizer.init(params), params)
    >>> jax.tree.map(lambda update: round(float(update), 3), updates)
    {'fc': {'bias': -0.1, 'kernel': -0.2}, 'head': {'kernel': 0.0}}
    """
    if not groups:
        raise InputError(f"{OPTION}: needs at least one pattern with an optimizer")
    labels = {pattern: f"group {number}" for number, pattern in enumerate(groups)}  # no names of parameters

    def pattern_of(path: str) -> str:
        if (first := first_match(groups, names(path))) is None:
            raise InputError(f"{OPTION}: no pattern matches {names(path)}; add '*' as the last")
        return first

    def labelled(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: labels[pattern_of(dotted(path))], tree, is_leaf=_is_variable
        )

    def frozen(paths: Iterable[str]) -> tuple[str, ...]:
        own = {names(path): path for path in paths}
        members = grouped_names(OPTION, groups, own)
        return tuple(own[name] for pattern, group in groups.items() if group is None for name in members[pattern])

    def init(params: optax.Params) -> optax.OptState:
        frozen(dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_variable))
        return of_learning.init(params)

    optimizers = {labels[pattern]: optax.set_to_zero() if one is None else one for pattern, one in groups.items()}
    of_learning = optax.partition(optimizers, labelled)
    optimizer = Grouped(init, of_learning.update)
    return optimizer.having(
        frozen=frozen, of_learning=of_learning, group_of=lambda path: list(groups).index(pattern_of(path))
    )


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
