"""Everything that takes a GPU to measure, in one command: `python -m benchmarks.gpu` (`make gpu`).

    measurements -> a child process for each -> record.json -> README.md

`benchmarks.gpu.measurements` lists them; each is a function that returns a row of its part.
"""
