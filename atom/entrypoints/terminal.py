"""What a server prints; it serves on when nobody reads it any more (``| head``)."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def say(line: str) -> None:
    """Print a line on standard output, or on standard error where that is closed."""
    if not _printed(line, sys.stdout):
        tell(f"warning: standard output is closed; it would have said\n{line}")


def tell(line: str) -> None:
    """Print a line on standard error."""
    _printed(line, sys.stderr)


def _printed(line: str, stream: TextIO) -> bool:
    try:
        print(line, file=stream, flush=True)
    except OSError:
        # what is left in the buffer would fail again at the next line, and at the process's end
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        return False
    return True
