"""The command line that starts a server at a port, with a pool, for a concurrency."""

from __future__ import annotations

import shlex
import shutil
import string
from collections.abc import Iterator
from dataclasses import dataclass

from atom.errors import BadInput

_WHY = {"port": "where to listen", "pool_gib": "its pool, or all points would be one"}
PLACEHOLDERS = (*_WHY, "concurrency")


@dataclass(frozen=True)
class ServerTemplate:
    """A command line with ``{port}``, ``{pool_gib}`` and, if wanted, ``{concurrency}`` in it.

    It is split as a POSIX shell splits words, and no shell runs it: set variables with
    ``env NAME=VALUE command``. Literal braces are written ``{{`` and ``}}``.

    Raises:
        BadInput: it cannot be split, or a placeholder is unknown or missing.
    """

    text: str

    def __post_init__(self) -> None:
        """Check the text; see the class."""
        try:
            words = shlex.split(self.text)
        except ValueError as error:
            raise BadInput(f"server_command: {error}: {self.text!r}") from None
        if not words:
            raise BadInput("server_command: expected a command line, got nothing")
        try:
            named = {name for word in words for name in _placeholders(word)}
        except ValueError as error:
            raise BadInput(
                f"server_command: {error}; write {{{{ and }}}} for literal braces: {self.text!r}"
            ) from None
        unknown = sorted(named - set(PLACEHOLDERS))
        if unknown:
            raise BadInput(
                f"server_command: unknown placeholder {{{unknown[0]}}}; allowed: "
                f"{', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}; write {{{{ and }}}} for "
                "literal braces"
            )
        for name, what in _WHY.items():
            if name not in named:
                raise BadInput(f"server_command: {{{name}}} is missing: the server is told {what}")

    def check_program(self) -> None:
        """Refuse a program that this host has not got.

        Raises:
            BadInput: names it.
        """
        program = shlex.split(self.text)[0]
        if shutil.which(program) is None:
            raise BadInput(f"server_command: there is no program {program!r} here")

    def command(self, *, port: int, pool_gib: float | None, concurrency: int) -> list[str]:
        """The words to run.

        Args:
            port: where it has to listen.
            pool_gib: CPU pool in GiB; ``None``, no offload, is written as 0.
            concurrency: live sessions.
        """
        values = {
            "port": port,
            "pool_gib": f"{pool_gib or 0:g}",
            "concurrency": concurrency,
        }
        return [word.format(**values) for word in shlex.split(self.text)]


def _placeholders(word: str) -> Iterator[str]:
    for _, name, specification, conversion in string.Formatter().parse(word):
        if name is not None:
            yield (
                name
                + (f"!{conversion}" if conversion else "")
                + (f":{specification}" if specification else "")
            )
