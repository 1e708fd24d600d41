"""Vega is bundled once per account and release; what is kept is what would be bundled, or is not used."""

from __future__ import annotations

import base64
import gzip
from importlib.metadata import version
from pathlib import Path

import pytest
import vl_convert

from analysis.report.page import packed, packed_vega


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was bundled, in an account without a cache."""
    found: list[str] = []

    def bundle() -> str:
        found.append(f"bundle {len(found)}")
        return found[-1]

    monkeypatch.setattr(vl_convert, "javascript_bundle", bundle)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


def unpacked(content: str) -> str:
    return gzip.decompress(base64.b64decode(content)).decode()


def test_it_is_bundled_once(bundled: list[str], tmp_path: Path) -> None:
    assert [unpacked(packed_vega()) for _ in range(3)] == ["bundle 0"] * 3
    assert bundled == ["bundle 0"]
    assert packed_vega() == packed("bundle 0")
    (kept,) = (tmp_path / "cache" / "parallelbench").iterdir()
    assert kept.name == f"vega-{version('vl-convert-python')}"


@pytest.mark.parametrize("damage", ["cut off", "another script", "no text"])
def test_what_was_damaged_is_bundled_anew(bundled: list[str], tmp_path: Path, damage: str) -> None:
    packed_vega()
    (kept,) = (tmp_path / "cache" / "parallelbench").iterdir()
    whole = kept.read_bytes()
    known = whole.partition(b"\n")[0]
    contents = {
        "cut off": whole[:-1],
        "another script": known + b"\n" + packed("alert()").encode(),
        "no text": b"\xff\x00" + whole,
    }
    kept.write_bytes(contents[damage])
    assert unpacked(packed_vega()) == "bundle 1"
    assert unpacked(packed_vega()) == "bundle 1"
    assert len(bundled) == 2


def test_where_nothing_can_be_kept_it_is_bundled_each_time(bundled: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the folder's place")
    assert [unpacked(packed_vega()) for _ in range(2)] == ["bundle 0", "bundle 1"]
    assert bundled == ["bundle 0", "bundle 1"]


def test_an_account_without_a_home_keeps_nothing(
    bundled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert [unpacked(packed_vega()) for _ in range(2)] == ["bundle 0", "bundle 1"]
    assert bundled == ["bundle 0", "bundle 1"]
    assert list(tmp_path.iterdir()) == []
