"""Notes: equal words are said once with all whom they are about, foreign text stays text, remedies add up."""

from __future__ import annotations

import string

import pytest

from analysis.comparison.notes import Code, Note, Remedy, Subject, remedy_of, write


def test_equal_notes_are_one_sentence_that_names_all_whom_it_is_about() -> None:
    two, four = Subject("ddp × 2"), Subject("ddp × 4")
    apart = [Note(Code.APART).about(each) for each in (two, four)]
    other = Note(Code.PER_SAMPLE, {"fewer": 1_000, "more": 1_024}, (four,))
    (first, second) = write([*apart, other], of=2, brief=True)
    assert first == "The two sides were measured apart.", "true of both, so no names"
    assert second == "ddp × 4: Epochs hold 1,000 and 1,024 samples: ratios of times and energies are per sample."
    assert write(apart, of=3, brief=True) == ["ddp × 2 and ddp × 4: The two sides were measured apart."]


def test_works_are_named_once_where_all_have_the_same_and_by_name_elsewhere() -> None:
    two = [Subject("ddp × 2", "batch 1"), Subject("ddp × 2", "batch 2")]
    four = [Subject("ddp × 4", "batch 1"), Subject("ddp × 4", "batch 2")]
    (both,) = write(Note(Code.PARITY_OFF, {}, (each,)) for each in (*two, *four))
    assert both.endswith(": ddp × 2 and ddp × 4 (batch 1; and batch 2).")
    (each,) = write(Note(Code.PARITY_OFF, {}, (each,)) for each in (two[0], four[1]))
    assert each.endswith(": ddp × 2 (batch 1) and ddp × 4 (batch 2).")


def test_what_a_foreign_folder_says_is_text_and_fills_no_gap() -> None:
    foreign = "{whose} {0.__class__} %s"
    values = {"warning": foreign, "runs": "1 run", "folders": foreign}
    assert write([Note(Code.RECORDED, values, (Subject("{each}"),))]) == [f"{{each}}: {foreign} (1 run: {foreign})."]


@pytest.mark.parametrize(
    ("times", "shown"),
    [(2.34567, "2.35"), (45.67, "45.7"), (999.4, "999"), (999.6, "1,000"), (4321.5, "4,322"), (8.46e10, "8.46e+10")],
)
def test_numbers_of_1000_and_more_have_all_digits_before_the_point(times: float, shown: str) -> None:
    note = Note(Code.SUPERLINEAR, {"more": "4 devices", "fewer": "1 device", "speed_up": times, "limit": 4.2})
    assert note.brief == f"4 devices seem {shown} times as fast as 1 device, and more than 4.2 times is not believed"


def test_the_remedy_of_several_notes_mends_each_of_them() -> None:
    notes = [
        Note(Code.UNDECIDED, remedy=Remedy(9)),
        Note(Code.APART, remedy=Remedy(10, in_turn=True)),
        Note(Code.DISTURBED, remedy=Remedy(retry=frozenset({"disturbed"}))),
        Note(Code.FAILED, remedy=Remedy(retry=frozenset({"error"}))),
        Note(Code.MEMORY),
    ]
    assert remedy_of(notes) == Remedy(10, frozenset({"disturbed", "error"}), in_turn=True)
    assert remedy_of([Note(Code.MEMORY)]) == Remedy()


def test_no_code_has_a_gap_that_reads_anything_but_a_value() -> None:
    """A field such as {runs.name} would read attributes of what it is given."""
    names = {name for code in Code for _, name, _, _ in string.Formatter().parse(code.full) if name is not None}
    assert all(name.isidentifier() for name in names)
