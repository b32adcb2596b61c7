"""``python -m atom``: run notebooks, sweep an experiment, build reports, serve a model."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from atom.errors import AtomError
from atom.options import add_setting

# nothing heavy is imported here: --help and a run without changes answer at once

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_ROOT = Path(__file__).resolve().parents[1]
_PLACE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}

_EPILOG = """\
examples
  python -m atom run                             every notebook on the virtual device, then the site
  python -m atom run 01 -p bonus 3               one notebook with another parameter
  python -m atom run 02 --profile gpu            the race micro-benchmark on this machine's GPU
  python -m atom sweep race --quick              60 seconds of the race sweep on this machine's GPU
  python -m atom compare published data/runs/h200/<run>
                                                 a run of one's own beside the published figures
  python -m atom records check data/runs/h200    validate recorded runs
  python -m atom serve --model preset:tiny       a server with random weights, to try it out
  python -m atom devices                         what this machine can run on

exit codes: 0 fine, 1 a claim fell, 2 bad input, 3 a notebook or a device failed, 130 interrupted
"""
_RUN_EPILOG = """\
examples
  python -m atom run                                    all notebooks, profile ci
  python -m atom run 02 -p trials 20 -p batch_sizes '[1, 32]'
  python -m atom run 02 -f my_settings.yaml --out reports/trial
  python -m atom run --profile gpu                      on the accelerator, into reports/<machine>/
  python -m atom run --profile h200 -p records '[data/runs/h200]'
                                                        recorded rows analysed again, without a GPU
  python -m atom run --json > run.json                  states and paths for a script

A value is read as YAML: 3, 0.5, true, [1, 2], text. Names, types and ranges are checked before
anything starts. A notebook whose inputs did not change is not executed again (--force does).
A notebook that fails, dies or runs past its time limit leaves <notebook>.failed.ipynb in the report
folder, with its outputs so far; the others still run.
"""
_SWEEP_EPILOG = """\
examples
  python -m atom sweep race --dry-run                   the plan, with device minutes
  python -m atom sweep race --quick                     at most a minute
  python -m atom sweep race --only 'main/*/matmul/*'    some arms
  python -m atom sweep race                             all, into data/runs/<machine>/
  python -m atom sweep race --resume data/runs/<machine>/<run>
  python -m atom sweep throughput --quick               agentic sessions over two CPU pools
  python -m atom sweep colocation --gpus 0,1            an engine beside what works on the other
  python -m atom sweep accuracy --gpus 0,0,0,0          every arm's answers, four points at a time
  python -m atom sweep capacity -p arms '[shared_lru, paired]' --traces DIR
                                                        hours of serving, simulated: no GPU
  python -m atom sweep throughput -p server_label atom -p server_model m395 --server-command \\
    'python -m atom serve --model preset:m395 --port {port} --cpu-pool-gib {pool_gib}'
                                                        on a GPU: a server for each point

It names first what would spoil the figures: launch blocking, serialised kernels, caching off (these
it refuses), another process on the GPU, a power or clock cap.
"""
_COMPARE_EPILOG = """\
examples
  python -m atom compare published data/runs/<machine>/<run>
  python -m atom compare data/runs/h200/<run> data/runs/<machine>/<run>
  python -m atom compare RUN_A RUN_B --allow-different seed settings --json

Rates come with exact intervals, and their difference with Newcombe's. On different machines only
figures without a unit are compared: rates, and quotients to the run's own null arm or to its own
points without offload. Published are counts of race and lifetime.
"""
_RECORDS_EPILOG = """\
example
  python -m atom records check data/runs/h200           every problem with file, line and column
"""
_DEVICES_EPILOG = """\
example
  python -m atom devices --json                         for a script: is there an accelerator?
"""
_REPORT_EPILOG = """\
examples
  python -m atom report                                 build reports/ci/index.html again
  python -m atom report data/runs/h200 --out trial       recorded rows analysed again, on a CPU
  python -m atom report reports/h200                    that report again, from the rows it cites
  python -m atom report --check reports/h200            fail if it is not what these rows give
  python -m atom report --accept mech-01/simulated --reason "queue profile corrected"
  python -m atom report --profile h200 --accept 'micro-*' --reason "first recorded sweep"

A report from run folders is named after the runs' machine and goes to reports/<machine>/; the
verdicts accepted for that machine apply. Simulated rows are made again, which gives the same ones.
An accepted verdict is the one in the latest results; later runs fail if they do worse.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (0, 1, 2, 3; 130 when interrupted)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser(
        with_sweep=words[:1] == ["sweep"],
        with_lifetime=words[:1] == ["lifetime"],
        with_serve=words[:1] == ["serve"],
    )
    options = parser.parse_args(words)
    try:
        return int(options.run(options))
    except AtomError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print(f"\n{interrupt or 'stopped'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our output went away (| head)
        sys.stderr.close()
        return 0
    except OSError as error:
        # a place that became full or was not looked at before; anything else is a defect
        if error.errno not in _PLACE_ERRORS:
            raise
        print(f"error: {error.strerror}: {error.filename or 'while writing'}", file=sys.stderr)
        return 2


def build_parser(
    *, with_sweep: bool = True, with_lifetime: bool = True, with_serve: bool = True
) -> argparse.ArgumentParser:
    """The command line. Options of some verbs come from modules that are loaded for them alone."""
    parser = _parser(None, "python -m atom", __doc__ or "", _EPILOG)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands)
    _add_sweep(commands, with_sweep)
    _add_report(commands)
    _add_compare(commands)
    _add_records(commands)
    _add_lifetime(commands, with_lifetime)
    _add_serve(commands, with_serve)
    devices = _parser(commands, "devices", "list the devices of this machine", _DEVICES_EPILOG)
    _add_json(devices)
    devices.set_defaults(run=_devices)
    return parser


