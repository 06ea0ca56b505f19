"""The picture of the losses of several runs."""

import json
from pathlib import Path

import pytest

from examples import curves


def run(folder: Path, *losses: float) -> str:
    """Write the log of a run."""
    folder.mkdir()
    records = [
        {"kind": "epoch", "epoch": epoch, "train_loss": loss, "test_loss": 2 * loss}
        for epoch, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [{"kind": "steps"}, *records])))
    return f"{folder}"


def test_losses_are_drawn_with_their_differences(tmp_path: Path) -> None:
    first, second = run(tmp_path / "a", 3.0, 1.0), run(tmp_path / "b", 3.0, 1.5, 1.25)
    assert curves.losses(second, "test") == {1: 6.0, 2: 3.0, 3: 2.5}
    assert curves.apart(curves.losses(first, "train"), curves.losses(second, "train")) == {1: 0.0, 2: 0.5}
    curves.main(f"{tmp_path / 'curves.png'}", first, second)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.png").write_bytes(b"mine")
    with pytest.raises(Exception, match=r"mine\.png"):
        curves.main(f"{tmp_path / 'mine.png'}", run(tmp_path / "a", 3.0))
    assert (tmp_path / "mine.png").read_bytes() == b"mine"
