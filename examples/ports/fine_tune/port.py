"""Fine-tuning a BERT classifier in bfloat16 with frozen embeddings, and its port to flax.nnx.

    jaxddp check examples/ports/fine_tune/port.py

`names` is as `--write-names` has written it.
"""

import flax_fine_tune
import numpy as np
import optax
import torch
from flax import nnx
from torch_fine_tune import BertConfig, BertForSequenceClassification

VOCAB, LENGTH, BATCH = 2000, 32, 8  # BERT's: 30522, 128, 32
LR, WEIGHT_DECAY, STEPS = 5e-5, 0.01, 1000


def torch_model():
    model = BertForSequenceClassification(BertConfig(vocab_size=VOCAB))
    model.bert.embeddings.requires_grad_(False)
    return model


def torch_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    return torch.nn.functional.cross_entropy(logits.float(), batch["labels"])


def configure_optimizers(model):
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    no_decay = [p for name, p in trained.items() if name.endswith(("bias", "LayerNorm.weight"))]
    decay = [p for name, p in trained.items() if not name.endswith(("bias", "LayerNorm.weight"))]
    groups = [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / STEPS))


def jax_model():
    return flax_fine_tune.Classifier(flax_fine_tune.Config(vocab=VOCAB), nnx.Rngs(0))


def jax_loss(model, batch):
    logits = model(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), batch["labels"]).mean()


jax_optimizer = flax_fine_tune.make_optimizer(LR, STEPS, WEIGHT_DECAY)


def batch(step, rank):
    """Draw pairs of sentences; equal second words make a paraphrase."""
    rng = np.random.default_rng((step, rank))
    mask = np.arange(LENGTH) < rng.integers(LENGTH // 2, LENGTH + 1, (BATCH, 1))
    ids = rng.integers(1, VOCAB, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2, "labels": (ids[:, 1] % 2)}


names = {
    "embeddings.words": "bert.embeddings.word_embeddings",
    "embeddings.segments": "bert.embeddings.token_type_embeddings",
    "embeddings.positions": "bert.embeddings.position_embeddings",
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "layers.0.attention.query": "bert.encoder.0.attention.self.query",
    "layers.0.attention.key": "bert.encoder.0.attention.self.key",
    "layers.0.attention.value": "bert.encoder.0.attention.self.value",
    "layers.0.attention.out": "bert.encoder.0.attention.output.dense",
    "layers.0.norm1": "bert.encoder.0.attention.output.LayerNorm",
    "layers.0.up": "bert.encoder.0.intermediate.dense",
    "layers.0.down": "bert.encoder.0.output.dense",
    "layers.0.norm2": "bert.encoder.0.output.LayerNorm",
    "layers.1.attention.query": "bert.encoder.1.attention.self.query",
    "layers.1.attention.key": "bert.encoder.1.attention.self.key",
    "layers.1.attention.value": "bert.encoder.1.attention.self.value",
    "layers.1.attention.out": "bert.encoder.1.attention.output.dense",
    "layers.1.norm1": "bert.encoder.1.attention.output.LayerNorm",
    "layers.1.up": "bert.encoder.1.intermediate.dense",
    "layers.1.down": "bert.encoder.1.output.dense",
    "layers.1.norm2": "bert.encoder.1.output.LayerNorm",
    "layers.2.attention.query": "bert.encoder.2.attention.self.query",
    "layers.2.attention.key": "bert.encoder.2.attention.self.key",
    "layers.2.attention.value": "bert.encoder.2.attention.self.value",
    "layers.2.attention.out": "bert.encoder.2.attention.output.dense",
    "layers.2.norm1": "bert.encoder.2.attention.output.LayerNorm",
    "layers.2.up": "bert.encoder.2.intermediate.dense",
    "layers.2.down": "bert.encoder.2.output.dense",
    "layers.2.norm2": "bert.encoder.2.output.LayerNorm",
    "layers.3.attention.query": "bert.encoder.3.attention.self.query",
    "layers.3.attention.key": "bert.encoder.3.attention.self.key",
    "layers.3.attention.value": "bert.encoder.3.attention.self.value",
    "layers.3.attention.out": "bert.encoder.3.attention.output.dense",
    "layers.3.norm1": "bert.encoder.3.attention.output.LayerNorm",
    "layers.3.up": "bert.encoder.3.intermediate.dense",
    "layers.3.down": "bert.encoder.3.output.dense",
    "layers.3.norm2": "bert.encoder.3.output.LayerNorm",
    "pooler": "bert.pooler",
    "head": "classifier",
}
