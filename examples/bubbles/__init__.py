"""Bubbles: how long replicas wait for each other, measured in a running step and drawn.

    python -m examples.bubbles
    python -m examples.bubbles --picture bubbles.png --trace traces    # for chrome://tracing or ui.perfetto.dev

In torch, each process records the time between its forward pass, backward pass and all-reduces. In JAX, the compiled
step records it through callbacks that its values pass through: later work cannot start before the time is recorded,
and the time cannot be recorded before earlier work has ended. XLA therefore cannot move work across a mark. A callback
itself costs time, which is measured too.
"""
