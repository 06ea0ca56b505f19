"""Curves: all lines are visible, for losses of every kind."""

import io
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from jaxddp.tracking import curves, run_log
from jaxddp.tracking.curves import draw_curves
from tests.support.run_logs import write_run


def read_png(png: bytes) -> np.ndarray:
    """Return the pixels (height, width, 3), from 0 to 255."""
    from matplotlib.image import imread

    return (imread(io.BytesIO(png), format="png")[..., :3] * 255).round().astype(int)


def pixels_of(color: str, image: np.ndarray) -> np.ndarray:
    """Return a mask (height, width) of the pixels that have nearly the given colour."""
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return (abs(image - wanted) < 20).all(axis=-1)


def history_of(losses: list[float | None]) -> list[dict]:
    return [
        {"kind": kind, "step": step, "epoch": step}
        | ({"loss": loss} if kind == "step" else {"train_loss": loss, "test_loss": loss, "test_accuracy": 0.5})
        for step, loss in enumerate(losses, start=1)
        for kind in ("step", "epoch")
    ]


def test_curves_show_all_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "draw_curves", draw_curves)
    write_run(tmp_path / "run", 6)
    image = read_png((tmp_path / "run" / "curves.png").read_bytes())
    assert image.shape == (720, 1650, 3)
    for half in np.split(image, 2, axis=1):
        above_legend = half[:620]
        assert pixels_of(curves.TEST_COLOR, above_legend).sum() > 200
        assert pixels_of("#BFDBEB", above_legend).sum() > 50  # each step, faint
    assert (image == 255).all(axis=-1).mean() > 0.8


def test_the_loss_axis_is_logarithmic():
    losses = [10 ** (-step / 20) for step in range(41)]
    left = pixels_of(curves.TEST_COLOR, read_png(draw_curves(history_of(losses), "t")))[:600, :700]
    columns = np.flatnonzero(left.any(axis=0))
    rows = np.array([np.flatnonzero(left[:, column]).mean() for column in columns])
    slope, start = np.polyfit(columns, rows, 1)
    assert slope > 0.5  # rows count downwards
    assert abs(rows - (slope * columns + start)).max() < 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "losses",
    [[], [None], [None, 1.0, None], [0.0, 0.0], [1.0, 0.0], [-1.0], [2.0, 2.0], [1e-30, 1e30]],
    ids=str,
)
def test_curves_are_drawn_for_losses_of_any_kind(losses):
    image = read_png(draw_curves(history_of(losses), "t"))
    assert image.shape == (720, 1650, 3)
    assert pixels_of(curves.INK, image).any()


def test_curves_accept_any_title():
    png = draw_curves(history_of([1.0]), "mlp on $x_{.npz \\frac 数据 " + 30 * "very long ")
    assert read_png(png).shape == (720, 1650, 3)


def test_a_wrong_backend_in_the_environment_does_not_stop_the_drawing():
    """The curves are drawn after hours of training."""
    code = """
        from jaxddp.tracking.curves import draw_curves
        import os
        png = draw_curves([{"kind": "step", "step": 1, "loss": 2.3}], "one step")
        print(png[1:4], os.environ["MPLBACKEND"])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {**os.environ, "MPLBACKEND": "wrong"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("b'PNG' wrong\n", "")


def test_of_several_test_sets_the_first_is_drawn_with_its_name():
    from matplotlib.figure import Figure

    records = [{"kind": "epoch", "step": step, "test_clean_loss": step / 2, "test_noisy_loss": 9.0} for step in (1, 2)]
    with_plain = [record | {"test_loss": 7.0} for record in records]
    for history, label, values in (
        (records, "test_clean, each epoch", [0.5, 1.0]),
        (with_plain, "test, each epoch", [7.0, 7.0]),
    ):
        line = curves._draw_metric(Figure().subplots(), history, "loss")[-1]
        assert line.get_label() == label and list(line.get_ydata()) == values
