"""Traces of GPUs: busy share, longest kernels, and gaps between kernels."""

import json

import pytest

from benchmarks.gpu import trace
from tests.support.gpu_trace import event, gpu_trace, named


def test_the_trace_gives_busy_share_kernels_and_gaps() -> None:
    found = trace.analysis(gpu_trace())
    assert found["device"] == "/device:GPU:0"
    assert found["busy_share"] == {"/device:GPU:0": 0.8} and found["window_ms"] == 0.1
    assert found["communication_share"] == 0.2
    assert found["kernels"][0] == {"name": "gemm", "calls": 2, "ms": 0.06, "share": 0.6667}
    assert [kernel["name"] for kernel in found["kernels"]] == ["gemm", "fusion", "adam"]
    assert found["gaps"] == [
        {"ms": 0.01, "at_ms": 0.05, "before": "fusion", "after": "gemm"},
        {"ms": 0.01, "at_ms": 0.08, "before": "gemm", "after": "adam"},
    ]


def test_streams_without_a_kind_count_as_computing() -> None:
    plain = json.loads(json.dumps(gpu_trace()).replace("(Compute)", "").replace("(MemcpyH2D)", ""))
    assert trace.analysis(plain)["window_ms"] == 0.5


def test_a_trace_without_gpus_is_that_of_what_xla_ran_and_an_empty_one_is_refused() -> None:
    host = {"traceEvents": [named("process_name", 9, 0, "/host:CPU"), event(9, 1, "dot", 0, 5, hlo_op="dot.1")]}
    assert trace.analysis(host)["busy_share"] == {"/host:CPU": 1.0}
    with pytest.raises(ValueError, match="no kernels"):
        trace.analysis({"traceEvents": [event(9, 1, "python", 0, 5)]})
