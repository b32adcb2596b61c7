"""Stateless model checking over the virtual device: every interleaving of host and streams.

A program is run again and again, each time on a fresh device and under another schedule. Schedules
that differ in the order of independent events only are one: of those, one is run (source-set
dynamic partial-order reduction with sleep sets; Abdulla, Aronis, Jonsson, Sagonas, POPL 2014). The
races of an execution are found when it has ended, since a step's footprint is known only then.

What is explored is the program's own stream order, with a hardware queue for each stream. What is
checked is in :class:`ViolationKind`; that a read got foreign bytes is told by the program.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from atom.errors import AtomError, BadInput, DeviceError
from atom.lifetime.explore_device import OWN_QUEUES, Deadlock, ExploredDevice, Guide
from atom.lifetime.explore_trace import (
    HOST,
    Clocks,
    Footprint,
    TraceEvent,
    Violation,
    dependent,
    overlap,
)

_COLLECT_EVERY = 32

Program = Callable[[ExploredDevice], Hashable]


class ViolationKind(StrEnum):
    """Properties of a transfer that may fail."""

    FOREIGN_BYTES = "foreign bytes"  #: the host got other bytes than the step wrote
    EARLY_FREE = "early free"  #: a source died before its copy was known to have ended
    UNRELEASED = "unreleased"  #: a source was still held after a drain
    DEADLOCK = "deadlock"  #: the host waits for work that can never run
    HOST_BLOCKED = "host blocked"  #: the host waited where it must not
    ERROR = "error"  #: the code raised


class Method(StrEnum):
    """How much is run."""

    REDUCED = "reduced"  #: one of each set of schedules that differ in independent steps only
    STATES = "states"  #: every step from every state that can be reached; knows of no independence
    FULL = "full"  #: every schedule


class NotRepeatable(DeviceError):
    """A program did something else under the same schedule: it depends on more than the device."""


class _Asleep(BaseException):
    """Everything that could run next was explored from an earlier place: no new outcome."""


@dataclass(frozen=True)
class Step:
    """One step of a schedule.

    Attributes:
        process: -1 for the host, else the stream.
        label: what runs.
    """

    process: int
    label: str


@dataclass(frozen=True)
class Counterexample:
    """A schedule that breaks a property.

    Attributes:
        kind, text: what broke.
        steps: the shortest schedule found; only what must happen before the violation.
    """

    kind: ViolationKind
    text: str
    steps: tuple[Step, ...]

    @property
    def switches(self) -> int:
        """How often the schedule changes process."""
        return sum(
            one.process != other.process
            for one, other in zip(self.steps, self.steps[1:], strict=False)
        )

    @property
    def cost(self) -> tuple[int, int]:
        """What the shortest one has least of: steps, then changes of process."""
        return len(self.steps), self.switches


@dataclass
class Exploration:
    """What was found.

    Attributes:
        schedules: executions that ran to their end.
        redundant: executions that were given up because an equivalent one had run.
        complete: whether every schedule is covered.
        outcomes: everything that the program returned.
        counterexamples: the shortest one of each kind.
        longest: steps of the longest execution.
        seconds: time that it took.
    """

    schedules: int = 0
    redundant: int = 0
    complete: bool = False
    outcomes: set[Hashable] = field(default_factory=set)
    counterexamples: dict[ViolationKind, Counterexample] = field(default_factory=dict)
    longest: int = 0
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether no schedule broke a property."""
        return not self.counterexamples

    @property
    def first(self) -> Counterexample | None:
        """The counterexample that says most: foreign bytes before anything else."""
        for kind in ViolationKind:
            if kind in self.counterexamples:
                return self.counterexamples[kind]
        return None


@dataclass(slots=True)
class _Node:
    """A place where something was chosen.

    Attributes:
        enabled: what could run.
        sleep: what need not run next, with what it touches.
        chosen: what runs next in the present execution.
        backtrack: what has to be tried.
        done: what was tried, with what it touched.
    """

    enabled: list[int]
    sleep: dict[int, Footprint]
    chosen: int
    backtrack: list[int]
    done: dict[int, Footprint] = field(default_factory=dict)


