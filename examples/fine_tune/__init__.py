"""Document 002's fine-tune: SmolLM2 with a classification head on sentence pairs, in JAX and by transformers."""
