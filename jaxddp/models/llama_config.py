"""A Llama model's sizes, as the config.json of a Hugging Face checkpoint has them."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jaxddp.errors import InputError

# What transformers takes where a config.json says nothing. The sizes have no such default here.
_UNSAID = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "pad_token_id": None}
# All that is implemented here of what a config.json may ask for.
_ONLY = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "rope_type": "default",
}


@dataclass(frozen=True)
class LlamaConfig:
    """A model's sizes, under transformers' names; the defaults are SmolLM2-135M's.

    Attributes:
        num_key_value_heads: each serves num_attention_heads / num_key_value_heads neighbouring heads.
        rope_theta: the slowest rotary angle turns about once in 2 pi rope_theta places.
        initializer_range: standard deviation of initial weights.
        num_labels: classes C.
        pad_token_id: what a shorter sequence is filled up with; None: all are of one length.
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
        for whole, part in (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_key_value_heads")):
            if getattr(self, whole) % getattr(self, part):
                raise InputError(f"{part} {getattr(self, part)}: must divide {whole} {getattr(self, whole)}")
        if self.head_dim % 2:
            raise InputError(f"head_dim {self.head_dim}: must be even, as rotary positions turn pairs")

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """What the config.json of a checkpoint says.

        Raises:
            InputError: there is none, or it is of a model that is not implemented here.
        """
        path = Path(folder) / "config.json"
        try:
            said = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: not a readable config ({error})") from error
        # transformers 5 writes rope_theta into rope_parameters, 4 beside rope_scaling.
        rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
        said |= {"rope_theta": rope.get("rope_theta", said.get("rope_theta", 10_000.0))}
        said |= {"rope_type": rope.get("rope_type", rope.get("type", "default"))}
        said |= {"num_key_value_heads": said.get("num_key_value_heads") or said.get("num_attention_heads")}
        said |= {"num_labels": len(said.get("id2label", ("no", "yes")))}
        return cls._from_said(path, _UNSAID | said)

    @classmethod
    def _from_said(cls, path: Path, said: dict[str, Any]) -> Self:
        names = [field.name for field in dataclasses.fields(cls)]
        if missing := [name for name in names if name not in said]:
            raise InputError(f"{path}: does not say {', '.join(missing)}")
        config = cls(**{name: said[name] for name in names})
        only = _ONLY | {"head_dim": config.head_dim}
        if unlike := [f"{name} {said[name]}" for name, value in only.items() if said.get(name) not in (None, value)]:
            raise InputError(f"{path}: {', '.join(unlike)}: not implemented here")
        return config
