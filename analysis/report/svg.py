"""SVG images as parts of an HTML page: inert, with ids of their own, and with native tooltips."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LEGIBLE = 0.75
"""An image shrinks to this share of its width: its words of 12 pixels then have 9. A narrower window scrolls it."""
_CONTAINERS = ("svg", "g", "defs", "clipPath", "linearGradient", "radialGradient", "stop")
_SHAPES = ("path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "text", "tspan")
_WITHOUT_TOOLTIP = ("line mark", "area mark", "trail mark", "text mark", "title")
"""Marks of many values, of which the label says the first one's only, and words, which say it themselves."""
_DEFAULTS = {"opacity": "1", "fill-opacity": "1", "stroke-opacity": "1", "stroke-width": "1", "text-anchor": "start"}
_LEFT_OUT = ("class", "font-family", "href", "role", "style")
"""Attributes; the page has a font."""
_REFERENCE = re.compile(r"url\(#([^)]*)\)")
_NO_XML = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that a name may have, but no XML."""
_DIGITS = re.compile(r"(\.\d\d)\d+")
"""A hundredth of a pixel is enough; Vega writes up to 16 digits."""


def inlined(image: str, name: str, *, labelled_by: str) -> str:
    """The image as an element of a page, where its ids begin with `name`, and the element `labelled_by` names it.

    The label of each mark (`aria-label`) becomes its tooltip. Kept are shapes and words: no script, link, picture,
    style sheet or event handler, nothing that loads.
    """
    root = ET.fromstring(_NO_XML.sub("", image))
    width = float(root.get("width", "0"))
    _strip(root, name)
    root.attrib |= {"role": "img", "aria-labelledby": labelled_by, "style": f"min-width: {LEGIBLE * width:.0f}px"}
    return ET.tostring(root, encoding="unicode")


def _strip(node: ET.Element, name: str) -> None:
    """In place: without namespaces, as HTML has none, and without what is not drawn."""
    node.tag = _local(node.tag)
    label = "" if node.get("aria-roledescription") in _WITHOUT_TOOLTIP else node.get("aria-label", "")
    node.attrib = dict(_drawn(node.attrib, name))
    for child in list(node):
        if _local(child.tag) in (*_CONTAINERS, *_SHAPES) and child.get("display") != "none":
            _strip(child, name)
        else:
            node.remove(child)
    if label and node.tag in _SHAPES:
        title = ET.Element("title")
        title.text = label.replace("; ", "\n")
        node.insert(0, title)


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _drawn(attributes: dict[str, str], name: str) -> Iterator[tuple[str, str]]:
    """Attributes that say how an element looks; those of other namespaces, as links have, and handlers don't."""
    for key, value in attributes.items():
        if key == "id":
            yield key, f"{name}-{value}"
        elif not (key.startswith(("{", "on", "aria-")) or key in _LEFT_OUT or _DEFAULTS.get(key) == value):
            own = _REFERENCE.sub(rf"url(#{name}-\1)", value)
            if "url(" not in _REFERENCE.sub("", own):
                yield key, _DIGITS.sub(r"\1", own)