def _parser(
    commands: _Commands | None,
    name: str,
    about: str,
    epilog: str,
) -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    if commands is None:
        return argparse.ArgumentParser(
            prog=name, description=about, epilog=epilog, formatter_class=shape
        )
    return commands.add_parser(
        name, help=about, description=about, epilog=epilog, formatter_class=shape
    )


def _add_run(commands: _Commands) -> None:
    run = _parser(commands, "run", "execute notebooks and build the site", _RUN_EPILOG)
    run.add_argument(
        "notebooks",
        nargs="*",
        metavar="NOTEBOOK",
        help="number (02), name or path; default: all that are written",
    )
    run.add_argument(
        "--profile",
        default="ci",
        help="ci: virtual device (default); gpu: this machine's accelerator; or the name of a "
        "machine whose recorded runs are analysed again",
    )
    add_setting(run, "set a parameter in every selected notebook that has it; may be repeated")
    run.add_argument("-f", dest="file", metavar="FILE.yaml", help="parameters from a YAML file")
    run.add_argument("--out", metavar="DIR", help="report folder (default: reports/<profile>)")
    run.add_argument(
        "--jobs",
        type=int,
        help="notebooks at a time, one core each (default: 2; 1 on a GPU, which they would share)",
    )
    run.add_argument("--force", action="store_true", help="execute also what did not change")
    run.add_argument(
        "--time-limit",
        type=float,
        metavar="FACTOR",
        help="a cell may take FACTOR times its notebook's budget; 0: any time (default: 10; 60 on "
        "a GPU)",
    )
    _add_json(run)
    run.set_defaults(run=_run)


def _add_sweep(commands: _Commands, with_options: bool) -> None:
    sweep = _parser(commands, "sweep", "run one experiment and record its rows", _SWEEP_EPILOG)
    if with_options:
        from atom.workbook import sweeps

        sweeps.add_arguments(sweep)
        sweep.set_defaults(run=sweeps.run)


def _add_lifetime(commands: _Commands, with_options: bool) -> None:
    about = "explore every interleaving of the transfers, or watch a program's sources"
    lifetime = _parser(commands, "lifetime", about, "")
    if with_options:
        from atom.workbook import lifetime_cli

        lifetime_cli.add_arguments(lifetime)
        lifetime.set_defaults(run=lifetime_cli.run)


def _add_serve(commands: _Commands, with_options: bool) -> None:
    about = "serve a model with OpenAI's interface"
    serve = _parser(commands, "serve", about, "")
    if with_options:
        from atom.entrypoints import serve as serving

        serving.add_arguments(serve)
        serve.set_defaults(run=serving.run)


def _add_report(commands: _Commands) -> None:
    about = "build a site again, from executed notebooks or recorded rows, or accept a verdict"
    report = _parser(commands, "report", about, _REPORT_EPILOG)
    report.add_argument(
        "paths",
        nargs="*",
        metavar="FILE-or-FOLDER",
        help="recorded runs, or a report: execute its notebooks on the recorded rows alone",
    )
    report.add_argument(
        "--profile",
        help="ci (default) or a machine, e.g. h200; for run folders: the runs' own",
    )
    report.add_argument("--out", metavar="DIR", help="report folder (default: reports/<profile>)")
    report.add_argument(
        "--check",
        action="store_true",
        help="rebuild the report elsewhere; exit code 1 if a verdict or a source notebook changed",
    )
    report.add_argument(
        "--accept",
        metavar="CLAIM",
        help="claim/evidence; a claim alone: its verdicts that need a decision; or a pattern such "
        "as 'mech-*'",
    )
    report.add_argument("--reason", metavar="TEXT", help="why the verdict is right")
    _add_json(report)
    report.set_defaults(run=_report)


def _add_compare(commands: _Commands) -> None:
    about = "compare two recorded runs, or one with the published figures"
    compare = _parser(commands, "compare", about, _COMPARE_EPILOG)
    for name in ("a", "b"):
        compare.add_argument(
            name, metavar=name.upper(), help="a run folder, or the word: published"
        )
    compare.add_argument(
        "--allow-different",
        nargs="+",
        action="extend",
        default=[],
        choices=("load", "model", "seed", "settings"),
        metavar="WHAT",
        help="compare all the same where load, model, seed or settings differ",
    )
    _add_json(compare)
    compare.set_defaults(run=_compare)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")


def _add_records(commands: _Commands) -> None:
    records = _parser(commands, "records", "work with recorded runs", _RECORDS_EPILOG)
    actions = records.add_subparsers(metavar="ACTION", required=True)
    check = _parser(actions, "check", "validate a folder of recorded runs", _RECORDS_EPILOG)
    check.add_argument("folder", metavar="DIR", help="a run folder, or a parent of run folders")
    _add_json(check)
    check.set_defaults(run=_records_check)


def _run(options: argparse.Namespace) -> int:
    from atom.workbook.commands import run

    return run(options, _ROOT)


def _report(options: argparse.Namespace) -> int:
    from atom.workbook.report import report

    return report(options, _ROOT)


def _records_check(options: argparse.Namespace) -> int:
    from atom.workbook.records_cli import check

    return check(options.folder, as_json=options.json)


def _compare(options: argparse.Namespace) -> int:
    from atom.workbook.compare import RENDERERS, compare

    result = compare(options.a, options.b, options.allow_different)
    print(RENDERERS["json" if options.json else "markdown"](result))
    return 0


def _devices(options: argparse.Namespace) -> int:
    from atom.workbook.commands import devices

    return devices(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
