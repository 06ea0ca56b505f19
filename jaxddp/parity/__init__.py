"""The parity check: identical steps in jaxddp and in torch, compared stage by stage.

The one place that knows both frameworks. Each runner takes a `Case` and returns a
`Trajectory`; the ranks of torch are child processes, so nothing here imports torch twice.
"""
