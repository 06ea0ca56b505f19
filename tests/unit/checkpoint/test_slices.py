"""Large arrays are written in slices, one per process, and an error of a write is known at once."""

import threading
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from orbax.checkpoint import StandardCheckpointer

from jaxddp.checkpoint.handlers import noted, wait_or_raise
from jaxddp.checkpoint.slices import SMALLEST, over_processes, sliced

LARGE = SMALLEST // 2  # elements


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((2, LARGE), np.float32, (1, LARGE)),
        ((3, 4, LARGE), ml_dtypes.bfloat16, (3, 2, LARGE)),
        ((LARGE, 3), np.uint8, (LARGE // 2, 3)),
        ((3, LARGE + 1), np.float32, None),  # no axis
        ((2, 2), np.float32, None),  # small
        ((), np.int32, None),
        ((2, LARGE), np.float64, None),  # jax would make float32 of it
    ],
)
def test_an_array_is_sliced_along_the_first_axis_that_can_be_divided(
    shape: tuple[int, ...], dtype: type, expected: tuple[int, ...] | None, tmp_path: Path
) -> None:
    array = (np.arange(np.prod(shape)) % 251).reshape(shape).astype(dtype)
    result = sliced(array, Mesh(np.array(jax.devices()[:2]), ("process",)))
    if expected is None:
        assert result is array
        return
    assert [shard.data.shape for shard in result.addressable_shards] == [expected] * 2
    assert [device.id for device in result.sharding.mesh.devices] == [0, 1]
    checkpointer = StandardCheckpointer()
    checkpointer.save(tmp_path / "saved", {"array": result})
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "saved", {"array": array})["array"]
    checkpointer.close()
    assert (type(restored), restored.dtype) == (np.ndarray, array.dtype)
    np.testing.assert_array_equal(restored.view(np.uint8), array.view(np.uint8))


def test_one_process_and_several_without_cpu_devices_slice_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_of(platform: str) -> None:
        raise RuntimeError(f"Unknown backend {platform}")

    tree = {"w": np.zeros((2, LARGE), np.float32)}
    assert over_processes(tree) is tree
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", none_of)
    assert over_processes(tree) is tree


def test_an_error_ends_the_wait_though_the_other_processes_do_not_come() -> None:
    errors: list[Exception] = []
    came = threading.Event()

    def write() -> None:
        with noted(errors):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write()
    with pytest.raises(OSError, match="disk full"):
        wait_or_raise(lambda: assert_came(came), errors)
    came.set()


def test_a_wait_ends_with_what_was_waited_for() -> None:
    came = threading.Event()
    threading.Timer(0.1, came.set).start()
    wait_or_raise(lambda: assert_came(came), [])
    assert came.is_set()

    def fail() -> None:
        raise TimeoutError("barrier")

    with pytest.raises(TimeoutError, match="barrier"):
        wait_or_raise(fail, [])


def assert_came(event: threading.Event) -> None:
    assert event.wait(60)
