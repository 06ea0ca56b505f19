"""SmolLM2 with a classification head, fine-tuned on sentence pairs in JAX and by Hugging Face's transformers.

    python -m examples.fine_tune
    python -m examples.fine_tune --model-folder SmolLM2-135M --data msr_paraphrase_train.txt --epochs 3 --lr 1e-5

pairs.py and tokens.py make the examples, material.py writes them and the weights to files that both frameworks read,
in_jax.py and in_torch.py train, and claims.py checks the results. double.py keeps transformers in float64.
"""