class _Search(Guide):
    """The stack of choices, and what has to be tried."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.reduce = method is Method.REDUCED
        self._known: set[Hashable] = set()
        self.stack: list[_Node] = []
        self.clocks = Clocks()

    def choose(self, enabled: list[int], device: ExploredDevice) -> int:
        """See :class:`Guide`: what the stack says, then the host first and the oldest stream."""
        trace = device.events
        place = len(trace)
        if place < len(self.stack):
            chosen = self.stack[place].chosen
            if chosen not in enabled:
                raise NotRepeatable(
                    f"step {place}: {_name(chosen)} cannot run, though it could under the same "
                    "schedule before; the program must depend on nothing but the device"
                )
            return chosen
        if self.method is Method.STATES:
            state = hash(device.state())
            if state in self._known:
                raise _Asleep
            self._known.add(state)
        sleep = self._inherited(trace) if place else {}
        awake = [process for process in enabled if process not in sleep]
        if not awake:
            raise _Asleep
        chosen = awake[0]
        self.stack.append(_Node(enabled, sleep, chosen, [chosen] if self.reduce else enabled))
        return chosen

    def _inherited(self, trace: list[TraceEvent]) -> dict[int, Footprint]:
        if not self.reduce:
            return {}
        parent, touched = self.stack[-1], trace[-1].touched
        return {
            process: footprint
            for process, footprint in (parent.sleep | parent.done).items()
            if process != parent.chosen and not dependent(footprint, touched)
        }

    def learn(self, trace: list[TraceEvent]) -> None:
        """Note what the execution's new steps touched, and what its races ask to be tried."""
        first = len(self.clocks)
        for node, event in zip(self.stack[first:], trace[first:], strict=False):
            node.done[node.chosen] = event.touched
        for place in range(first, len(trace)):
            for other in self.clocks.extend(trace):
                if self.reduce:
                    self._reverse(trace, other, place)

    def _reverse(self, trace: list[TraceEvent], one: int, other: int) -> None:
        """See to it that event ``other`` is also tried before ``one``."""
        node, before = self.stack[one], self.clocks.before
        rest = [place for place in range(one + 1, other) if not before(trace, one, place)]
        rest.append(other)
        seen: set[int] = set()
        initials = []
        for number, place in enumerate(rest):
            process = trace[place].process
            if process in seen:
                continue
            seen.add(process)
            if not any(before(trace, earlier, place) for earlier in rest[:number]):
                initials.append(process)
        if any(process in node.backtrack or process in node.sleep for process in initials):
            return
        wanted = trace[other].process
        node.backtrack.append(wanted if wanted in initials else initials[0])

    def next(self) -> bool:
        """Go on to the next schedule; ``False`` when there is none."""
        while self.stack:
            node = self.stack[-1]
            for process in node.backtrack:
                if process not in node.done and process not in node.sleep:
                    node.chosen = process
                    self.clocks.truncate(len(self.stack) - 1)
                    return True
            self.stack.pop()
        return False


