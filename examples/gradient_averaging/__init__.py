"""Averaged gradients are those of a larger batch: the backward pass by hand, and N devices against one.

python -m examples.gradient_averaging
"""
