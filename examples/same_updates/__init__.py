"""One device, many devices, DDP: the same updates, and what the learning rate has to do with it."""

from examples.entry import Example

EXAMPLE = Example(
    name="One device, many devices, DDP: the same updates",
    seed="004",
    claim="DDP makes the updates of one device if SGD's learning rate is multiplied by the number of processes, "
    "and that of optimizers such as Adam is left alone.",
    verdict="True of a loss that is a sum. With a mean no rate changes. Its accuracy counts repeated examples.",
    command="python -m examples.same_updates --opt sgd --no_shuffle",
)
