"""Bubbles: how long replicas wait for each other, measured in a running step, and drawn.

    python -m examples.bubbles
    python -m examples.bubbles --picture bubbles.png --trace traces    # for chrome://tracing or ui.perfetto.dev

In torch each process notes the time between its forward pass, backward pass and all-reduces. In JAX the compiled step
does, by callbacks that its values pass through: what comes next cannot start before the time is noted, nor can the
time be noted before what came before has ended. That keeps XLA from moving work across a mark, and costs the time of
a callback, which is measured too.
"""

from examples.entry import Example

EXAMPLE = Example(
    name="Bubbles",
    seed="001",
    claim="Replicas wait for each other in batch normalisation, in the loss, and once at the end for all gradients.",
    verdict="The loss need not wait: the number of examples can travel with the gradients. The others are so.",
    command="python -m examples.bubbles --picture docs/bubbles.png",
    picture="bubbles.png",
)
