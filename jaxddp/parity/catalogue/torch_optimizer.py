"""Write torch's optimizer as JAX code for a fix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Defaults of the functions in the code; options that equal them are omitted.
DEFAULTS: dict[str, dict[str, Any]] = {
    "optax.sgd": {"momentum": 0, "nesterov": False},
    "jaxddp.optim.sgd": {"momentum": 0, "dampening": 0, "nesterov": False},
    "optax.adam": {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 0.0, "nesterov": False},
    "optax.adamw": {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 0.0, "nesterov": False},
    "jaxddp.optim.adam": {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False},
    "jaxddp.optim.adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False},
    "optax.rmsprop": {"eps": 1e-8, "initial_scale": 0.0, "centered": False, "nesterov": False},
    "jaxddp.optim.rmsprop": {"alpha": 0.99, "eps": 1e-8, "momentum": 0, "centered": False},
    "jaxddp.optim.adagrad": {"lr_decay": 0, "eps": 1e-10, "initial_accumulator_value": 0},
}
# Of the same names and options in torch and in jaxddp, and not in Optax.
OTHERS = ("NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD", "Adafactor", "Muon")
# Keys of a group that are not options of its optimizer, or are written apart.
NOT_OF_THE_KIND = frozenset(
    "params names optimizer kind lr initial_lr weight_decay foreach capturable differentiable fused".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class TorchOptimizer:
    """Torch's optimizer of the run.

    Attributes:
        kind: name of its class.
        groups: its parameter groups, with torch's names of the options.
    """

    kind: str
    groups: Sequence[Mapping[str, Any]]

    @property
    def decays(self) -> list[float]:
        """Return the different values of weight decay, in ascending order."""
        return sorted({group.get("weight_decay", 0.0) for group in self.groups})

    @property
    def decouples(self) -> bool:
        """Return whether weight decay bypasses the gradients."""
        return self.kind == "AdamW" or bool(self._shared("decoupled_weight_decay"))

    def in_jax(self, *shown: str, rate: str = "lr") -> str:
        """Return code that makes the same optimizer; "" for an unknown one.

        If some tensors do not decay, the code has the name `mask` for a mask of those that do.

        Args:
            shown: options of the function that are written even if they equal their defaults.
            rate: name of the learning rate, or its schedule.

        >>> TorchOptimizer("SGD", [{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.03}]).in_jax()
        'optax.chain(optax.add_decayed_weights(0.03), optax.sgd(lr, momentum=0.9))'
        >>> TorchOptimizer("AdamW", [{"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}]).in_jax()
        'optax.adamw(lr, b2=0.98, eps=1e-6, weight_decay=0.01)'
        >>> TorchOptimizer("RMSprop", [{"alpha": 0.99, "momentum": 0}]).in_jax("eps")
        'optax.rmsprop(lr, decay=0.99, eps=1e-8, eps_in_sqrt=False)'
        >>> TorchOptimizer("Adadelta", [{"rho": 0.9, "eps": 1e-6, "foreach": None}]).in_jax()
        'jaxddp.optim.adadelta(lr, rho=0.9, eps=1e-6)'
        >>> TorchOptimizer("LBFGS", [{}]).in_jax()
        ''
        """
        if not self.groups or self._shared("maximize") or (made := self._function()) is None:
            return ""
        *none, decay = self.decays
        if len(none) > 1 or any(none) or any(value is None for value in made[1].values()):
            return ""
        function, options = made
        defaults = DEFAULTS.get(function, {})
        options = {
            name: x for name, x in options.items() if name in shown or name not in defaults or x != defaults[name]
        }
        if self.decouples:
            options |= {"weight_decay": decay}
            code = _call(function, rate, options)
            if none:
                return f"{code[:-1]}, mask=mask)" if function.startswith("optax.") else ""
            return code
        code = _call(function, rate, options)
        if not decay:
            return code
        return f"optax.chain(optax.add_decayed_weights({_written(decay)}{', mask' * bool(none)}), {code})"

    def _function(self) -> tuple[str, dict[str, Any]] | None:
        """Return the function and its options except weight decay; an option is None if the groups differ in it."""
        shared = self._shared
        momentum, eps, largest = shared("momentum", 0), shared("eps", 1e-8), shared("amsgrad")
        if self.kind == "SGD":
            options = {"momentum": momentum, "nesterov": shared("nesterov", False)}
            dampening = shared("dampening", 0) if momentum else 0
            made = ("jaxddp.optim.sgd", options | {"dampening": dampening}) if dampening else ("optax.sgd", options)
        elif self.kind in ("Adam", "AdamW"):
            betas, name = shared("betas", (0.9, 0.999)), "adamw" if self.decouples else "adam"
            if largest:
                made = (f"jaxddp.optim.{name}", {"betas": betas, "eps": eps, "amsgrad": True})
            else:
                first, second = betas or (None, None)
                made = (f"optax.{name}", {"b1": first, "b2": second, "eps": eps, "eps_root": 0.0, "nesterov": False})
        elif self.kind == "RMSprop":
            alpha, centred = shared("alpha", 0.99), shared("centered", False)
            if momentum:
                made = ("jaxddp.optim.rmsprop", {"alpha": alpha, "eps": eps, "momentum": momentum, "centered": centred})
            else:
                made = ("optax.rmsprop", {"decay": alpha, "eps": eps, "eps_in_sqrt": False, "centered": centred})
                made[1].update(initial_scale=0.0, nesterov=False)
        elif self.kind == "Adagrad":
            names = ("lr_decay", "eps", "initial_accumulator_value")
            made = (
                "jaxddp.optim.adagrad",
                {name: shared(name, DEFAULTS["jaxddp.optim.adagrad"][name]) for name in names},
            )
        elif self.kind in OTHERS:
            given = {name: shared(name) for name in self.groups[0] if name not in NOT_OF_THE_KIND}
            made = f"jaxddp.optim.{self.kind.lower()}", {name: x for name, x in given.items() if x is not False}
        else:
            return None
        return made

    def _shared(self, option: str, default: Any = None) -> Any:
        """Return the value of an option; None if the groups have different values."""
        values = [group.get(option, default) for group in self.groups]
        values = [tuple(value) if isinstance(value, list) else value for value in values]
        return values[0] if all(value == values[0] for value in values) else None


def _call(function: str, rate: str, options: Mapping[str, Any]) -> str:
    return f"{function}({', '.join([rate, *(f'{name}={_written(x)}' for name, x in options.items())])})"


def _written(value: Any) -> str:
    """Format a number as a programmer would, without losing a digit.

    >>> [_written(x) for x in (1e-08, 0.03, True, (0.9, 0.98))]
    ['1e-8', '0.03', 'True', '(0.9, 0.98)']
    """
    return repr(value).replace("e-0", "e-")
