"""A start that is refused for want of a library leaves no folder behind, in both trainers."""

import dataclasses
import sys
from pathlib import Path

import pytest

from jaxddp.errors import InputError
from tests.end_to_end.test_failing_disk import TRAINERS


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_leaves_no_folder(
    trainer: str, service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, service, None)
    main, config = TRAINERS[trainer]
    with pytest.raises(InputError, match=f"^--track {service}: {service} is not installed"):
        main(dataclasses.replace(config, output=str(tmp_path / "runs" / "a"), track=(service,)))
    assert not list(tmp_path.iterdir())
