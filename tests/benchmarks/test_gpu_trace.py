"""Traces of GPUs: busy share, longest kernels, and gaps between kernels."""

import json
from typing import Any

import pytest

from benchmarks.gpu import trace


def event(pid: int, tid: int, name: str, begin: float, duration: float, **args: str) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin, "dur": duration, "args": args}


def named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


# 100 us on one GPU as jax's profiler writes it, with a message, two gaps, a copy, and the host's side.
TRACE = {
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


def test_the_trace_gives_busy_share_kernels_and_gaps() -> None:
    assert trace.analysis(TRACE) == {
        "device": "/device:GPU:0",
        "busy_share": {"/device:GPU:0": 0.8},
        "communication_share": 0.2,
        "window_ms": 0.1,
        "kernels": [
            {"name": "gemm", "calls": 2, "ms": 0.06, "share": 0.6667},
            {"name": "fusion", "calls": 1, "ms": 0.02, "share": 0.2222},
            {"name": "adam", "calls": 1, "ms": 0.01, "share": 0.1111},
        ],
        "gaps": [
            {"ms": 0.01, "at_ms": 0.05, "before": "fusion", "after": "gemm"},
            {"ms": 0.01, "at_ms": 0.08, "before": "gemm", "after": "adam"},
        ],
    }


def test_streams_without_a_kind_count_as_computing() -> None:
    plain = json.loads(json.dumps(TRACE).replace("(Compute)", "").replace("(MemcpyH2D)", ""))
    assert trace.analysis(plain)["window_ms"] == 0.5


def test_a_trace_without_gpus_is_that_of_what_xla_ran_and_an_empty_one_is_refused() -> None:
    host = {"traceEvents": [named("process_name", 9, 0, "/host:CPU"), event(9, 1, "dot", 0, 5, hlo_op="dot.1")]}
    assert trace.analysis(host)["busy_share"] == {"/host:CPU": 1.0}
    with pytest.raises(ValueError, match="no kernels"):
        trace.analysis({"traceEvents": [event(9, 1, "python", 0, 5)]})
