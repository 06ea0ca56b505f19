"""Trials beyond a run: both sides are compared once more, with other weights, examples, gradients and sizes."""
