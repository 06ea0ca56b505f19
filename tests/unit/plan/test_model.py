"""Roofline, links and largest batch, against numbers computed by hand."""

import dataclasses

import pytest

from jaxddp.config.hardware import (
    GPUS,
    KERNEL_SECONDS,
    MATRIX_SHARE,
    MEMORY_SHARE,
    NCCL_BASE_SECONDS,
    NETWORK_SHARE,
    NETWORK_STEP_SECONDS,
    NVLINK_SHARE,
    NVLINK_STEP_SECONDS,
)
from jaxddp.plan import links, roofline
from jaxddp.plan.batch import Largest, largest_batch
from jaxddp.plan.costs import Cost
from jaxddp.plan.links import Links, links_of

H100 = GPUS["h100"]


def test_a_kernel_takes_the_longer_of_arithmetic_and_traffic() -> None:
    product = Cost(matrix=989.4e12 * MATRIX_SHARE, dtype="bf16", bytes=3.352e12 * MEMORY_SHARE / 2, kernels=1)
    assert roofline.seconds(product, H100) == pytest.approx(1 + KERNEL_SECONDS)
    traffic = dataclasses.replace(product, bytes=3.352e12 * MEMORY_SHARE * 2)
    assert roofline.seconds(traffic, H100) == pytest.approx(2 + KERNEL_SECONDS)


def test_float32_products_have_a_lower_peak() -> None:
    product = Cost(matrix=1e15, dtype="bf16")
    times = [roofline.seconds(dataclasses.replace(product, dtype=dtype), H100) for dtype in ("bf16", "tf32", "f32")]
    assert times[1] / times[0] == pytest.approx(2) and times[2] / times[0] == pytest.approx(989.4 / 66.9)


def test_an_all_reduce_in_a_node_is_a_ring_over_nvlink() -> None:
    size = 450e9 * NVLINK_SHARE  # one second at full bandwidth
    latency = NCCL_BASE_SECONDS + 2 * 7 * NVLINK_STEP_SECONDS
    assert Links(H100, 8).seconds("all-reduce", size) == pytest.approx(2 * 7 / 8 + latency)
    assert Links(H100, 8).seconds("all-gather", size) == pytest.approx(7 / 8, rel=1e-3)
    assert Links(H100, 1).seconds("all-reduce", size) == 0


def test_between_nodes_each_gpu_sends_its_share_over_infiniband() -> None:
    size = 8 * 50e9 * NETWORK_SHARE
    inside = Links(H100, 8).seconds("all-reduce", size)
    between = 2 * 3 / 4 + 2 * 2 * NETWORK_STEP_SECONDS
    assert Links(H100, 8, 4).seconds("all-reduce", size) == pytest.approx(inside + between)


def test_a_planted_fault_in_the_ring_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(links.HALVES, "all-reduce", 1)  # reduced, and never gathered
    with pytest.raises(AssertionError):
        test_an_all_reduce_in_a_node_is_a_ring_over_nvlink()


def test_gpus_fill_nodes() -> None:
    made = [links_of(H100, gpus, 8) for gpus in (1, 2, 8, 16, 1024)]
    assert [(one.per_node, one.nodes) for one in made] == [(1, 1), (2, 1), (8, 1), (8, 2), (8, 128)]
    assert links_of(H100, 16, 4).nodes == 4


def test_the_largest_batch_is_extrapolated_and_confirmed() -> None:
    asked: list[int] = []

    def memory(size: int) -> int:
        asked.append(size)
        return 1000 + 10 * size

    assert largest_batch({8: 1080, 16: 1160}, 2000, 4, memory) == Largest(100, 2000, True)
    assert asked == [100]


def test_an_estimate_that_does_not_fit_is_replaced() -> None:
    def memory(size: int) -> int:
        return 1000 + 10 * size + (300 if size > 50 else 0)  # another algorithm with more scratch memory

    found = largest_batch({8: 1080, 16: 1160}, 2000, 1, memory)
    assert found.confirmed and memory(found.size) <= 2000 and found.size > 60


def test_a_far_estimate_is_not_compiled() -> None:
    found = largest_batch({8: 1080, 16: 1160}, 1e9, 8, lambda size: pytest.fail("compiled"))
    assert not found.confirmed and found.size == 99_999_896
    assert largest_batch({8: 1080, 16: 1160}, 2000, 1, lambda size: 0, confirm=False) == Largest(100, 2000, False)


def test_nothing_fits_where_the_state_is_too_large() -> None:
    assert largest_batch({8: 1080, 16: 1160}, 900, 8, lambda size: 1000).size == 0


def test_every_gpu_names_its_source_and_rises_with_precision() -> None:
    for gpu in GPUS.values():
        assert "datasheet" in gpu.source
        assert gpu.peak["bf16"] > gpu.peak["tf32"] > gpu.peak["f32"]
        assert gpu.flops_per_second("s8") == gpu.peak["f32"]
        assert str(gpu.memory) in gpu.target_config
