"""``python -m atom lifetime run SCRIPT [ARGS]``: run a program under the sanitizer.

Exit code 1 with findings; otherwise the program's own, or 3 if it ended with an exception.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from atom.errors import AtomError, BadInput
from atom.lifetime.findings import Report, Suppression, read_suppressions

_EPILOG = """\
examples
  python -m atom lifetime run train.py --epochs 1
  python -m atom lifetime run -m package.serve --port 8000
  python -m atom lifetime run --json --output found.json train.py
  python -m atom lifetime run --suppress 'loader.py:120=the ring is deeper than the pipeline' app.py

Worker processes (spawn, fork, subprocesses that run Python) are followed, and their findings are in
the same report. A file of suppressions has one 'FILE[:LINE]  REASON' a line.

exit codes: 0 nothing found, 1 findings, 2 bad input, 3 the program or the device failed
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
        BadInput: no such script, or a suppression without a reason.
        DeviceError: torch or its allocator cannot be watched.
    """
    suppressions = [parse_suppression(text) for text in options.suppress]
    if options.suppressions:
        suppressions += read_suppressions(options.suppressions)
    if not options.module and not Path(options.program).is_file():
        raise BadInput(f"no script {options.program!r}; a module is run with -m")

    from atom.lifetime import children
    from atom.lifetime.sanitizer import Sanitizer

    watch = Sanitizer(suppressions)
    owner = os.getpid()
    folder = None
    if options.no_children:
        watch.report.note("child processes (--no-children)")
    else:
        folder = children.make_folder()
    try:
        journal = None if folder is None else children.follow_forks(watch, folder)
        watch.start()
        try:
            code = _execute(options.program, options.module, list(options.arguments))
        finally:
            watch.stop()
        if os.getpid() != owner:
            # a forked child came back through the program's end; its journal is written at exit
            return code
        if folder is not None:
            children.gather(folder, watch.report)
        if journal is not None:
            watch.report.on_change = None
    finally:
        if folder is not None and os.getpid() == owner:
            children.remove_folder(folder)
    _show(watch.report, options)
    return watch.report.exit_code or code


def _show(report: Report, options: argparse.Namespace) -> None:
    text = report.as_json() if options.json else report.text()
    if options.output:
        Path(options.output).write_text(text + "\n", encoding="utf-8")
        print(report.text().splitlines()[0], file=sys.stderr)
    else:
        sys.stdout.flush()
        print(text, file=sys.stdout if options.json else sys.stderr)


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
    except BaseException:
        traceback.print_exc()
        return 3
    finally:
        sys.argv = before
        sys.path[:] = path
    return 0


if __name__ == "__main__":
    sys.exit(main())
