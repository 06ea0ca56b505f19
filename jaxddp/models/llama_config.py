"""Sizes of a Llama model, read from the config.json of a Hugging Face checkpoint."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jaxddp.errors import InputError
from jaxddp.files import read_json

# transformers' defaults for fields that a config.json leaves out. Sizes have no default.
_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "pad_token_id": None}
# The only implemented values of these fields.
_IMPLEMENTED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "rope_type": "default",
}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama model under transformers' names; the defaults are SmolLM2-135M's.

    Attributes:
        num_key_value_heads: heads of keys and values, each shared by num_attention_heads / num_key_value_heads
            neighbouring query heads.
        rope_theta: base of the rotary angles; the slowest one turns about once in 2 pi rope_theta positions.
        initializer_range: standard deviation of the initial weights.
        num_labels: number of classes C.
        pad_token_id: token that pads shorter sequences; None: all sequences have the same length.
    """

    vocab_size: int = 49152
    hidden_size: int = 576
    intermediate_size: int = 1536
    num_hidden_layers: int = 30
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    max_position_embeddings: int = 8192
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 1 / 24
    num_labels: int = 2
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for size, part in (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_key_value_heads")):
            if getattr(self, size) % getattr(self, part):
                raise InputError(f"{part} {getattr(self, part)}: must divide {size} {getattr(self, size)}")
        if self.head_dim % 2:
            raise InputError(f"head_dim {self.head_dim}: must be even, as rotary positions rotate feature pairs")

    @property
    def head_dim(self) -> int:
        """Number of features per head."""
        return self.hidden_size // self.num_attention_heads

    def of_transformers(self) -> dict[str, Any]:
        """Return the sizes as arguments of transformers' LlamaConfig."""
        arguments = dataclasses.asdict(self)
        arguments["rope_parameters"] = {"rope_type": "default", "rope_theta": arguments.pop("rope_theta")}
        return arguments

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Read the config.json of a checkpoint.

        Raises:
            InputError: the file is missing or lacks a field, or the model is not implemented.
        """
        path = Path(folder) / "config.json"
        fields = read_json(path, "not a readable config")
        # transformers 5 writes rope_theta into rope_parameters, transformers 4 next to rope_scaling.
        rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        fields |= {"rope_theta": rope.get("rope_theta", fields.get("rope_theta", 10_000.0))}
        fields |= {"rope_type": rope.get("rope_type", rope.get("type", "default"))}
        fields |= {"num_key_value_heads": fields.get("num_key_value_heads") or fields.get("num_attention_heads")}
        fields |= {"num_labels": len(fields.get("id2label", ("no", "yes")))}
        return cls._from_fields(path, _DEFAULTS | fields)

    @classmethod
    def _from_fields(cls, path: Path, fields: dict[str, Any]) -> Self:
        names = [field.name for field in dataclasses.fields(cls)]
        if missing := [name for name in names if name not in fields]:
            raise InputError(f"{path}: {', '.join(missing)} missing")
        config = cls(**{name: fields[name] for name in names})
        required = _IMPLEMENTED | {"head_dim": config.head_dim}
        others = [f"{name} {fields[name]}" for name, value in required.items() if fields.get(name) not in (None, value)]
        if others:
            raise InputError(f"{path}: {', '.join(others)}: not implemented")
        return config
