"""``python -m atom lifetime`` and ``python -m atom sweep lifetime``: what they print and return."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atom.__main__ import main
from atom.benchmarks.lifetime_mutants import MUTATIONS
from atom.benchmarks.source_lifetime_rows import ExplorationRow, MutationRow
from atom.config import CopyProtocol
from atom.errors import BadInput
from atom.lifetime.counterexample import Recorded
from atom.workbook import lifetime_cli
from atom.workbook.lifetime_cli import unexpected, unexpected_mutation
from atom.workbook.records import load_run

EXPLORE = ["lifetime", "explore", "--path", "ell_slot", "--depth", "1"]


def test_explore_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXPLORE, "--full"]) == 0
    said = capsys.readouterr().out
    assert "ell_slot     hold           depth 1" in said
    assert "holds" in said
    assert "foreign bytes" in said
    assert said.rstrip().endswith("as expected")


def test_explore_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXPLORE, "--protocol", "hold", "--json"]) == 0
    printed = capsys.readouterr()
    assert "1 parts, about" in printed.err
    values = json.loads(printed.out)
    assert values["as_expected"]
    (row,) = values["explored"]
    assert ExplorationRow.model_validate(row).complete
    assert values["mutations"] == []


def test_write_and_replay(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    given = ["--path", "spec_status", "--protocol", "unpatched", "--write", str(file)]
    assert main(["lifetime", "explore", *given, "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["written"], written["kind"]) == (str(file), "foreign bytes")
    last = len(Recorded.read(file).example.steps) - 1
    assert main(["lifetime", "replay", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].split() == ["host", "stream", "0", "stream", "1"]
    assert f"found at step {last}: foreign bytes" in said
    assert main(["lifetime", "replay", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["again"]


@pytest.mark.parametrize(
    "given", [[], ["--path", "ell_slot", "--depth", "3"]], ids=["table", "given"]
)
def test_a_row_of_the_mutation_table_is_written_and_replayed(
    given: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A ring of two slots shows it, which no option asks for."""
    file = str(tmp_path / "found.json")
    named = ["--mutation", "pinned slot reused early", "--write", file]
    if given:
        named[1] = "ell slot reused early"
    assert main(["lifetime", "explore", *named, *given]) == 0
    assert main(["lifetime", "replay", file]) == 0
    assert "found at step" in capsys.readouterr().out


def test_an_equivalent_mutation_says_why_nothing_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mutation = next(one for one in MUTATIONS if one.equivalent)
    file = tmp_path / "found.json"
    given = ["--mutation", mutation.name, "--depth", "1", "--write", str(file)]
    assert main(["lifetime", "explore", *given]) == 1
    assert f"nothing was written (it is equivalent: {mutation.equivalent})" in (
        capsys.readouterr().out
    )
    assert not file.exists()
    assert main(["lifetime", "explore", *given, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["written"] is None


def test_a_file_that_cannot_be_written_is_named_before_anything_is_explored(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetime_cli, "counterexample", None)
    for file in (tmp_path, tmp_path / "absent" / "found.json"):
        given = ["--path", "spec_status", "--protocol", "unpatched", "--write", str(file)]
        assert main(["lifetime", "explore", *given]) == 2
        assert f"--write {file}: cannot be written" in capsys.readouterr().err


def test_mutations_are_checked_before_anything_is_explored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise BadInput("text is gone")

    monkeypatch.setattr(lifetime_cli, "check_mutations_apply", refuse)
    assert main(["lifetime", "explore", "--depth", "1"]) == 2
    said = capsys.readouterr()
    assert (said.out, "text is gone" in said.err) == ("", True)


def test_a_violation_that_is_gone_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    given = ["--path", "spec_status", "--protocol", "unpatched", "--write", str(file)]
    main(["lifetime", "explore", *given])
    record = Recorded.read(file)
    # the same steps up to the drop, under the protocol that keeps the source
    about = {**record.about, "program": {**record.about["program"], "protocol": "hold"}}
    example = type(record.example)(
        record.example.kind, record.example.text, record.example.steps[:8]
    )
    Recorded(about, example).write(file)
    assert main(["lifetime", "replay", str(file)]) == 1
    assert "does not happen any more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explore", "--depth", "0"], "allowed: 1 to 8"),
        (["explore", "--write", "x.json"], "single --path"),
        (["explore", "--mutation", "x"], "goes with --write"),
        (["replay", "nowhere.json"], "nowhere.json: cannot be read"),
    ],
)
def test_bad_input(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lifetime", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_what_is_not_as_expected() -> None:
    row = ExplorationRow(
        path="clean",
        protocol=CopyProtocol.HOLD,
        depth=2,
        schedules=3,
        complete=True,
        outcomes=1,
        longest=9,
        violations="",
        seconds=0.0,
    )
    assert unexpected(row) == []
    assert unexpected(row.model_copy(update={"violations": "deadlock"}))
    assert unexpected(row.model_copy(update={"complete": False}))
    assert unexpected(row.model_copy(update={"protocol": CopyProtocol.UNPATCHED}))
    mutation = MutationRow(
        mutation="m",
        edge="c",
        what="w",
        caught=True,
        equivalent=False,
        foreign_reads=0,
        tag_caught=0,
        guard_caught=0,
        tag_alone="none",
        guard_alone="none",
        schedules=1,
    )
    assert unexpected_mutation(mutation) == []
    assert unexpected_mutation(mutation.model_copy(update={"caught": False}))
    assert unexpected_mutation(mutation.model_copy(update={"equivalent": True}))


def test_the_sweep_records_valid_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ["--device", "virtual", "--trials", "2", "--only", "clean", "--only", "graph_output"]
    assert main(["sweep", "lifetime", *given, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "0/2 / 2/2" in said
    (folder,) = (tmp_path / "virtual-mi355x").iterdir()
    table = load_run(folder).tables["trials"]
    assert len(table) == 9 + 2
    assert set(table[table["arm"] == "control"]["stale"]) == {2}
    assert set(table[table["arm"] == "protected"]["stale"]) == {0}


def test_the_sweep_refuses_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "lifetime", "--device", "virtual", "--processes", "2"]) == 2
    assert "no --processes" in capsys.readouterr().err
    assert main(["sweep", "lifetime", "--device", "virtual", "--only", "moon"]) == 2
    assert "no path 'moon'" in capsys.readouterr().err


def test_the_sweep_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "lifetime", "--device", "virtual", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "spec_status/unpatched/control: 50 trials" in text
    assert "65 points on the virtual device: about 39 s" in text
