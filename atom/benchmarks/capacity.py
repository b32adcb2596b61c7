"""An hour of serving in seconds: sessions over the engine's own scheduler and host pool, timed.

The load is that of :mod:`atom.benchmarks.load_client`: a number of lanes, each with one live
session that sends its requests one after the other with pauses between. Figures come from the same
definitions. All of it is simulated, and follows from the machine's numbers and the sessions.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field

from atom.benchmarks.capacity_engine import CapacityEngine
from atom.benchmarks.capacity_machine import Machine
from atom.benchmarks.capacity_rows import CapacityRow, row_of
from atom.benchmarks.load_metrics import Phase, RequestRow, summarise
from atom.benchmarks.session_load import SessionLoad, endless, first_turn
from atom.benchmarks.session_model import Session, Turn, hash_of
from atom.errors import AtomError, BadInput
from atom.model_engine.admission import RequestRefused
from atom.model_engine.engine_settings import EngineSettings
from atom.model_engine.request_output import RequestOutput
from atom.model_engine.sequence import SamplingParams


class CapacityLoad(SessionLoad):
    """The load of one point; its seconds are simulated ones."""

    concurrency: int = Field(32, ge=1, le=65536)
    """Live sessions at a time."""

    duration_seconds: float = Field(3600.0, gt=0, le=7 * 86400)
    """Length of the profiling window."""

    seed: int = Field(42, ge=0, lt=2**63)
    """Of the order of the sessions and of the places where lanes start."""


@dataclass(slots=True)
class _Lane:
    """One live session; its name and its prompts go by the pass over the sessions."""

    session: Session
    salt: str
    turn: int
    sent: int = 0
    #: hashes of the prompt sent last, and what they were chained from
    chain: list[bytes] = field(default_factory=list)
    chained: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Of the session, and the pass over the sessions if it is not the first."""
        return self.session.session_id + self.salt


@dataclass(slots=True)
class _Sent:
    """A request on its way."""

    lane: _Lane
    phase: Phase
    started: float
    prompt_tokens: int
    first_token: float | None = None
    cached: int = 0
    generated: int = 0


