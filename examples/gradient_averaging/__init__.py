"""Averaged gradients are those of a larger batch: the backward pass by hand, and N devices against one.

python -m examples.gradient_averaging
"""

from examples.entry import Example

EXAMPLE = Example(
    name="Gradient averaging is a larger batch",
    seed="000",
    claim="The mean of the gradients of N devices is the gradient of one device with N times the batch.",
    verdict=(
        "True to the last digits, but not of the document's own model: its BatchNorm sees one device's examples only. "
        "With BatchNorm synchronised it is true of that too."
    ),
    command="python -m examples.gradient_averaging",
)
