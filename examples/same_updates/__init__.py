"""One device, many devices, DDP: the same updates, and the learning rates that they need."""

from examples.entry import Example

EXAMPLE = Example(
    name="One device, many devices, DDP: the same updates",
    seed="004",
    claim=(
        "DDP makes the same updates as one device if SGD's learning rate is multiplied by the number of processes, "
        "while Adam and similar optimizers keep theirs."
    ),
    verdict=(
        "True of a loss that is a sum; with a mean, no learning rate changes. The document's accuracy counts "
        "repeated examples too."
    ),
    command="python -m examples.same_updates --opt sgd --no_shuffle",
)
