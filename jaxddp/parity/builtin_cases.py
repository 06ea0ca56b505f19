"""The cases that `python -m jaxddp.parity` checks: jaxddp's own models against torch_ref's."""

from typing import Any, NamedTuple

from jaxddp.config import TrainConfig
from jaxddp.config.choices import MODELS, OPTIMIZERS
from jaxddp.parity.cases import Case

STEPS = 10
# Small, and of every kind of layer; a decay and a rate that are nobody's default make a mistake in them show.
HIDDEN_SIZES = {"linear": None, "mlp": (8, 6), "char_mlp": (16,), "convnet": (3, 4)}
LR = {"sgd": 0.05, "adagrad": 0.05}


class Named(NamedTuple):
    """A case, and what is special about it."""

    feature: str
    case: Case

    @property
    def name(self) -> str:
        """What `--only` is matched with: "mlp adam clipping x2"."""
        config = self.case.config
        return " ".join(filter(None, [config.model, config.optimizer, self.feature, f"x{self.case.world_size}"]))


def make_case(model: str, optimizer: str = "sgd", world_size: int = 2, steps: int = STEPS, **options: Any) -> Case:
    """A small case of a built-in model.

    Args:
        options: fields of `TrainConfig`, and `ignored_labels`, see `Case`.

    >>> make_case("mlp", "adam", clip_grad_norm=0.5).name
    'mlp adam x2 float64'
    """
    ignored_labels = options.pop("ignored_labels", 0.0)
    defaults = {
        "dataset": "names" if model == "char_mlp" else "digits",
        "hidden_sizes": HIDDEN_SIZES[model],
        "global_batch_size": 32,
        "dtype": "float64",
        "lr": LR.get(optimizer, 0.003),
        "weight_decay": 0.02,
    }
    return Case(
        TrainConfig(model=model, optimizer=optimizer, **(defaults | options)), world_size, steps, ignored_labels
    )


def builtin_cases(world_size: int = 2, steps: int = STEPS) -> list[Named]:
    """Every model with every optimizer, and every feature once.

    >>> [named.name for named in builtin_cases()][:2]
    ['linear sgd x2', 'linear adam x2']
    """
    everything: dict[str, Any] = {"accumulation_steps": 2, "clip_grad_norm": 0.5, "loss_normalization": "global"}
    pairs = [Named("", make_case(model, optimizer, world_size, steps)) for model in MODELS for optimizer in OPTIMIZERS]

    def feature(name: str, model: str, optimizer: str, size: int = world_size, **options: Any) -> Named:
        return Named(name, make_case(model, optimizer, size, steps, **options))

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
