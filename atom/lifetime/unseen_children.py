"""Names the child processes that the watch cannot follow: Python without our ``sitecustomize``.

A fresh Python child finds the watch through ``PYTHONPATH`` and ``site``. Options such as ``-I``, or
an environment of its own, keep it from both. Each such start is looked at in the parent, through
Python's audit events, which see every way to start a program.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from atom.lifetime.sites import as_site, here

#: options of Python that keep the watch out
_KEEP_OUT = "IES"
_WITH_VALUE = "WX"
_PYTHON = re.compile(r"(python|pypy)[\d.]*[a-z]?(\.exe)?")
_MOST_WORDS = 12

_tellers: list[tuple[str, Callable[[str], None]]] = []
_installed = False


def watch_starts(site_folder: str, tell: Callable[[str], None]) -> Callable[[], None]:
    """Call ``tell`` with a text for each Python child that will not be followed.

    Args:
        site_folder: the folder on ``PYTHONPATH`` through which children find the watch.
        tell: takes the text; called before the child starts.

    Returns:
        A function that ends it.
    """
    global _installed
    if not _installed:
        # an audit hook stays for good: it does nothing while nobody listens
        sys.addaudithook(_audit)
        _installed = True
    kept_out = own_options()
    if kept_out:
        tell(
            f"Python children that multiprocessing spawns: this process runs with {kept_out}, "
            "which they inherit and which keeps the watch out"
        )
    entry = (site_folder, tell)
    _tellers.append(entry)

    def stop() -> None:
        if entry in _tellers:
            _tellers.remove(entry)

    return stop


def own_options() -> str:
    """Options of this interpreter that its children inherit and that keep the watch out."""
    flags = sys.flags
    if flags.isolated:
        return "-I"
    return " ".join(
        name for name, is_set in (("-E", flags.ignore_environment), ("-S", flags.no_site)) if is_set
    )


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _tellers or event not in _WORDS:
        return
    # what a hook raises would end the program's own call
    with contextlib.suppress(Exception):
        program, words, environment = _WORDS[event](arguments)
        for folder, tell in list(_tellers):
            why = why_unseen(program, words, environment, folder)
            if why is not None:
                shown = " ".join(shlex.quote(word) for word in words[:_MOST_WORDS])
                tell(f"the Python child started at {as_site(here())}, {why}: {shown}")


def _popen(arguments: tuple[Any, ...]) -> tuple[Any, list[str], Any]:
    executable, words, _, environment = arguments
    if isinstance(words, (str, bytes, os.PathLike)):
        words = [words]
    return executable, _texts(words), environment


def _started(arguments: tuple[Any, ...]) -> tuple[Any, list[str], Any]:
    program, words, environment = arguments[-3:]
    return program, _texts(words), environment


def _shell(arguments: tuple[Any, ...]) -> tuple[Any, list[str], Any]:
    return None, ["sh", "-c", os.fsdecode(arguments[0])], None


_WORDS: dict[str, Callable[[tuple[Any, ...]], tuple[Any, list[str], Any]]] = {
    "subprocess.Popen": _popen,
    "os.exec": _started,
    "os.posix_spawn": _started,
    "os.spawn": _started,
    "os.system": _shell,
}


def _texts(words: Iterable[Any]) -> list[str]:
    return [os.fsdecode(word) for word in words]


def why_unseen(
    program: Any, words: Sequence[str], environment: Mapping[Any, Any] | None, folder: str
) -> str | None:
    """Why a program that is started will not be followed; ``None`` if it will, or is no Python.

    Args:
        program: the file that runs; ``None`` for the first word.
        words: its command line.
        environment: of the child; ``None`` inherits.
        folder: see :func:`watch_starts`.
    """
    file = os.fsdecode(program) if program is not None else ""
    command = python_command(file, list(words))
    if command is None:
        return None
    options = options_that_keep_out(command)
    if options:
        return f"with {options}, which keeps the watch out"
    if environment is not None:
        known = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
        if folder not in known.get("PYTHONPATH", "").split(os.pathsep):
            return "with an environment without this run's PYTHONPATH, which keeps the watch out"
    return None


def python_command(program: str, words: list[str]) -> list[str] | None:
    """The words behind the interpreter if this runs Python, else ``None``.

    Through a shell's ``-c``, ``env`` and a script's first line too.
    """
    file = program or (words[0] if words else "")
    name = os.path.basename(file)
    if _PYTHON.fullmatch(name) or file == sys.executable:
        return words[1:]
    if name in ("sh", "bash", "dash", "zsh") and "-c" in words[:-1]:
        return _behind_python(_split(words[words.index("-c") + 1]))
    if name == "env":
        return _behind_python(words)
    behind = _behind_python(_split(_first_line(file)))
    return None if behind is None else [*behind, file, *words[1:]]


def _behind_python(words: list[str]) -> list[str] | None:
    for place, word in enumerate(words):
        if _PYTHON.fullmatch(os.path.basename(word)):
            return words[place + 1 :]
    return None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _first_line(file: str) -> str:
    try:
        with open(file, "rb") as script:
            line = script.readline(256)
    except OSError:
        return ""
    return line[2:].decode(errors="replace").strip() if line.startswith(b"#!") else ""


def options_that_keep_out(words: Sequence[str]) -> str:
    """Those of Python's options ahead of its script that are ``-I``, ``-E`` or ``-S``."""
    found: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-") or word == "-":
            break
        if word.startswith("--"):
            continue
        for place, letter in enumerate(word[1:], 1):
            if letter in _KEEP_OUT:
                found.append(f"-{letter}")
            if letter in "cm":
                return " ".join(dict.fromkeys(found))
            if letter in _WITH_VALUE:
                position += place == len(word) - 1
                break
    return " ".join(dict.fromkeys(found))
