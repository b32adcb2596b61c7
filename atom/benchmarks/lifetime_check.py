"""The whole check: every path under every protocol, and every mutation caught."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from atom.benchmarks.lifetime_mutants import MUTATIONS
from atom.benchmarks.lifetime_mutations import Mutation, changed
from atom.benchmarks.lifetime_paths import LifetimePath
from atom.benchmarks.lifetime_programs import Following, LifetimeProgram, programs
from atom.benchmarks.lifetime_watch import Watch
from atom.benchmarks.source_lifetime_rows import Alone, ExplorationRow, MutationRow
from atom.config import CopyProtocol
from atom.errors import BadInput
from atom.lifetime.counterexample import Recorded, recorded
from atom.lifetime.explore import Counterexample, Exploration, Method, ViolationKind, explore
from atom.lifetime.explore_device import ExploredDevice

#: depths at which the fault itself is explored in full; deeper, its first foreign byte is enough:
#: at depth 2 all of its schedules would be nine tenths of those of the whole check
FULL_CONTROL_DEPTH = 1
DEFAULT_DEPTHS = (1, 2, 3)
#: steps in flight up to which a mutation has to be caught
MUTATION_DEPTH = 3
_MOST_MUTANT_SCHEDULES = 40


def explore_program(
    program: LifetimeProgram, *, method: Method = Method.REDUCED, whole: bool = False
) -> tuple[ExplorationRow, Exploration]:
    """Explore one program.

    Args:
        program: what to run.
        method: how much is run.
        whole: explore the unpatched protocol in full at any depth.
    """
    control = program.protocol is CopyProtocol.UNPATCHED and program.depth > FULL_CONTROL_DEPTH
    stop = frozenset({ViolationKind.FOREIGN_BYTES}) if control and not whole else frozenset()
    found = explore(program, method=method, stop_at=stop)
    example = found.first
    row = ExplorationRow(
        path=program.path,
        protocol=program.protocol,
        depth=program.depth,
        schedules=found.schedules,
        complete=found.complete,
        outcomes=len(found.outcomes),
        longest=found.longest,
        violations=", ".join(sorted(found.counterexamples)),
        shortest=None if example is None else len(example.steps),
        seconds=found.seconds,
    )
    return row, found


def explore_all(depths: Iterable[int] = DEFAULT_DEPTHS) -> list[ExplorationRow]:
    """Every path under every protocol, with each number of steps in flight."""
    return [explore_program(program)[0] for program in programs(depths=tuple(depths))]


class _Tally:
    """Foreign reads of an exploration, and what alone would have caught them."""

    def __init__(self, program: LifetimeProgram) -> None:
        self.program = program
        self.foreign = self.tag = self.guard = 0

    def __call__(self, device: ExploredDevice) -> Hashable:
        return self.program.observe(device, self._count)

    def _count(self, watch: Watch) -> None:
        for seen in watch.observations.values():
            if seen.foreign:
                self.foreign += 1
                self.tag += seen.tag_caught
                self.guard += seen.guard_caught


def _alone(caught: int, foreign: int) -> Alone:
    if not foreign:
        return "nothing to catch"
    if not caught:
        return "none"
    return "every" if caught == foreign else "some"


def try_mutation(mutation: Mutation, *, most_depth: int = MUTATION_DEPTH) -> MutationRow:
    """Put one fault into the code and look for the least depth that shows it.

    Both things that a following step may write are tried: its own payload, and a prefill's
    metadata.
    """
    killer: tuple[LifetimeProgram, Counterexample] | None = None
    foreign_depth = None
    foreign = tag = guard = schedules = 0
    with changed(mutation.changes):
        for depth in range(1, most_depth + 1):
            for program in mutation.programs(depth):
                for following in Following:
                    tally = _Tally(replace(program, following=following))
                    found = explore(tally, most_schedules=_MOST_MUTANT_SCHEDULES)
                    schedules += found.schedules
                    if killer is None and found.first is not None:
                        killer = program, found.first
                    if tally.foreign:
                        foreign_depth = depth
                    foreign += tally.foreign
                    tag += tally.tag
                    guard += tally.guard
            if foreign_depth is not None:
                break
    shown = None if killer is None else killer[1]
    return MutationRow(
        mutation=mutation.name,
        edge=mutation.edge,
        what=mutation.what,
        caught=killer is not None,
        equivalent=mutation.equivalent is not None,
        path=None if killer is None else killer[0].path,
        protocol=None if killer is None else killer[0].protocol,
        depth=None if killer is None else killer[0].depth,
        killed_by=None if shown is None else shown.kind,
        steps=None if shown is None else len(shown.steps),
        foreign_depth=foreign_depth,
        foreign_reads=foreign,
        tag_caught=tag,
        guard_caught=guard,
        tag_alone=_alone(tag, foreign),
        guard_alone=_alone(guard, foreign),
        schedules=schedules,
        argument=mutation.equivalent or "",
    )


def mutation_table(*, most_depth: int = MUTATION_DEPTH) -> list[MutationRow]:
    """What became of every mutation, in the order of the list."""
    return [try_mutation(mutation, most_depth=most_depth) for mutation in MUTATIONS]


def find_mutation(name: str) -> Mutation:
    """The mutation of that name.

    Raises:
        BadInput: there is none.
    """
    for mutation in MUTATIONS:
        if mutation.name == name:
            return mutation
    known = "; ".join(mutation.name for mutation in MUTATIONS)
    raise BadInput(f"no mutation {name!r}; known: {known}")


def check_mutations_apply() -> None:
    """See to it that each mutation's text is in the present code.

    Raises:
        BadInput: one is not; names the mutation.
    """
    for mutation in MUTATIONS:
        try:
            with changed(mutation.changes):
                pass
        except BadInput as error:
            raise BadInput(f"mutation {mutation.name!r}: {error}") from None


def counterexample(
    program: LifetimeProgram, mutation: str | None = None
) -> tuple[Recorded, Exploration] | None:
    """The shortest schedule that breaks ``program``, ready to be written; ``None`` if none does."""
    with changed(() if mutation is None else find_mutation(mutation).changes):
        found = explore(program, most_schedules=_MOST_MUTANT_SCHEDULES)
    return None if found.first is None else (_record(program, mutation, found.first), found)


def mutation_counterexample(
    name: str,
    *,
    paths: Sequence[LifetimePath] = (),
    protocols: Sequence[CopyProtocol] = (),
    depths: Iterable[int] = range(1, MUTATION_DEPTH + 1),
) -> tuple[Recorded, Exploration] | None:
    """The schedule that kills a mutation in :func:`mutation_table`, ready to be written.

    Args:
        name: of the mutation.
        paths, protocols: what to try in place of the mutation's own.
        depths: steps in flight to try.

    Returns:
        The record, and the exploration that found it; ``None`` if none does.

    Raises:
        BadInput: no such mutation, or its text is not in the present code.
    """
    mutation = find_mutation(name)
    mutation = replace(
        mutation,
        paths=tuple(paths) or mutation.paths,
        protocols=tuple(protocols) or mutation.protocols,
    )
    with changed(mutation.changes):
        for depth in depths:
            for program in mutation.programs(depth):
                for following in Following:
                    tried = replace(program, following=following)
                    found = explore(tried, most_schedules=_MOST_MUTANT_SCHEDULES)
                    if found.first is not None:
                        return _record(tried, name, found.first), found
    return None


def _record(program: LifetimeProgram, mutation: str | None, example: Counterexample) -> Recorded:
    return Recorded({"program": program.to_json(), "mutation": mutation}, example)


def replay_recorded(record: Recorded) -> ExploredDevice:
    """Run a recorded schedule again on the present code.

    Raises:
        BadInput: it names no known program or mutation.
        NotRepeatable: the schedule does not fit the present code.
    """
    program = LifetimeProgram.from_json(record.about.get("program", {}))
    mutation = record.about.get("mutation")
    with changed(() if mutation is None else find_mutation(mutation).changes):
        return recorded(program, record)
