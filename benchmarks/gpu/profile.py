"""Part `profile`: where the time of a step goes on the GPU, and the three largest gaps."""

from functools import partial

from benchmarks.gpu import part
from benchmarks.gpu.children import ask
from benchmarks.gpu.jobs import jobs
from benchmarks.gpu.records import Record

TRACES = "traces"  # folder of the traces within that of the results
TIMEOUT = 150.0


def measure(record: Record) -> None:
    """Trace both jobs, each in a process of its own."""
    words = [str(record.folder / TRACES), *(["--smoke"] if record.smoke else [])]
    for name in jobs(record.smoke):
        record.add(name, partial(ask, "benchmarks.gpu.trace_jax", [name, *words], timeout=TIMEOUT))


if __name__ == "__main__":
    part.run("profile", measure)
