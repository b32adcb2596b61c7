"""Answers the start command of the engine that the workbook examines.

In an environment of this checkout ``python -m atom.entrypoints.openai_server`` comes here and not
to that engine. To start something else under its name would be a surprise: this says where to go.
"""

from __future__ import annotations

import sys

_ANSWER = """\
error: this is the workbook's package `atom`, not the engine of the same name.
  The workbook's own server comes with its engine, as: python -m atom serve
  The other engine's server starts with that engine's interpreter, outside this .venv."""


def main() -> int:
    """Print the answer; returns 2."""
    print(_ANSWER, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
