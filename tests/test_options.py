"""``-p NAME VALUE``, which every command shares."""

import argparse

import pytest

from atom.__main__ import main
from atom.errors import BadInput
from atom.models.train import _parser as train_parser
from atom.options import add_setting, read_value


def test_pairs_are_kept_as_typed_in_their_order() -> None:
    parser = argparse.ArgumentParser()
    add_setting(parser, "a setting")
    again = parser.parse_args(["-p", "b", "[1, 2]", "-p", "a", "x y"])
    assert again.parameters == [["b", "[1, 2]"], ["a", "x y"]]
    assert parser.parse_args([]).parameters == []


@pytest.mark.parametrize("command", ["run", "sweep race", "serve preset:tiny"])
def test_a_name_given_twice_is_refused_by_every_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*command.split(), "-p", "items", "4", "-p", "other", "1", "-p", "items", "5"])
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert "-p items is given twice, as '4' and '5'" in said


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sweep race --seed 3 -p seed 4", "--seed and -p seed 4"),
        ("sweep race --device virtual -p device virtual", "--device and -p device virtual"),
        ("sweep engine-fault --only unpatched -p only hold", "--only and -p only hold"),
        (
            "serve --model preset:tiny --max-num-seqs 4 -p max_num_seqs 8",
            "--max-num-seqs and -p max_num_",
        ),
        (
            "serve --model preset:tiny --cpu-pool-gib 1 -p cpu_pool_bytes 8",
            "--cpu-pool-gib and -p cpu_",
        ),
        (
            "serve --model preset:tiny --no-logprobs -p logprobs true",
            "--no-logprobs and -p logprobs true",
        ),
    ],
)
def test_an_option_and_its_setting_are_the_same_given_twice(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert said in capsys.readouterr().err


def test_training_refuses_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_parser().parse_args(["-p", "steps", "1", "-p", "steps", "1"])
    assert "given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [("2e-3", 0.002), ("9e-1", 0.9), ("[1, 2]", [1, 2]), ("true", True), ("x y", "x y"), ("3", 3)],
)
def test_a_value_is_yaml_with_every_form_of_numbers(text: str, value: object) -> None:
    assert read_value("items", text) == value


def test_what_is_no_yaml_is_named() -> None:
    with pytest.raises(BadInput, match=r"-p items \[1: not a YAML value"):
        read_value("items", "[1")
