"""A trace of a GPU, made by hand, as jax's profiler writes one."""

from typing import Any


def event(pid: int, tid: int, name: str, begin: float, duration: float, **args: str) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin, "dur": duration, "args": args}


def named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def gpu_trace() -> dict[str, Any]:
    """Return a trace of 100 us on one GPU, with a message, two gaps, a copy, and the host's side."""
    return {
        "traceEvents": [
            named("process_name", 1, 0, "/device:GPU:0"),
            named("process_name", 9, 0, "/host:CPU"),
            named("thread_name", 1, 13, "Stream #13(Compute)"),
            named("thread_name", 1, 14, "Stream #14(MemcpyH2D)"),
            named("thread_name", 1, 15, "Stream #15(Compute)"),
            named("thread_name", 1, 99, "XLA Ops"),
            event(1, 13, "gemm", 1000, 40),
            event(1, 13, "gemm", 1060, 20),
            event(1, 15, "fusion", 1030, 20),
            event(1, 15, "ncclDevKernel_AllReduce", 1045, 20),
            event(1, 13, "adam", 1090, 10),
            event(1, 14, "MemcpyH2D", 900, 500),
            event(1, 99, "gemm", 1000, 100),
            event(9, 1, "python", 0, 5000, hlo_op="gemm"),
        ]
    }
