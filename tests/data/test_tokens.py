"""Tokens: a chain whose entropy is known, text of the library and of one's own, the same windows for everybody."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path

import numpy as np
import pytest
import yaml

import conf
from parallelbench.config.dataset_check import checked
from parallelbench.data.content import content_sha256
from parallelbench.data.prepare import prepare
from parallelbench.data.text import Text, joined, library_files
from parallelbench.data.tokens import Tokens, chain
from parallelbench.errors import ConfigError

NOWHERE = Path("nowhere")


def tokens(**changes: object) -> Tokens:
    return Tokens(**{**_options("tokens"), **changes})


def text(**changes: object) -> Text:
    return Text(**{**_options("text"), **changes})


def _options(name: str) -> dict[str, object]:
    options: dict[str, object] = yaml.safe_load((Path(conf.__file__).parent / "data" / f"{name}.yaml").read_text())
    return {key: value for key, value in options.items() if key != "_target_"}


@pytest.mark.parametrize("branches", [1, 2, 4, 8])
def test_the_chain_has_the_entropy_that_its_probabilities_say(branches: int) -> None:
    weights = [2.0 ** -min(j + 1, branches - 1) for j in range(branches)] if branches > 1 else [1.0]
    assert sum(weights) == 1.0
    nats = (2.0 - 2.0 ** (2 - branches)) * math.log(2.0)  # as the class says
    assert nats == pytest.approx(-sum(w * math.log(w) for w in weights), abs=1e-12)
    found = chain(4000, 30, vocabulary=23, branches=branches, source=(5, 1))
    pairs = np.zeros((23, 23))
    np.add.at(pairs, (found[:, :-1].ravel(), found[:, 1:].ravel()), 1)
    shares = np.sort(pairs / pairs.sum(1, keepdims=True), axis=1)[:, ::-1]
    assert (shares[:, branches:] == 0).all(), "no token has more successors"
    np.testing.assert_allclose(shares[:, :branches], [weights] * 23, atol=0.03)
    np.testing.assert_allclose(np.bincount(found.ravel(), minlength=23) / found.size, 1 / 23, rtol=0.1)


def test_every_machine_makes_the_same_tokens() -> None:
    arrays = tokens(train_samples=8, test_samples=4).load(NOWHERE)
    digest = hashlib.sha256(np.ascontiguousarray(arrays.train_images).astype("<i4")).hexdigest()
    known = "2d5a20383ca56473da2924f02d4976331ec39cfeaaff8f741419e3cea0146bc5"
    assert digest == known, "another stream needs another GENERATOR"
    assert (arrays.train_images[:, 1:] == arrays.train_labels[:, :-1]).all()
    assert not (arrays.train_images[:4] == arrays.test_images).all(1).any(), "the test set has sequences of its own"
    assert arrays.train_images.shape == (8, 64)
    other = tokens(train_samples=8, test_samples=4, data_seed=1)
    assert (other.load(NOWHERE).train_images != arrays.train_images).any()
    assert other.fingerprint(NOWHERE) != tokens(train_samples=8, test_samples=4).fingerprint(NOWHERE)


@pytest.mark.cases("data0")
@pytest.mark.parametrize("data", [tokens(), text()])
def test_what_is_read_is_what_is_declared(data: Tokens | Text) -> None:
    arrays = checked(data, data.load(NOWHERE))
    assert len(arrays.train_images) == data.train_samples == 4096
    assert len(arrays.test_images) == data.test_samples == 256
    assert data.shape == data.label_shape == (64,)
    assert data.missing_files(NOWHERE) == []


@pytest.mark.exhaustive
def test_the_librarys_text_is_cut_into_windows_side_by_side() -> None:
    data, content = text(sequence=50, train_samples=30, test_samples=7), joined(library_files())
    arrays = data.load(NOWHERE)
    assert b"".join(map(bytes, [*arrays.train_images, *arrays.test_images])) == content[: 37 * 50]
    labels = [*arrays.train_labels.ravel(), *arrays.test_labels.ravel()]
    assert bytes(labels) == content[1 : 37 * 50 + 1], "the label of a window's last byte is the next window's first"
    assert "os.py" in {path.name for path in library_files()}
    root = Path(os.__file__).parent
    assert not {"site-packages", "test", "tests"} & {path.relative_to(root).parts[0] for path in library_files()}
    moved = text(sequence=50, train_samples=31, test_samples=6)
    assert content_sha256(data, NOWHERE, arrays) != content_sha256(moved, NOWHERE, moved.load(NOWHERE))


def prepared(source: Path, root: Path) -> tuple[str, list[str]]:
    """The name that `prepare` prints, and all its lines."""
    lines: list[str] = []
    prepare(text(path=str(source)), root, progress=lines.append)
    return lines[-1].rpartition("data.path=")[2], lines


def test_text_of_ones_own_is_named_by_content_and_size_and_mapped(tmp_path: Path) -> None:
    source = tmp_path / "books"
    (source / "deep").mkdir(parents=True)
    (source / "b.txt").write_bytes(b"second " * 20)
    (source / "a.txt").write_bytes(bytes(range(256)))
    (source / "deep" / "c.txt").write_bytes("größer".encode())
    (source / ".hidden").write_bytes(b"never")
    whole = bytes(range(256)) + b"second " * 20 + "größer".encode()
    name, lines = prepared(source, tmp_path / "data")
    digest = hashlib.sha256(whole).hexdigest()
    assert name == f"{digest[:12]}-{len(whole)}"
    assert lines[-1] == f"text: train on them with data=text data.path={name}"
    assert prepared(source, tmp_path / "data")[0] == name, "twice is as good as once"
    data = text(path=name, sequence=40, train_samples=8, test_samples=2)
    arrays = checked(data, data.load(tmp_path / "data"))
    assert bytes(arrays.train_images.ravel()) == whole[:320]
    assert bytes(arrays.test_labels.ravel().astype(np.uint8)) == whole[321:401]
    assert isinstance(arrays.train_images, np.memmap)
    assert data.missing_files(tmp_path / "data") == []
    assert data.missing_files(tmp_path / "other") == [tmp_path / "other" / f"text-{name}" / "tokens.bin"]
    assert content_sha256(data, tmp_path / "data", arrays) == digest
    prepare(text(path=name, train_samples=1, test_samples=1), tmp_path / "data", progress=lines.append)
    assert lines[-1] == f"text: ready in {tmp_path / 'data' / f'text-{name}'}"


def test_text_that_changed_on_disk_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(b"0123456789" * 20)
    name, _ = prepared(tmp_path / "mine.txt", tmp_path)
    data = text(path=name, sequence=10, train_samples=8, test_samples=2)
    stored = tmp_path / f"text-{name}" / "tokens.bin"
    stored.write_bytes(b"9876543210" * 20)
    with pytest.raises(ConfigError, match="or its file there holds something else: delete"):
        content_sha256(data, tmp_path, data.load(tmp_path))
    stored.write_bytes(b"short")
    with pytest.raises(ConfigError, match="or its file there holds something else: delete"):
        data.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": f"{'0' * 12}-65"}, "has 65 bytes, which are 1 window of data.sequence=64"),
        ({"path": f"{'0' * 12}-64"}, "which are 0 windows .* choose fewer samples, a smaller data.sequence"),
        ({"sequence": 1_000_000}, "windows? of data.sequence=1000000 .* or more text with data.path"),
        ({"path": "books"}, "data.path=books is no name of anything prepared: run `parallelbench prepare data=text"),
        ({"path": f"{'0' * 12}-999999999"}, "is not prepared in nowhere, .* run `parallelbench prepare data=text"),
    ],
)
def test_too_little_text_or_none_is_refused_with_the_fix(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        text(**changes).load(NOWHERE)


def test_prepare_refuses_what_holds_no_text(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source, words in ((tmp_path / "empty", "holds no text"), (tmp_path / "nothing", "is no file and no folder")):
        with pytest.raises(ConfigError, match=words):
            prepared(source, tmp_path / "data")
    assert not list((tmp_path / "data").glob("text-*"))
