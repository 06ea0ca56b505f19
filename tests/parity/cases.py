"""The cases of the parity tests, and what was measured on them."""

from jaxddp.config import TrainConfig
from jaxddp.parity.case import Case

MODELS = ("linear", "mlp", "char_mlp", "convnet")
SIZES = {"linear": None, "mlp": (8, 6), "char_mlp": (16,), "convnet": (3, 4)}


def make_case(model: str, optimizer: str = "sgd", world_size: int = 2, steps: int = 20, **options) -> Case:
    """A small case; a momentum, a decay or a rate that is not the default makes a mistake in it show."""
    ignored_labels = options.pop("ignored_labels", 0.0)
    defaults = {
        "dataset": "names" if model == "char_mlp" else "digits",
        "hidden_sizes": SIZES[model],
        "global_batch_size": 32,
        "dtype": "float64",
        "lr": 0.05 if optimizer in ("sgd", "adagrad") else 0.003,
        "weight_decay": 0.02,
    }
    config = TrainConfig(model=model, optimizer=optimizer, **(defaults | options))
    return Case(config, world_size, steps, ignored_labels)


# (model, optimizer) -> the worst residual of any stage, step and world size; filled by test_matrix.
WORST: dict[tuple[str, str], float] = {}
# (model, optimizer) -> how far float32 is from float64, jaxddp's over torch's.
FLOAT32: dict[tuple[str, str], float] = {}


def summary(optimizers: tuple[str, ...]) -> list[str]:
    """The matrix as a table: a row per model, a column per optimizer."""
    head = f"{'':9}" + "".join(f"{optimizer:>20}" for optimizer in optimizers)

    def cell(key: tuple[str, str]) -> str:
        return f"{WORST[key]:.0e} ({FLOAT32.get(key, float('nan')):.2f})" if key in WORST else "-"

    rows = [f"{model:9}" + "".join(f"{cell((model, optimizer)):>20}" for optimizer in optimizers) for model in MODELS]
    return [head, *rows]
