"""A report on a terminal: its words have colours, and its text is the same without them."""

import io

import pytest
from rich.console import Console

from jaxddp.parity.report import terminal
from jaxddp.parity.report.terminal import STYLES, highlighted, show

REPORT = """\
port.py  ·  2 replicas x 2 steps  ·  float64

stage               worst   step  allowed  verdict              tensor
samples                 0      -        0  equal
update               2e-3      2    1e-12  different            0.weight
initialisation         22      -        7  differs              0.weight

different: The update differs, first at step 1 in 0.weight: residual 1.6e-3, allowed 1e-12
  cause  weight decay 0.0001 at port.py:30, the reference has 0.01 at port.py:27  [decay_value]
  fix    set weight_decay on both sides
  patch  equal with these lines
         - a
         + b
beyond this run, with gradients 1000 times as large: the update differs
problem: torch: model
incomplete: ended
equal: Nothing differs"""


def styled(text: str) -> dict[str, list[str]]:
    """Return the parts of a text by their styles."""
    marked = highlighted(text)
    parts: dict[str, list[str]] = {}
    for span in marked.spans:
        parts.setdefault(str(span.style).removeprefix("report."), []).append(marked.plain[span.start : span.end])
    return parts


def test_each_kind_of_word_has_its_style() -> None:
    parts = styled(REPORT)
    assert parts.keys() == STYLES.keys()
    assert parts["different"] == ["different", "differs", "different"] and parts["equal"] == ["equal", "equal"]
    assert parts["cause"] == ["weight decay 0.0001 at port.py:30, the reference has 0.01 at port.py:27"]
    assert parts["place"] == ["port.py:30", "port.py:27"]
    assert parts["added"] == ["+ b"] and parts["removed"] == ["- a"]
    assert parts["label"] == ["cause", "fix", "patch"]


def test_colours_add_nothing_to_the_text() -> None:
    assert highlighted(REPORT).plain == REPORT


@pytest.mark.parametrize(
    ("variables", "coloured"), [({"FORCE_COLOR": "1"}, True), ({"NO_COLOR": "1"}, False), ({}, False)]
)
def test_colours_are_for_terminals_and_go_with_no_color(
    variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    show(REPORT)
    printed = capsys.readouterr().out
    assert ("\x1b[1;31mdifferent\x1b[0m: The update" in printed) == coloured
    if not coloured:
        assert printed == f"{REPORT}\n"


def test_no_color_holds_on_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(terminal, "Console", lambda **given: Console(file=stream, force_terminal=True, **given))
    monkeypatch.setenv("NO_COLOR", "1")
    show(REPORT)
    assert "\x1b[1;31m" not in stream.getvalue()
