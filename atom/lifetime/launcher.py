"""``python -m atom lifetime run SCRIPT [ARGS]``: run a program under the sanitizer.

Exit code 1 with findings, whatever the program's own; else the program's own, or 3 if it ended with
an exception.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from atom.errors import AtomError, BadInput
from atom.lifetime.findings import Report, Suppression, read_suppressions

_EPILOG = """\
examples
  python -m atom lifetime run train.py --epochs 1
  python -m atom lifetime run -m package.serve --port 8000
  python -m atom lifetime run --json --output found.json train.py
  python -m atom lifetime run --suppress 'loader.py:120=the ring is deeper than the pipeline' app.py

Worker processes (spawn, fork, subprocesses that run Python) are followed, and their findings are in
the same report. A file of suppressions has one 'FILE[:LINE]  REASON' a line. With --json and no
--output, stdout holds the report alone: what the program prints there goes to stderr.

exit codes: 1 with findings (or --findings-exit-code), whatever the program's own. Without findings
the program's own: 0 if it ended well, 3 if an exception ended it, 130 if it was interrupted. 2 for
bad input, 3 where the device cannot be watched. A program may use 1, 2 and 3 itself: "findings" and
"program_exit_code" of the report tell which it was, and so does another --findings-exit-code.
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
        BadInput: no such script or module, a suppression without a reason, or an exit code that
            is none.
        DeviceError: torch or its allocator cannot be watched.
    """
    suppressions = [parse_suppression(text) for text in options.suppress]
    if options.suppressions:
        suppressions += read_suppressions(options.suppressions)
    if not options.module and not Path(options.program).is_file():
        raise BadInput(f"no script {options.program!r}; a module is run with -m")
    if not 1 <= options.findings_exit_code <= 255:
        raise BadInput(f"--findings-exit-code {options.findings_exit_code}; allowed: 1 to 255")

    from atom.lifetime import children
    from atom.lifetime.sanitizer import Sanitizer

    alone = _keep_stdout() if options.json and not options.output else None
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
            journal.stop()
            watch.report.on_change = None
    finally:
        if folder is not None and os.getpid() == owner:
            children.remove_folder(folder)
    warnings = _blindness(watch.report.operations)
    for warning in warnings:
        watch.report.note(warning)
    _show(watch.report, code, options, warnings, alone)
    return options.findings_exit_code if watch.report.exit_code else code


def _blindness(operations: int) -> list[str]:
    """Why no finding may mean that nothing was looked at."""
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
    if not operations:
        said.append("anything at all: the program made no device operation that could be checked")
    return said


def _keep_stdout() -> int:
    """Turn stdout into stderr to the end of this process; returns where stdout went before.

    By descriptor, for children and C code too; and to the end, for what the program prints at exit.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return kept


def _show(
    report: Report,
    code: int,
    options: argparse.Namespace,
    warnings: Sequence[str],
    alone: int | None,
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
        assert alone is not None
        with open(alone, "w", encoding="utf-8") as stdout:
            stdout.write(text + "\n")
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
