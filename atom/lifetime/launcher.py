"""``python -m atom lifetime run SCRIPT [ARGS]``: run a program under the sanitizer.

Exit code 1 with findings, whatever the program's own; else the program's own, or 3 if it ended with
an exception.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from atom.errors import AtomError, BadInput
from atom.lifetime.findings import (
    Report,
    Suppression,
    read_suppressions,
    unused_suppressions,
)

_REFUSED = "refused"
_PR_SET_PDEATHSIG = 1

_EPILOG = """\
examples
  python -m atom lifetime run train.py --epochs 1
  python -m atom lifetime run -m package.serve --port 8000
  python -m atom lifetime run --json --output found.json train.py
  python -m atom lifetime run --suppress 'loader.py:120=the ring is deeper than the pipeline' app.py

Worker processes (spawn, fork, subprocesses that run Python) are followed, and their findings are in
the same report. It comes when the program has ended, be it by os._exit or by a signal. A file of
suppressions has one 'FILE[:LINE]  REASON' a line. With --json and no --output, stdout holds the
report alone: what the program prints there goes to stderr.

exit codes: 1 with findings (or --findings-exit-code), whatever the program's own. Without findings
the program's own: 0 if it ended well, 3 if an exception ended it, 130 if it was interrupted, 128
and the signal's number if a signal ended it. 2 for bad input, 3 where the device cannot be watched.
A program may use 1, 2 and 3 itself: "findings" and "program_exit_code" of the report tell which it
was, and so does another --findings-exit-code.
"""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``run``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print the report as JSON on stdout")
    parser.add_argument("--output", metavar="FILE", help="write the report there instead")
    parser.add_argument(
        "--suppress",
        action="append",
        default=[],
        metavar="FILE[:LINE]=REASON",
        help="do not count findings that name this line; may be repeated",
    )
    parser.add_argument("--suppressions", metavar="FILE", help="a file of suppressions")
    parser.add_argument(
        "--findings-exit-code",
        type=int,
        default=1,
        metavar="N",
        help="exit code with findings, 1 to 255 (default 1)",
    )
    parser.add_argument("--no-children", action="store_true", help="do not follow child processes")
    parser.add_argument(
        "-m", dest="module", action="store_true", help="PROGRAM is the name of a module"
    )
    parser.add_argument("program", metavar="PROGRAM", help="a script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m atom lifetime", description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_run_arguments(commands.add_parser("run", help="run a program under the sanitizer"))
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        return run(options)
    except AtomError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def parse_suppression(text: str) -> Suppression:
    """``FILE[:LINE]=REASON``.

    Raises:
        BadInput: no file or no reason.
    """
    place, _, reason = text.partition("=")
    file, _, line = place.rpartition(":")
    if not file or not line.isdigit():
        file, line = place, ""
    return Suppression(file.strip(), int(line) if line else None, reason.strip())


def run(options: argparse.Namespace) -> int:
    """Run the program that the options name, and print what was found.

    Raises:
        BadInput: no such script or module, a suppression without a reason, an exit code that is
            none, or an output that cannot be written.
        DeviceError: torch or its allocator cannot be watched.
    """
    suppressions = [parse_suppression(text) for text in options.suppress]
    if options.suppressions:
        suppressions += read_suppressions(options.suppressions)
    if not options.module and not Path(options.program).is_file():
        raise BadInput(f"no script {options.program!r}; a module is run with -m")
    if not 1 <= options.findings_exit_code <= 255:
        raise BadInput(f"--findings-exit-code {options.findings_exit_code}; allowed: 1 to 255")

    if options.output:
        refuse_unwritable_file("--output", options.output)

    from atom.lifetime import children

    folder = children.make_folder(follow=not options.no_children)
    sys.stdout.flush()
    sys.stderr.flush()
    # a process of its own: it may end itself, be killed, or go on in threads and children, and
    # what it found is told all the same
    program = os.fork()
    if not program:
        return _run_watched(options, suppressions, folder)
    report = Report(suppressions=tuple(suppressions))
    report.processes = 0
    if options.no_children:
        report.note("child processes (--no-children)")
    try:
        code = _wait_for(program)
        refused = (Path(folder) / _REFUSED).exists()
        children.gather(folder, report)
    finally:
        children.remove_folder(folder)
    if refused:
        return code
    warnings = _blindness(report)
    for warning in warnings:
        report.note(warning)
    _show(report, code, options, warnings)
    return options.findings_exit_code if report.exit_code else code


def refuse_unwritable_file(option: str, file: str) -> None:
    """See whether a file can be written, and leave none behind.

    Args:
        option: that names it, for the message.
        file: its path.

    Raises:
        BadInput: it cannot.
    """
    new = not Path(file).exists()
    try:
        with open(file, "a", encoding="utf-8"):
            pass
        if new:
            Path(file).unlink()
    except OSError as error:
        raise BadInput(f"{option} {file}: cannot be written: {error.strerror}") from None


def _run_watched(
    options: argparse.Namespace, suppressions: Sequence[Suppression], folder: str
) -> int:
    """The program's own process. The watch goes on to its end: see ``children.follow_forks``."""
    from atom.lifetime import children
    from atom.lifetime.sanitizer import Sanitizer

    _die_with_parent()
    if options.json and not options.output:
        # by descriptor, for children and C code too; stdout is the report's alone
        os.dup2(2, 1)
        sys.stdout = sys.stderr
    watch = Sanitizer(suppressions)
    owner = os.getpid()
    try:
        children.follow_forks(watch, folder, follow=not options.no_children)
        watch.start()
        return _execute(options.program, options.module, list(options.arguments))
    except AtomError:
        if os.getpid() == owner:
            (Path(folder) / _REFUSED).touch()
        raise


