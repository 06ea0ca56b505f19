"""Everything that takes a GPU to measure, in one command: `python -m benchmarks.gpu` (`make gpu`).

Each part is a module that runs as a process of its own and keeps its record in the results folder:

    machine -> parity -> precision -> tests -> benchmark -> utilisation -> profile -> page
"""
