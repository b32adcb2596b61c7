"""What the commands' options share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atom.errors import BadInput


class _Setting(argparse.Action):
    """Collects ``NAME VALUE`` pairs; a name that comes twice is refused, not overwritten."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        option_string: str | None = None,
    ) -> None:
        name, value = values or ("", "")
        pairs = list(getattr(namespace, self.dest))
        for known, earlier in pairs:
            if known == name:
                parser.error(
                    f"{option_string} {name} is given twice, as {earlier!r} and {value!r}: "
                    "which one counts? Several values go into one, as a list: '[1, 2]'"
                )
        setattr(namespace, self.dest, [*pairs, [name, value]])


def add_setting(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, about: str, dest: str = "parameters"
) -> None:
    """Add ``-p NAME VALUE``, which may be repeated with other names.

    Args:
        parser: the command's parser, or a group of it.
        about: the help's text.
        dest: name of the result, a list of ``[name, value]``, both as they were typed.
    """
    parser.add_argument(
        "-p",
        dest=dest,
        nargs=2,
        action=_Setting,
        default=[],
        metavar=("NAME", "VALUE"),
        help=about,
    )


def refuse_named_twice(options: Mapping[str, str], pairs: Iterable[Sequence[str]]) -> None:
    """Refuse a setting that has both an option of its own and ``-p``.

    Args:
        options: options that were given, by the name of their setting.
        pairs: name and value of each ``-p``.

    Raises:
        BadInput: naming both.
    """
    for name, value in pairs:
        if name in options:
            raise BadInput(f"{options[name]} and -p {name} {value} set the same: leave one out")


def read_value(name: str, text: str) -> Any:
    """A value of ``-p NAME VALUE``: YAML, with numbers such as ``2e-3``, text to YAML 1.1.

    Raises:
        BadInput: it is no YAML.
    """
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadInput(f"-p {name} {text}: not a YAML value: {error}") from None
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
