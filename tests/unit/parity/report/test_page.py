"""What the reader of a check sees, for reports of every kind."""

import dataclasses
import html.parser
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxddp.parity.findings import Cause
from jaxddp.parity.report import page
from jaxddp.parity.report.markup import tag, with_code
from jaxddp.parity.report.pictures import MOST_MARKERS, ResidualAxis, draw_losses, draw_residuals
from tests.support.report_cases import EQUAL, HARSH, HOSTILE, HUGE, INCOMPLETE, NUMERIC, SAMPLES, SEMANTIC, UNEXPLAINED

VOID = {"meta", "wbr"}
every_sample = pytest.mark.parametrize("report", SAMPLES.values(), ids=SAMPLES)


class Document(html.parser.HTMLParser):
    """A page's elements as (name, attributes), its text, and whether all that opens is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.boxes: list[tuple[str, dict]] = []  # of each element, what it stands in
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
        return [attributes for found, attributes in self.elements if found == name]

    @property
    def text(self) -> str:
        """What a reader sees."""
        return re.sub(r"\s+", " ", "".join(text for where, text in self.texts if where not in ("style", "title")))


def svg_of(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture)


def of_class(picture: str, name: str) -> list[ElementTree.Element]:
    return [element for element in svg_of(picture).iter() if name in element.get("class", "").split()]


# The page


@every_sample
def test_page_stands_by_itself(report):
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


@every_sample
def test_page_can_be_read_without_seeing_it(report):
    document = Document(page.to_html(report))
    for svg in document.named("svg"):
        assert svg["role"] == "img"
        assert len(svg["aria-label"]) > 20
    for heading in document.named("th"):
        assert heading["scope"] in ("row", "col")
    for (name, _), (_, box) in zip(document.elements, document.boxes, strict=True):
        if name in ("table", "pre"):  # wider than a phone: it scrolls, and the keyboard can scroll it
            assert (box["class"], box["role"], box["tabindex"]) == ("scroll", "region", "0")
            assert box["aria-label"]


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (EQUAL, ["Equal", "In 10 stages of 10 steps on 2 replicas nothing differs", "where 1e-12 is allowed"]),
        (SEMANTIC, ["Different", "The update differs, first at step 1 in fc.weight: weight decay 0.0001", "Semantic:"]),
        (SEMANTIC, ["To mend it: give it explicitly", "decay_value", "6.6e-4", "next best: decay_mask", "2.1e-15"]),
        (UNEXPLAINED, ["no known fault explains it", "parts at blocks.0.gelu", "1 further difference below"]),
        (UNEXPLAINED, ["(8, 32, 14, 14)", "(8, 14, 14, 32)", "[3, 17, 0, 9]-0.17004-0.16992", "layer itself"]),
        (UNEXPLAINED, ["not seen", "differs too", "Replicas 0 and 1 alike."]),
        (NUMERIC, ["Different in rounding", "round differently", "Numeric:", "cannot tell", "204", "✗ further"]),
        (INCOMPLETE, ["Incomplete", "flax: step 3: hangs: no answer within 60 s", "2/10 steps", "not compared"]),
        (INCOMPLETE, ["What could not be done", "port: flax_restore: ValueError: the saved state has no 'nu'"]),
        (HUGE, ["8 replicas, 300 steps", "first at step 101", "188 further tensors", "1234.5"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_page_tells(report, told):
    text = Document(page.to_html(report)).text
    for words_told in told:
        assert words_told in text


def test_page_says_nothing_of_differences_where_there_are_none():
    text = Document(page.to_html(EQUAL)).text
    for word in ("Semantic", "Numeric", "✗", "▲", "Evidence", "What could not be done"):
        assert word.lower() not in text.replace(" ▲ is beyond what is allowed", "").lower()


def test_worst_tensor_comes_first_and_is_marked():
    document = Document(page.to_html(HUGE))
    table = document.text.partition("Worst residual of any step")[2]
    assert table.index(HUGE.differences[0].tensor) < table.index("transformer.h.0.")
    assert table.count("▲ 7e-4") == 2  # its worst, and at its stage
    assert len(document.named("details")) == 2


def test_hostile_names_are_shown_and_not_obeyed():
    text = page.to_html(HARSH)
    assert not re.search("<script|[\x00-\x08\x0b-\x1f\ud800-\udfff]", text)
    shown = HOSTILE.partition("\x1b")[0]
    document = Document(text)
    assert shown in document.text
    assert shown in next(text for where, text in document.texts if where == "title")


def test_attributes_are_escaped():
    assert Document(tag("p", title=HOSTILE[:20])).elements == [("p", {"title": HOSTILE[:20]})]


def test_every_style_stays_inside_the_report():
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


def test_pairs_of_faults_are_linked_to_where_they_were_met():
    cause = Cause(("check_vma + nesterov",), ("both",), ("neither",), 1e-15)
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


# Pictures


def test_picture_marks_what_is_beyond_and_where_it_begins():
    axis = ResidualAxis.over([1e-16, 1e-3])
    picture = draw_residuals([1e-16, math.nan, 1e-3, 1e-3], axis, "update", 1e-12, first=3)
    assert len(of_class(picture, "within")) == 1
    assert len(of_class(picture, "beyond")) == 2
    (ring,) = (element for element in of_class(picture, "first") if element.tag == "circle")
    assert float(ring.get("cy")) == pytest.approx(axis.y(1e-3), abs=0.01)
    assert "step 3: 1.0e-3" in "".join(svg_of(picture).itertext())
    assert of_class(picture, "line")[0].get("d").count("M") == 2  # a gap where the step was not compared


def test_picture_of_many_steps_is_a_line():
    residuals = [1e-16] * MOST_MARKERS + [1e-3]
    picture = draw_residuals(residuals, ResidualAxis.over(residuals), "update", 1e-12)
    assert not of_class(picture, "within")
    assert len(of_class(picture, "beyond")) == 1


def test_heights_of_residuals():
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
def test_losses_of_every_size_stay_in_the_picture(losses):
    picture = draw_losses(losses)
    for element in svg_of(picture).iter():
        for name in ("y", "y1", "y2"):
            assert -1 <= float(element.get(name, 0)) <= 210
        for place in re.findall(r"[ML][\d.-]+ ([\d.-]+)", element.get("d", "")):
            assert -1 <= float(place) <= 210


def test_small_losses_have_an_axis():
    texts = [element.text for element in svg_of(draw_losses([(1e-14, 5e-14), (1e-14, 4e-14)])).iter("text")]
    assert texts[:5] == ["1e-14", "2e-14", "3e-14", "4e-14", "5e-14"]
