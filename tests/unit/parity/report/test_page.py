"""HTML page and plots, for reports of every kind."""

import dataclasses
import html.parser
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.findings import Cause
from jaxddp.parity.report import page
from jaxddp.parity.report.markup import tag, with_code
from jaxddp.parity.report.pictures import MOST_MARKERS, ResidualAxis, draw_losses, draw_residuals
from tests.support.report_cases import (
    EQUAL,
    HARSH,
    HOSTILE,
    HUGE,
    INCOMPLETE,
    LOCATED,
    MEASURED,
    NUMERIC,
    SAMPLES,
    SEMANTIC,
    UNEXPLAINED,
)

VOID = {"meta", "wbr"}
every_sample = pytest.mark.parametrize("report", SAMPLES.values(), ids=SAMPLES)


class Document(html.parser.HTMLParser):
    """Elements of a page as (name, attributes), and its text; every opened element must be closed."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.boxes: list[tuple[str, dict]] = []  # parent of each element
        self.texts: list[tuple[str, str]] = []
        self.open: list[tuple[str, dict]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, name, attributes):
        self.boxes.append(self.open[-1] if self.open else ("", {}))
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(self.elements[-1])

    def handle_endtag(self, name):
        assert self.open.pop()[0] == name

    def handle_data(self, text):
        self.texts.append((self.open[-1][0] if self.open else "", text))

    def named(self, name: str) -> list[dict]:
        return [attributes for element, attributes in self.elements if element == name]

    @property
    def text(self) -> str:
        """Text that a reader sees."""
        return re.sub(r"\s+", " ", "".join(text for where, text in self.texts if where not in ("style", "title")))


def svg_of(plot: str) -> ElementTree.Element:
    return ElementTree.fromstring(plot)


def of_class(plot: str, name: str) -> list[ElementTree.Element]:
    return [element for element in svg_of(plot).iter() if name in element.get("class", "").split()]


# The page


@every_sample
def test_page_is_self_contained_and_runs_no_script(report):
    text = page.to_html(report)
    text.encode("utf-8")
    document = Document(text)
    names = {name for name, _ in document.elements}
    assert not names & {"script", "link", "img", "iframe", "object", "base"}
    assert "url(" not in text
    assert "@import" not in text
    for _, attributes in document.elements:
        assert not {name for name in attributes if name.startswith("on") or name == "src"}
        assert attributes.get("href", "https://github.com/").startswith("https://github.com/")
    assert document.named("html") == [{"lang": "en"}]
    assert len(document.named("title")) == len(document.named("h1")) == len(document.named("main")) == 1


def test_a_page_may_share_its_stylesheet():
    alone, shared = page.to_html(EQUAL), page.to_html(EQUAL, "style.css")
    link = '<link rel="stylesheet" href="style.css">'
    assert "<style>" not in shared and re.sub("<style>.*</style>", link, alone, flags=re.DOTALL) == shared


@every_sample
def test_page_works_with_a_screen_reader_and_a_keyboard(report):
    document = Document(page.to_html(report))
    for svg in document.named("svg"):
        assert svg["role"] == "img"
        assert len(svg["aria-label"]) > 20
    for heading in document.named("th"):
        assert heading["scope"] in ("row", "col")
    for (name, _), (_, box) in zip(document.elements, document.boxes, strict=True):
        if name in ("table", "pre"):  # wider than a phone, so it scrolls, also from the keyboard
            assert (box["class"], box["role"], box["tabindex"]) == ("scroll", "region", "0")
            assert box["aria-label"]


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (EQUAL, ["Equal", "Nothing differs in 11 stages of 10 steps on 2 replicas", "and 1e-12 is allowed"]),
        (SEMANTIC, ["Different", "The update differs, first at step 1 in fc.weight: weight decay 0.0001", "Semantic:"]),
        (SEMANTIC, ["Fix: set it explicitly", "decay_value", "6.6e-4", "next best: label smoothing 0.1", "2.1e-15"]),
        (MEASURED, ["Measured: the replicas' start differs by 0.1 in fc.weight."]),
        (UNEXPLAINED, ["no known fault explains it", "diverges at blocks.0.gelu", "1 further difference below"]),
        (
            LOCATED,
            ["Operations that differ", "mul 0.5, tanh, mul", "at [3, 17]-0.16992-0.17004", "In 3 places."],
        ),
        (UNEXPLAINED, ["(8, 32, 14, 14)", "(8, 14, 14, 32)", "[3, 17, 0, 9]-0.17004-0.16992", "layer itself"]),
        (UNEXPLAINED, ["not seen", "differs too", "allowed 1e-12; the replicas differ from each other"]),
        (NUMERIC, ["Different in rounding", "round differently", "Numeric:", "cannot tell", "204"]),
        (NUMERIC, ["✗ rounds differently"]),
        (INCOMPLETE, ["Incomplete", "jax: step 3: hangs: no answer within 60 s", "2/10 steps", "not compared"]),
        (INCOMPLETE, ["Problems", "port: jax_restore: ValueError: the saved state has no 'nu'"]),
        (HUGE, ["8 replicas, 300 steps", "first at step 101", "188 further tensors", "1234.5"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_page_contains_verdict_causes_and_problems(report, expected):
    text = Document(page.to_html(report)).text
    for line in expected:
        assert line in text


def test_what_is_not_replayed_was_not_planted():
    assert "planted in the reference" not in Document(page.to_html(MEASURED)).text


def test_page_of_equal_sides_mentions_no_difference():
    text = Document(page.to_html(EQUAL)).text
    for word in ("Semantic", "Numeric", "✗", "▲", "Evidence", "Problems"):
        assert word.lower() not in text.replace(" ▲ exceeds the allowed residual", "").lower()


def test_worst_tensor_comes_first_and_is_marked():
    document = Document(page.to_html(HUGE))
    table = document.text.partition("Worst residual over all steps")[2]
    assert table.index(HUGE.differences[0].tensor) < table.index("transformer.h.0.")
    assert table.count("▲ 7e-4") == 2  # as the worst of all stages, and in the column of its stage
    assert len(document.named("details")) == 2


def test_hostile_names_are_escaped():
    text = page.to_html(HARSH)
    assert not re.search("<script|[\x00-\x08\x0b-\x1f\ud800-\udfff]", text)
    shown = HOSTILE.partition("\x1b")[0]
    document = Document(text)
    assert shown in document.text
    assert shown in next(text for where, text in document.texts if where == "title")


def test_attributes_are_escaped():
    assert Document(tag("p", title=HOSTILE[:20])).elements == [("p", {"title": HOSTILE[:20]})]


def test_styles_apply_inside_the_report_only():
    text = page.notebook(SEMANTIC)
    style = re.sub(r"/\*.*?\*/", "", text.partition("<style>")[2].partition("</style>")[0], flags=re.S)
    selectors = [selector.strip() for selector in re.findall(r"([^{}]+)\{", style)]
    assert len(selectors) > 50
    for selector in selectors:
        while "(" in selector:
            selector = re.sub(r"\([^()]*\)", "", selector)
        assert all(part.strip().startswith((".jaxddp-report", "@media", "@container")) for part in selector.split(","))
    document = Document(text)
    assert document.elements[0] == ("div", {"class": "jaxddp-report", "lang": "en"})
    assert not document.named("html") + document.named("body")


def test_a_pair_of_faults_is_linked_to_public_reports():
    cause = Cause((Deviation("check_vma + nesterov", Statement("own_gradients"), fix="neither"),), 1e-15)
    report = dataclasses.replace(SEMANTIC, differences=(dataclasses.replace(SEMANTIC.differences[0], cause=cause),))
    links = Document(page.to_html(report)).named("a")
    assert [link["href"] for link in links] == ["https://github.com/jax-ml/jax/issues/3970"]


def test_code_is_set_as_code():
    line = "use jax.lax.pmean where (a, b) is padding=((1, 1), (1, 1)) or add_decayed_weights(..., mask=...), 0.01."
    assert re.findall("<code>(.*?)</code>", with_code(line)) == [
        "jax.lax.pmean",
        "padding=((1, 1), (1, 1))",
        "add_decayed_weights(..., mask=...)",
    ]
    assert re.sub("<.*?>", "", with_code(line)) == line


# Plots


def test_plot_marks_residuals_above_the_allowed_one_and_the_first_difference():
    axis = ResidualAxis.over([1e-16, 1e-3])
    plot = draw_residuals([1e-16, math.nan, 1e-3, 1e-3], axis, "update", 1e-12, first=3)
    assert len(of_class(plot, "within")) == 1
    assert len(of_class(plot, "beyond")) == 2
    (ring,) = (element for element in of_class(plot, "first") if element.tag == "circle")
    assert float(ring.get("cy")) == pytest.approx(axis.y(1e-3), abs=0.01)
    assert "step 3: 1.0e-3" in "".join(svg_of(plot).itertext())
    assert of_class(plot, "line")[0].get("d").count("M") == 2  # a gap where the step was not compared


def test_plot_of_many_steps_is_a_line():
    residuals = [1e-16] * MOST_MARKERS + [1e-3]
    plot = draw_residuals(residuals, ResidualAxis.over(residuals), "update", 1e-12)
    assert not of_class(plot, "within")
    assert len(of_class(plot, "beyond")) == 1


def test_axis_is_logarithmic_with_lines_for_zero_and_infinity():
    axis = ResidualAxis.over([0.0, 1e-20, 1e3, math.inf, math.nan])
    heights = [axis.y(value) for value in (math.inf, 1e3, 1.0, 1e-12, 1e-20, 0.0)]
    assert heights == sorted(heights)
    assert min(np.diff(heights)) > 3
    assert axis.y(1e-6) - axis.y(1e-3) == pytest.approx(axis.y(1e-9) - axis.y(1e-6))


@pytest.mark.parametrize(
    "losses",
    [
        [(math.nan, math.inf)],
        [(0.0, 0.0)],
        [(2.0, 2.0)] * 3,
        [(-1.0, 1e9)],
        [(1e-30, 1e30)] * 2,
        [(5e-324, 1e-300)],
        [(5e-324, 5e-324)],
        [(-1.7e308, 1.7e308), (0.0, 1.0)],
        [(1e-14, 5e-14)],
    ],
    ids=str,
)
def test_losses_of_every_size_stay_in_the_plot(losses):
    plot = draw_losses(losses)
    for element in svg_of(plot).iter():
        for name in ("y", "y1", "y2"):
            assert -1 <= float(element.get(name, 0)) <= 210
        for place in re.findall(r"[ML][\d.-]+ ([\d.-]+)", element.get("d", "")):
            assert -1 <= float(place) <= 210


def test_axis_of_small_losses_has_round_values():
    texts = [element.text for element in svg_of(draw_losses([(1e-14, 5e-14), (1e-14, 4e-14)])).iter("text")]
    assert texts[:5] == ["1e-14", "2e-14", "3e-14", "4e-14", "5e-14"]