def _die_with_parent() -> None:
    """On Linux, end with the launcher, however it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _wait_for(process: int) -> int:
    """Wait for the program, hand signals on, and return its exit code (128 + n for signal n)."""

    def hand_on(number: int, _: object) -> None:
        # a terminal sends Ctrl-C to both
        if number != signal.SIGINT or not _in_foreground():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, hand_on) for number in signals}
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _in_foreground() -> bool:
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _blindness(report: Report) -> list[str]:
    """Why no finding may mean that nothing was looked at."""
    said = device_blindness()
    if not report.operations and not report.findings and not report.suppressed:
        said.append("anything at all: the program made no device operation that could be checked")
    return said


def device_blindness() -> list[str]:
    """What of an accelerator's work cannot be seen with this torch on this machine."""
    import torch

    said = []
    if torch.version.cuda is None and torch.version.hip is None:
        said.append(
            f"work of an accelerator: torch {torch.__version__} is a CPU build, and only the "
            "virtual device was watched"
        )
    elif not torch.cuda.is_available():
        said.append(
            "work of an accelerator: torch finds none here, and only the virtual device was watched"
        )
    return said


def _show(
    report: Report,
    code: int,
    options: argparse.Namespace,
    warnings: Sequence[str],
) -> None:
    text = report.text()
    if code:
        text += f"\n\nthe program itself ended with exit code {code}"
    head = text.splitlines()[0]
    if options.json:
        text = json.dumps({**json.loads(report.as_json()), "program_exit_code": code}, indent=1)
    if not options.output and not options.json:
        print(text, file=sys.stderr)
        return
    if options.output:
        Path(options.output).write_text(text + "\n", encoding="utf-8")
        print(head, file=sys.stderr)
    else:
        print(text, flush=True)
    for place in unused_suppressions(report.suppressions, report.suppressed):
        print(f"this suppression covered nothing: {place}", file=sys.stderr)
    for warning in warnings:
        print(f"not seen in this run: {warning}", file=sys.stderr)


def _execute(program: str, module: bool, arguments: list[str]) -> int:
    before, path = sys.argv, list(sys.path)
    sys.argv = [program, *arguments]
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program).resolve().parent))
            runpy.run_path(program, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        if module and _raised_by_runpy(error.__traceback__):
            raise BadInput(f"-m {program}: {error}") from None
        traceback.print_exc()
        return 3
    except BaseException:
        traceback.print_exc()
        return 3
    finally:
        sys.argv = before
        sys.path[:] = path
    return 0


def _raised_by_runpy(trace: TracebackType | None) -> bool:
    """Whether no line of the program was reached: the module was not found."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") == "runpy"


if __name__ == "__main__":
    sys.exit(main())
