"""``python -m atom lifetime``: explore every interleaving, replay one, run a program watched."""

from __future__ import annotations

import argparse
import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence

from atom.benchmarks.lifetime_check import (
    MUTATION_DEPTH,
    check_mutations_apply,
    counterexample,
    explore_program,
    find_mutation,
    mutation_counterexample,
    replay_recorded,
    try_mutation,
)
from atom.benchmarks.lifetime_mutants import MUTATIONS
from atom.benchmarks.lifetime_paths import LifetimePath
from atom.benchmarks.lifetime_programs import LifetimeProgram, programs
from atom.benchmarks.source_lifetime_rows import ExplorationRow, MutationRow
from atom.config import CopyProtocol
from atom.errors import BadInput, ClaimFell
from atom.lifetime.counterexample import Recorded
from atom.lifetime.explore import Method
from atom.lifetime.explore_trace import HOST
from atom.workbook.sweep_progress import TerminalProgress

_EPILOG = """\
examples
  python -m atom lifetime explore                        every path, protocol and mutation
  python -m atom lifetime explore --depth 4              up to four steps in flight
  python -m atom lifetime explore --path spec_status --protocol unpatched --write found.json
  python -m atom lifetime explore --mutation 'hold keeps nothing' --write found.json
  python -m atom lifetime replay found.json              that schedule, step by step
  python -m atom lifetime run train.py                   a program of one's own under the sanitizer
"""
_EXPLORE_EPILOG = """\
The transfer code runs on a virtual device under every order of its queues and host calls that the
code's own streams and events allow. Each correct protocol must hold, the unpatched one must not,
and every mutation that is not equivalent must be caught.

exit codes: 0 as expected, 1 not, 2 bad input, 3 the device failed
"""
_REPLAY_EPILOG = "exit codes: 0 the violation happens again, 1 it does not, 2 bad input"
_DEFAULT_DEPTH = 3
_MOST_DEPTH = 8
#: work of a mutation, and roughly the seconds of a program with one step in flight
_MUTATION_PARTS = 40
_PART_SECONDS = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of ``python -m atom lifetime``."""
    shape = argparse.RawDescriptionHelpFormatter
    parser.formatter_class, parser.epilog = shape, _EPILOG
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    explore = actions.add_parser(
        "explore",
        help="run the transfers under every interleaving",
        epilog=_EXPLORE_EPILOG,
        formatter_class=shape,
    )
    explore.add_argument(
        "--path", action="append", default=[], choices=[path.value for path in LifetimePath]
    )
    explore.add_argument(
        "--protocol", action="append", default=[], choices=[item.value for item in CopyProtocol]
    )
    explore.add_argument(
        "--depth",
        type=int,
        metavar="N",
        help=f"up to so many steps in flight (default {_DEFAULT_DEPTH}, at most {_MOST_DEPTH})",
    )
    explore.add_argument(
        "--full",
        action="store_true",
        help="also from every reachable state, and compare; for depths 1 and 2",
    )
    explore.add_argument("--no-mutations", action="store_true", help="leave the mutations out")
    explore.add_argument(
        "--mutation",
        metavar="NAME",
        help="with --write: the schedule that kills this mutation, of the table's path and "
        "protocol unless they are given",
    )
    explore.add_argument(
        "--write",
        metavar="FILE",
        help="of one path and protocol, or of a mutation: write the shortest schedule that "
        "breaks it",
    )
    explore.add_argument("--json", action="store_true", help="print JSON in place of text")
    replay = actions.add_parser(
        "replay",
        help="run a recorded schedule again",
        epilog=_REPLAY_EPILOG,
        formatter_class=shape,
    )
    replay.add_argument("file", metavar="FILE", help="written by explore --write")
    replay.add_argument("--json", action="store_true", help="print JSON in place of text")
    run_program = actions.add_parser("run", help="run a program under the sanitizer")
    from atom.lifetime.launcher import add_run_arguments

    add_run_arguments(run_program)


def run(arguments: Namespace) -> int:
    """Run the command. Returns its exit code.

    Raises:
        AtomError: bad input, or a failed device or program.
    """
    if arguments.action == "replay":
        return _replay(arguments)
    if arguments.action == "run":
        from atom.lifetime import launcher

        return launcher.run(arguments)
    return _explore(arguments)


# -- explore


def _explore(arguments: Namespace) -> int:
    depth = _DEFAULT_DEPTH if arguments.depth is None else arguments.depth
    if not 1 <= depth <= _MOST_DEPTH:
        raise BadInput(f"--depth {depth}; allowed: 1 to {_MOST_DEPTH}")
    paths = tuple(LifetimePath(name) for name in arguments.path) or tuple(LifetimePath)
    protocols = tuple(CopyProtocol(name) for name in arguments.protocol) or tuple(CopyProtocol)
    if arguments.write is not None:
        return _write(arguments, paths, protocols, depth)
    if arguments.mutation is not None:
        raise BadInput("--mutation goes with --write")
    everything = not (arguments.path or arguments.protocol or arguments.no_mutations)
    if everything:
        # minutes of exploring would be lost to a mutation of text that has gone
        check_mutations_apply()
    started = time.perf_counter()
    rows: list[ExplorationRow] = []
    faults: list[str] = []
    table: list[MutationRow] = []
    todo = programs(paths, protocols, tuple(range(1, depth + 1)))
    mutations = MUTATIONS if everything else ()
    parts = sum(_parts(program.depth) for program in todo) + _MUTATION_PARTS * len(mutations)
    progress = TerminalProgress(name="explore", unit="parts")
    progress.start(parts, parts * _PART_SECONDS)
    try:
        for program in todo:
            row, found = explore_program(program, whole=arguments.full and program.depth <= 2)
            rows.append(row)
            faults += unexpected(row)
            if not arguments.json:
                print(_exploration_line(row), flush=True)
            if arguments.full and program.depth <= 2 and row.complete:
                states = explore_program(program, method=Method.STATES)[1]
                if states.outcomes != found.outcomes:
                    faults.append(
                        f"{_name(row)}: the reduced exploration has {len(found.outcomes)} "
                        f"outcomes, all states have {len(states.outcomes)}"
                    )
            progress.advance(_parts(program.depth))
        for mutation in mutations:
            table.append(try_mutation(mutation))
            if not arguments.json:
                print(_mutation_line(table[-1]), flush=True)
            progress.advance(_MUTATION_PARTS)
    finally:
        progress.stop()
    faults += [fault for mutation in table for fault in unexpected_mutation(mutation)]
    seconds = time.perf_counter() - started
    if arguments.json:
        values = {
            "format": 1,
            "as_expected": not faults,
            "faults": faults,
            "seconds": round(seconds, 1),
            "explored": [row.model_dump(mode="json") for row in rows],
            "mutations": [row.model_dump(mode="json") for row in table],
        }
        print(json.dumps(values, indent=1))
    else:
        schedules = sum(row.schedules for row in rows) + sum(row.schedules for row in table)
        print(
            f"\n{len(rows)} programs, {len(table)} mutations, {schedules} schedules: "
            f"{seconds:.1f} s"
        )
        print("as expected" if not faults else "NOT as expected:")
        for fault in faults:
            print(f"  {fault}")
    return ClaimFell.exit_code if faults else 0


def _parts(depth: int) -> int:
    """Work of a program, for the time left: each step in flight multiplies its schedules."""
    return int(4 ** (depth - 1))


def unexpected(row: ExplorationRow) -> list[str]:
    """What is not as it has to be: correct protocols hold, the unpatched one does not."""
    breaks = bool(row.violations)
    if row.protocol is CopyProtocol.UNPATCHED:
        return [] if breaks else [f"{_name(row)}: no schedule shows the fault"]
    if breaks:
        return [f"{_name(row)}: {row.violations}"]
    return [] if row.complete else [f"{_name(row)}: not every schedule was covered"]


def unexpected_mutation(row: MutationRow) -> list[str]:
    """What is not as it has to be: each mutation is caught, or equivalent and not."""
    if row.caught == row.equivalent:
        what = "was caught though it is equivalent" if row.caught else "was not caught"
        return [f"mutation '{row.mutation}' {what}"]
    return []


def _name(row: ExplorationRow) -> str:
    return f"{row.path} under {row.protocol.value}, depth {row.depth}"


def _exploration_line(row: ExplorationRow) -> str:
    result = row.violations or "holds"
    more = "" if row.complete else "+"
    return (
        f"{row.path:12} {row.protocol.value:14} depth {row.depth}  {row.schedules:5}{more:1} "
        f"schedules {row.outcomes:4} outcomes  {row.seconds:6.2f} s  {result}"
    )


def _mutation_line(row: MutationRow) -> str:
    if row.equivalent:
        return f"equivalent  {row.mutation:44} {row.argument}"
    if not row.caught:
        return f"NOT CAUGHT  {row.mutation}"
    assert row.protocol is not None
    return (
        f"caught      {row.mutation:44} {row.killed_by} on {row.path}/{row.protocol.value}, depth "
        f"{row.depth}, {row.steps} steps; tag alone: {row.tag_alone}, guard: {row.guard_alone}"
    )


def _write(
    arguments: Namespace,
    paths: Sequence[LifetimePath],
    protocols: Sequence[CopyProtocol],
    depth: int,
) -> int:
    one = len(paths) == len(protocols) == 1
    if arguments.mutation is None and not one:
        raise BadInput("--write needs a single --path and --protocol, or a --mutation")
    from atom.lifetime.launcher import refuse_unwritable_file

    refuse_unwritable_file("--write", arguments.write)
    equivalent = None
    if arguments.mutation is not None:
        equivalent = find_mutation(arguments.mutation).equivalent or None
        found = mutation_counterexample(
            arguments.mutation,
            paths=paths if arguments.path else (),
            protocols=protocols if arguments.protocol else (),
            depths=range(1, MUTATION_DEPTH + 1) if arguments.depth is None else (depth,),
        )
    else:
        depth = 1 if arguments.depth is None else depth
        found = counterexample(LifetimeProgram(paths[0], protocols[0], depth))
    if found is None:
        if arguments.json:
            print(json.dumps({"format": 1, "written": None, "equivalent": equivalent}, indent=1))
            return ClaimFell.exit_code
        reason = f" (it is equivalent: {equivalent})" if equivalent else ""
        print(f"no schedule breaks it; nothing was written{reason}")
        return ClaimFell.exit_code
    record, exploration = found
    try:
        record.write(arguments.write)
    except OSError as error:
        raise BadInput(f"--write {arguments.write}: {error}") from None
    example = record.example
    if arguments.json:
        values = {
            "format": 1,
            "written": arguments.write,
            "kind": example.kind.value,
            "text": example.text,
            "steps": len(example.steps),
            "schedules": exploration.schedules,
        }
        print(json.dumps(values, indent=1))
        return 0
    print(
        f"{example.kind.value}: {example.text}\n"
        f"{len(example.steps)} steps, the shortest of {exploration.schedules} schedules; "
        f"python -m atom lifetime replay {arguments.write}"
    )
    return 0


# -- replay


def _replay(arguments: Namespace) -> int:
    record = Recorded.read(arguments.file)
    device = replay_recorded(record)
    kinds = {violation.kind for violation in device.violations}
    again = record.example.kind.value in kinds
    steps = len(record.example.steps)
    if arguments.json:
        values = {
            "format": 1,
            "again": again,
            "recorded": {"kind": record.example.kind.value, "text": record.example.text},
            "found": [{"kind": v.kind, "text": v.text, "step": v.place} for v in device.violations],
            "steps": steps,
        }
        print(json.dumps(values, indent=1))
        return 0 if again else ClaimFell.exit_code
    streams = sorted({event.process for event in device.events[:steps]} - {HOST})
    lanes = [HOST, *streams]
    width = 34
    print("".join(f"{'host' if lane == HOST else f'stream {lane}':{width}}" for lane in lanes))
    for event in device.events[:steps]:
        label = event.label if event.parts == 1 else f"{event.label}, half {event.part + 1}"
        print(" " * width * lanes.index(event.process) + label)
    print(f"\nrecorded: {record.example.kind.value}: {record.example.text}")
    for violation in device.violations:
        print(f"found at step {violation.place}: {violation.kind}: {violation.text}")
    if not again:
        print("the violation does not happen any more", file=sys.stderr)
    return 0 if again else ClaimFell.exit_code
