"""Recorded counterexamples: text and back, replay, bars of a timeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom.benchmarks.lifetime_check import counterexample, replay_recorded
from atom.benchmarks.lifetime_paths import LifetimePath
from atom.benchmarks.lifetime_programs import LifetimeProgram
from atom.config import CopyProtocol
from atom.errors import BadInput
from atom.lifetime.counterexample import Recorded, timeline
from atom.lifetime.explore import NotRepeatable, Step, ViolationKind

PROGRAM = LifetimeProgram(LifetimePath.SPEC_STATUS, CopyProtocol.UNPATCHED)


@pytest.fixture(scope="module")
def record() -> Recorded:
    found = counterexample(PROGRAM)
    assert found is not None
    return found[0]


def test_text_and_back(record: Recorded, tmp_path: Path) -> None:
    record.write(tmp_path / "found.json")
    assert Recorded.read(tmp_path / "found.json") == record
    assert record.example.kind is ViolationKind.FOREIGN_BYTES
    assert LifetimeProgram.from_json(record.about["program"]) == PROGRAM


def test_a_replay_shows_it_again_with_its_last_step(record: Recorded) -> None:
    device = replay_recorded(record)
    foreign = [v.place for v in device.violations if v.kind == ViolationKind.FOREIGN_BYTES]
    assert foreign == [len(record.example.steps) - 1]


def test_a_mutation_is_replayed_with_its_mutation() -> None:
    program = LifetimeProgram(LifetimePath.SPEC_STATUS, CopyProtocol.HOLD)
    assert counterexample(program) is None
    found = counterexample(program, "wrong stream recorded")
    assert found is not None
    kinds = {violation.kind for violation in replay_recorded(found[0]).violations}
    assert found[0].example.kind in kinds
    with pytest.raises(NotRepeatable):
        # without the mutation the host has to wait there
        replay_recorded(Recorded({**found[0].about, "mutation": None}, found[0].example))


def test_another_label_is_noticed(record: Recorded) -> None:
    steps = (Step(record.example.steps[0].process, "sing"), *record.example.steps[1:])
    changed = type(record.example)(record.example.kind, record.example.text, steps)
    with pytest.raises(NotRepeatable, match="is 'sing' on host; the program does 'allocate'"):
        replay_recorded(Recorded(record.about, changed))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a recorded counterexample"),
        ("[]", "not a recorded counterexample"),
        ('{"format": 7}', "format 7; this version reads 1"),
        ('{"format": 1}', "violation"),
        (
            '{"format": 1, "violation": {"kind": "error", "text": ""}, "schedule": [["gpu", ""]]}',
            "neither host nor a stream",
        ),
    ],
)
def test_other_files_are_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(BadInput, match=said) as caught:
        Recorded.read(tmp_path / "file.json")
    assert "file.json" in str(caught.value)


def test_an_unknown_program_or_mutation_is_refused(record: Recorded) -> None:
    with pytest.raises(BadInput, match="not a program of the seven paths"):
        replay_recorded(Recorded({"program": {"path": "moon"}}, record.example))
    with pytest.raises(BadInput, match="no mutation 'x'; known: hold keeps nothing"):
        replay_recorded(Recorded({**record.about, "mutation": "x"}, record.example))


def test_bars_of_the_violation(record: Recorded) -> None:
    spans, owners = timeline(replay_recorded(record), len(record.example.steps))
    lanes = dict.fromkeys(span[0] for span in spans)
    assert set(lanes) == {"host", "stream 0", "stream 1"}
    roles = {(span[0], span[4]) for span in spans}
    assert {("stream 0", "producer"), ("stream 0", "writer"), ("stream 1", "copy")} <= roles
    assert spans[-1][4] == "read"
    # two owners of the same block, one after the other
    tensors = [owner for owner in owners if owner[0].startswith("tensor")]
    assert len(tensors) == 2
    assert tensors[0][2] <= tensors[1][1]
    assert all(start < end for _, start, end in owners)
