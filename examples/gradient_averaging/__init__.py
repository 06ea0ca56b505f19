"""Averaged gradients are those of a larger batch: the backward pass by hand, and N devices against one.

python -m examples.gradient_averaging
"""

from examples.entry import Example

EXAMPLE = Example(
    name="Gradient averaging is a larger batch",
    seed="000",
    claim="Averaging the gradients of N devices gives the gradient of one device with N times the batch.",
    verdict=(
        "True to the last digits, except for the document's own model: each device's BatchNorm sees only that "
        "device's examples. With synchronised BatchNorm it is true of that model too."
    ),
    command="python -m examples.gradient_averaging",
)
