"""Images inside a page: inert whatever their words are, with ids of their own, and with tooltips."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from html import escape
from html.parser import HTMLParser

import pytest

from analysis.figures import svg
from analysis.report.pictures import Pictures
from analysis.report.svg import inlined

HOSTILE = "</svg><script>alert(1)</script><img src=x onerror=alert(1)> \" ' & ]]>"


class Elements(HTMLParser):
    """What a browser makes of the markup: elements with their attributes, and words."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def image(inside: str) -> str:
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="400" height="300" '
        f'viewBox="0 0 400 300">{inside}</svg>'
    )


def on_page(inside: str, name: str = "runtime") -> Elements:
    return Elements(inlined(image(inside), name, labelled_by="title"))


def test_hostile_words_are_words() -> None:
    hostile = escape(HOSTILE)
    page = on_page(f'<g><text>{hostile}</text><path aria-label="{hostile}" aria-roledescription="bar" d="M0,0"/></g>')
    assert [tag for tag, _ in page.found] == ["svg", "g", "text", "path", "title"]
    assert page.words == [HOSTILE, HOSTILE]


def test_nothing_in_it_runs_or_loads() -> None:
    page = on_page(
        '<script>alert(1)</script><style>@import "http://evil"</style><image href="http://evil/i.png"/>'
        '<foreignObject><p xmlns="http://www.w3.org/1999/xhtml">words</p></foreignObject>'
        '<a xlink:href="javascript:alert(1)"><text>a link</text></a><use href="#a"/>'
        '<rect fill="url(http://evil/f.svg#a)" stroke="url(#a) url(//evil)" style="fill: url(http://evil)" '
        'onclick="alert(1)" xlink:href="http://evil" width="5"/>'
    )
    assert page.found[1:] == [("rect", {"width": "5"})]


def test_ids_of_two_images_are_apart_and_their_references_follow() -> None:
    inside = '<clipPath id="clip0"><path d="M0,0"/></clipPath><g clip-path="url(#clip0)" fill="url(#clip0)"><path/></g>'
    for name in ("runtime", "memory"):
        found = on_page(inside, name).found
        assert found[1] == ("clippath", {"id": f"{name}-clip0"})
        assert found[3] == ("g", {"clip-path": f"url(#{name}-clip0)", "fill": f"url(#{name}-clip0)"})


def test_a_mark_tells_its_values_and_a_line_of_many_does_not_tell_those_of_its_first() -> None:
    page = on_page(
        '<path aria-label="configuration: ddp × 2; value: 1.5" aria-roledescription="point" d="M0,0"/>'
        '<path aria-label="value: 1" aria-roledescription="line mark" d="M0,0"/>'
        '<g aria-label="X-axis" aria-roledescription="axis"><path d="M0,0"/></g>'
    )
    assert [tag for tag, _ in page.found] == ["svg", "path", "title", "path", "g", "path"]
    assert page.words == ["configuration: ddp × 2\nvalue: 1.5"]


def test_characters_that_are_no_xml_are_left_out() -> None:
    assert on_page("<text>a\x1b[31mb\x00c\ud800d</text>").words == ["a[31mbcd"]


def test_places_are_kept_to_a_hundredth_of_a_pixel_and_words_to_the_letter() -> None:
    root = ET.fromstring(
        inlined(image('<text transform="translate(0.123456,7.999)">0.123456</text>'), "a", labelled_by="title")
    )
    assert root[0].get("transform") == "translate(0.12,7.99)"
    assert root[0].text == "0.123456"


def test_a_process_of_its_own_draws_the_same_image(capfd: pytest.CaptureFixture[str]) -> None:
    spec = {"data": {"values": [{"x": 1.5, "name": "ddp × 2"}]}, "mark": "bar", "encoding": {"x": {"field": "x"}}}
    with Pictures() as pictures:
        images = [pictures.draw(spec), pictures.draw(spec)]
        assert [image.result() for image in images] == [svg(spec)] * 2
        with pytest.raises(RuntimeError, match="can't be drawn"):
            pictures.draw({"mark": "no mark"}).result()
    assert "conversion failed" in capfd.readouterr().err