class _Follow(Guide):
    """Follows a schedule, then the host first and the oldest stream."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self.steps = steps

    def choose(self, enabled: list[int], device: ExploredDevice) -> int:
        """See :class:`Guide`."""
        place = len(device.events)
        if place >= len(self.steps):
            return enabled[0]
        step = self.steps[place]
        if step.process not in enabled:
            raise NotRepeatable(
                f"step {place} of the schedule ({_name(step.process)}: {step.label}) cannot run: "
                "the program is not the one that the schedule was found with"
            )
        return step.process


def _name(process: int) -> str:
    return "the host" if process == HOST else f"stream {process}"


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """A cyclic collection frees blocks at places that no schedule knows of.

    So it runs where the caller asks for it only, and then over what was made since.
    """
    was_on = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def _execute(
    program: Program, guide: Guide, hardware_queues: int = OWN_QUEUES
) -> tuple[ExploredDevice, Hashable, bool]:
    """Run once. Returns the device, the outcome, and whether it ran to its end."""
    device = ExploredDevice(guide, hardware_queues)
    try:
        try:
            result = program(device)
        except NotRepeatable:
            raise
        except AtomError as error:
            kind = ViolationKind.DEADLOCK if isinstance(error, Deadlock) else ViolationKind.ERROR
            device.fail(kind, f"{type(error).__name__}: {error}")
            result = ("error", type(error).__name__)
        device.close()
        device.run_out()
    except _Asleep:
        device.close()
        return device, None, False
    return device, result, True


def early_frees(device: ExploredDevice, clocks: Clocks) -> Iterator[Violation]:
    """Blocks that died while a copy on a stream that the allocator knows nothing of used them.

    Told from the order of events alone: a copy that happened to end in time is no excuse.
    """
    trace = device.events
    operations = list(device.queued.values())
    for life in device.ownerships:
        if life.died is None:
            continue
        for work in operations:
            stream_id = work.key[0]
            if stream_id == life.stream_id or stream_id in life.told:
                continue
            if not life.born <= work.submitted <= life.died:
                continue
            if not overlap([life.block], work.reads):
                continue
            if work.ended is None or not clocks.before(trace, work.ended, life.died):
                yield Violation(
                    ViolationKind.EARLY_FREE,
                    f"the block from {life.owner} was freed, and nothing orders that after "
                    f"'{work.name}' on stream {stream_id}, which reads it",
                    life.died,
                )


def _shortest(device: ExploredDevice, clocks: Clocks, violation: Violation) -> Counterexample:
    trace, place = device.events, violation.place
    past = [one for one in range(place + 1) if clocks.before(trace, one, place)]
    steps = tuple(Step(trace[one].process, trace[one].label) for one in past)
    return Counterexample(ViolationKind(violation.kind), violation.text, steps)


def explore(
    program: Program,
    *,
    method: Method = Method.REDUCED,
    stop_at: frozenset[ViolationKind] = frozenset(),
    most_schedules: int | None = None,
    hardware_queues: int = OWN_QUEUES,
) -> Exploration:
    """Run ``program`` under every schedule.

    Args:
        program: called with a fresh device; what it returns is its outcome. It depends on nothing
            but the device, keeps nothing between calls, and tells the device of violations
            (``fail``), duties (``section``) and reads of pinned memory (``host_read``).
        method: how much is run.
        stop_at: end at the first violation of one of these kinds.
        most_schedules: give up after so many executions.
        hardware_queues: streams go round them in turn; so many that each has its own, unless told
            otherwise. Streams that share one take more than the code's own order, so this explains
            what hides a fault and proves nothing.

    Raises:
        BadInput: a reduced exploration of shared queues: the reduction takes streams for
            independent.
        NotRepeatable: the program did something else under the same schedule.
    """
    if hardware_queues < OWN_QUEUES and method is Method.REDUCED:
        raise BadInput(
            f"hardware_queues={hardware_queues} with the reduced method, which takes streams for "
            "independent; use the method 'states' or 'full'"
        )
    found = Exploration()
    search = _Search(method)
    started = time.perf_counter()
    executions = 0
    with no_cycle_collection():
        while True:
            device, outcome, ended = _execute(program, search, hardware_queues)
            search.learn(device.events)
            found.longest = max(found.longest, len(device.events))
            if ended:
                found.schedules += 1
                found.outcomes.add((outcome, tuple(sorted({v.kind for v in device.violations}))))
            else:
                found.redundant += 1
            for violation in (*device.violations, *early_frees(device, search.clocks)):
                example = _shortest(device, search.clocks, violation)
                known = found.counterexamples.get(example.kind)
                if known is None or example.cost < known.cost:
                    found.counterexamples[example.kind] = example
            executions += 1
            if executions % _COLLECT_EVERY == 0:
                gc.collect()
            if not stop_at.isdisjoint(found.counterexamples):
                break
            if most_schedules is not None and found.schedules >= most_schedules:
                break
            if not search.next():
                found.complete = True
                break
    found.seconds = time.perf_counter() - started
    return found


def replay(program: Program, steps: tuple[Step, ...]) -> tuple[ExploredDevice, Hashable]:
    """Run ``program`` under one schedule, and on to its end when the schedule is used up.

    Returns:
        The device, with its trace and violations (early frees among them), and the outcome.

    Raises:
        NotRepeatable: the schedule does not fit the program.
    """
    with no_cycle_collection():
        device, outcome, _ = _execute(program, _Follow(steps))
        clocks = Clocks()
        while len(clocks) < len(device.events):
            clocks.extend(device.events)
        device.violations += early_frees(device, clocks)
    return device, outcome