def shared_blocks(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many leading blocks two prompts have in common."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


class CapacityFault(AtomError):
    """The simulated engine cannot go on: nothing runs and nothing will."""


def simulate(
    sessions: Sequence[Session],
    load: CapacityLoad,
    settings: EngineSettings,
    machine: Machine,
    *,
    leaps: bool = True,
) -> CapacityRow:
    """Run one point.

    Args:
        sessions: at least one.
        load: how they come.
        settings: the engine; ``block_size`` divides the sessions' block, or is a multiple of it.
        machine: the costs.
        leaps: whether repeated decode steps are taken at once; the figures are the same without.

    Raises:
        BadInput: no sessions, or settings that do not fit them.
        RequestRefused: a request of a session is longer than the engine takes.
    """
    if not sessions:
        raise BadInput("sessions: expected at least one")
    return Simulation(sessions, load, settings, machine, leaps=leaps).run()


class Simulation:
    """One point; see :func:`simulate`.

    Attributes:
        engine: what serves.
        rows: requests that have ended.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        load: CapacityLoad,
        settings: EngineSettings,
        machine: Machine,
        *,
        leaps: bool,
    ) -> None:
        self.load = load
        self.settings = settings
        self.machine = machine
        self.engine = CapacityEngine(settings, machine)
        self.clock = self.engine.clock
        self.leaps = leaps
        self.rows: list[RequestRow] = []
        self.phase: Phase = "warmup"
        self.window_start = 0.0
        self._random = random.Random(load.seed)
        self._supply = endless(sessions, self._random)
        #: (time, order, lane): requests that will be sent
        self._due: list[tuple[float, int, _Lane]] = []
        self._order = itertools.count()
        self._sent: dict[str, _Sent] = {}
        self._warming = load.concurrency
        self._held: list[_Lane] = []
        longest = max(turn.input_tokens for one in sessions for turn in one.turns)
        self._tokens = array("q", bytes(8 * longest))

    def run(self) -> CapacityRow:
        """Serve until the window is over."""
        load = self.load
        for _ in range(load.concurrency):
            salt, session = next(self._supply)
            share = self._random.uniform(load.start_least, load.start_most)
            self._plan(_Lane(session, salt, first_turn(session, share)), 0.0)
        if not load.warmup_requests_per_lane:
            self._start_window()
        while self._due or self._sent:
            self._advance()
        window = (self.window_start, max(self.clock.now, self.window_start + 1e-9))
        summary = summarise(self.rows, window)
        return row_of(load, self.settings, self.machine, self.engine, summary, window[1])

    # -- time
    @property
    def _end(self) -> float:
        """When no request is sent any more."""
        if self.phase == "warmup":
            return math.inf
        return self.window_start + self.load.duration_seconds

    def _advance(self) -> None:
        """One step of the engine, and what follows from it."""
        clock, engine = self.clock, self.engine
        while self._due and self._due[0][0] <= clock.now:
            _, _, lane = heapq.heappop(self._due)
            self._send(lane)
        next_due = self._due[0][0] if self._due else math.inf
        if not engine.has_unfinished_requests():
            if math.isfinite(next_due):
                clock.wait_until(next_due)
            return
        before = engine.counters.steps
        self._take(engine.step())
        if engine.counters.steps == before and self._sent:
            self._wait(next_due)
        elif self.leaps:
            next_due = self._due[0][0] if self._due else math.inf
            engine.leap(next_due)

    def _wait(self, next_due: float) -> None:
        """Nothing could be launched: the host waits for a copy, or for a request."""
        clock, offload = self.clock, self.engine.offload
        next_end = None if offload is None else offload.next_end
        times = [time for time in (next_due, next_end) if time is not None and math.isfinite(time)]
        ahead = [time for time in times if time > clock.now]
        if ahead:
            clock.wait_until(min(ahead))
        elif not self.engine.scheduler.num_running and not times:
            waiting = len(self.engine.scheduler.waiting)
            raise CapacityFault(f"{waiting} requests wait, none runs, and no copy is under way")

    # -- lanes
    def _plan(self, lane: _Lane, time: float) -> None:
        heapq.heappush(self._due, (time, next(self._order), lane))

    def _start_window(self) -> None:
        self.phase = "profiling"
        self.window_start = self.clock.now
        for lane in self._held:
            self._next_turn(lane)
        self._held.clear()

    def _next_turn(self, lane: _Lane) -> None:
        """Plan the request behind the one that has just ended."""
        lane.turn += 1
        pause = 0.0
        if lane.turn == len(lane.session.turns):
            lane.salt, lane.session = next(self._supply)
            lane.turn, lane.chained, lane.chain = 0, (), []
        else:
            think = lane.session.turns[lane.turn].think_seconds
            pause = min(think, self.load.think_cap_seconds)
        self._plan(lane, self.clock.now + pause)

    def _send(self, lane: _Lane) -> None:
        if self.clock.now >= self._end:
            return
        turn = lane.session.turns[lane.turn]
        params = SamplingParams(max_tokens=turn.output_tokens, temperature=0.0, ignore_eos=True)
        try:
            name = self.engine.add_request(
                self._tokens[: turn.input_tokens], params, block_hashes=self._hashes(lane, turn)
            )
        except RequestRefused as error:
            raise RequestRefused(f"{lane.name}, request {lane.turn + 1}: {error}") from None
        self._sent[name] = _Sent(lane, self.phase, self.clock.now, turn.input_tokens)
        lane.sent += 1

    def _hashes(self, lane: _Lane, turn: Turn) -> list[bytes]:
        """Hashes of the engine's full blocks, which tell prompts apart as the trace's do."""
        size, unit = self.settings.block_size, turn.block_tokens
        if size % unit and unit % size:
            raise BadInput(
                f"block_size {size}: expected a divisor or a multiple of the sessions' {unit}"
            )
        ids = turn.block_hashes
        kept = shared_blocks(lane.chained, ids)
        # every token of an engine block belongs to the trace blocks that it covers
        kept_blocks = min(kept * unit // size, len(lane.chain))
        chain = lane.chain[:kept_blocks]
        for number in range(kept_blocks, turn.input_tokens // size):
            first, last = number * size // unit, ((number + 1) * size - 1) // unit
            parts = ids[first : last + 1]
            parent = chain[-1] if chain else lane.salt.encode()
            place = number * size % unit
            chain.append(hash_of(parent, *parts, place).to_bytes(8, "big"))
        lane.chain, lane.chained = chain, ids
        return chain

    def _take(self, outputs: Sequence[RequestOutput]) -> None:
        """Take in what a step gave."""
        for output in outputs:
            sent = self._sent[output.request_id]
            if output.new_token_ids and sent.first_token is None:
                sent.first_token = self.clock.now
                sent.cached = output.num_cached_tokens
            sent.generated = output.num_output_tokens
            if output.finished:
                del self._sent[output.request_id]
                self._finished(sent)

    def _finished(self, sent: _Sent) -> None:
        lane, load = sent.lane, self.load
        self.rows.append(
            RequestRow(
                session=lane.name,
                turn=lane.turn,
                phase=sent.phase,
                outcome="ok",
                error="",
                prompt_tokens=sent.prompt_tokens,
                cached_tokens=sent.cached,
                output_tokens=sent.generated,
                started=sent.started,
                first_token=sent.first_token,
                ended=self.clock.now,
            )
        )
        if self.phase == "warmup" and lane.sent == load.warmup_requests_per_lane:
            self._warming -= 1
            if self._warming:
                self._held.append(lane)
            else:
                # it need not wait, so it goes on before those that do, as in the load client
                self._held.insert(0, lane)
                self._start_window()
            return
        self._next_turn(lane)
