"""Cases that `jaxddp check` checks without a port: jaxddp's models against torch_ref's."""

from typing import Any, NamedTuple

from jaxddp.config import TrainConfig
from jaxddp.config.choices import BASIC_OPTIMIZERS, BELONGS_TO, MODELS, OPTIMIZERS
from jaxddp.parity.cases.case import Case

STEPS = 10
HIDDEN_SIZES = {"linear": None, "mlp": (8, 6), "char_mlp": (16,), "convnet": (3, 4)}
# Small models with every kind of layer. No default learning rate or weight decay, so that a mistake in them shows.
LR = {"sgd": 0.05, "adagrad": 0.05, "asgd": 0.05, "adadelta": 1.0}


class NamedCase(NamedTuple):
    """A case and the feature that it tests.

    Attributes:
        feature: such as "clipping"; "" for a plain pair of model and optimizer.
        case: the case.
    """

    feature: str
    case: Case

    @property
    def name(self) -> str:
        """Name that `--only` is matched against: "mlp adam clipping x2"."""
        config = self.case.config
        return " ".join(filter(None, [config.model, config.optimizer, self.feature, f"x{self.case.world_size}"]))


def make_case(model: str, optimizer: str = "sgd", world_size: int = 2, steps: int = STEPS, **options: Any) -> Case:
    """Make a small case of a built-in model.

    Args:
        model, optimizer: names in `jaxddp.config`.
        world_size: number of replicas.
        steps: number of optimizer steps.
        options: fields of `TrainConfig`, and `ignored_labels`, see `Case`.

    >>> make_case("mlp", "adam", clip_grad_norm=0.5).name
    'mlp adam x2 float64'
    """
    ignored_labels = options.pop("ignored_labels", 0.0)
    given: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "dataset": "names" if model == "char_mlp" else "digits",
        "hidden_sizes": HIDDEN_SIZES[model],
        "global_batch_size": 32,
        "dtype": "float64",
        "lr": LR.get(optimizer, 0.003),
        "weight_decay": 0.02 if optimizer in BELONGS_TO["optimizer"]["weight_decay"] else None,
    }
    config = TrainConfig(**(given | options))
    return Case(config, world_size, steps, ignored_labels)


def builtin_cases(world_size: int = 2, steps: int = STEPS) -> list[NamedCase]:
    """Return every model with the basic optimizers, the MLP with every optimizer, and every feature once.

    >>> [named.name for named in builtin_cases()][:2]
    ['linear sgd x2', 'linear adam x2']
    """
    everything: dict[str, Any] = {"accumulation_steps": 2, "clip_grad_norm": 0.5, "loss_normalization": "global"}
    pairs = [
        NamedCase("", make_case(model, optimizer, world_size, steps))
        for model in MODELS
        for optimizer in (OPTIMIZERS if model == "mlp" else BASIC_OPTIMIZERS)
    ]

    def feature(name: str, model: str, optimizer: str, size: int = world_size, **options: Any) -> NamedCase:
        return NamedCase(name, make_case(model, optimizer, size, steps, **options))

    return pairs + [
        feature("one replica", "mlp", "sgd", 1),
        feature("more replicas", "convnet", "adam", 2 * world_size),
        feature("accumulation", "convnet", "adamw", accumulation_steps=2),
        feature("clipping", "mlp", "adam", 2 * world_size, clip_grad_norm=0.5),
        feature("global mean", "mlp", "sgd", loss_normalization="global", ignored_labels=0.4),
        feature("all of these", "mlp", "rmsprop", ignored_labels=0.4, **everything),
        feature("momentum", "mlp", "sgd", momentum=0.9, dampening=0.1),
        feature("nesterov", "mlp", "sgd", momentum=0.9, nesterov=True),
        feature("warm-up, cosine", "mlp", "adamw", schedule="warmup_cosine", warmup_steps=3),
        feature("one cycle", "mlp", "sgd", schedule="one_cycle", momentum=0.9),
    ]
