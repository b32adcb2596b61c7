"""The whole engine under many orders of its device work: what is safe under all, and what is not.

Nothing here is a matter of time: the virtual device runs a part when the schedule says so, at each
call of the host and while the host waits. Its own rules (stream order, events) are always kept.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
from engines import make_engine, random_prompts

from atom.config import CopyProtocol, GuardMode
from atom.device.operations import Part
from atom.device.virtual import VirtualDevice
from atom.model_engine.engine_settings import StatusCheck
from atom.model_engine.llm_engine import LLMEngine
from atom.model_engine.sequence import SamplingParams
from atom.transfer.copy_protocol import UnpatchedWarning

SAFE = [protocol for protocol in CopyProtocol if protocol is not CopyProtocol.UNPATCHED]
#: the long prompt comes late: its middle chunks fall between decode steps
SHORT, LONG = random_prompts(3, (5, 9, 17), seed=4), random_prompts(1, (90,), seed=5)[0]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "prefix_caching": False,
    "logprobs": True,
}


@dataclass(frozen=True)
class Style:
    """How a schedule chooses.

    Attributes:
        copies: probability that a part of the copy stream runs when it is drawn; at 0 such a part
            runs only when the host waits and nothing else can.
        late_copies: the same from the arrival of the long prompt on; ``None`` changes nothing.
        most: draws at a call of the host, at most; ``None`` runs all of the default stream.
        may_catch: whether copies are so late that tags must catch some.
    """

    copies: float
    late_copies: float | None = None
    most: int | None = 6
    may_catch: bool = True

    @property
    def seeds(self) -> range:
        """Seeds that are worth a run: one where nothing is drawn."""
        return range(1 if self.copies == 0 and not self.most else 2)


#: the device far ahead of the host, far behind it, and in between
STYLES = {
    "copies last, device ahead": Style(0.0, most=None),
    "copies last, device behind": Style(0.0, most=0),
    "copies last from the long prompt on": Style(1.0, 0.0, most=None),
    "copies rare": Style(0.01),
    "copies like the rest": Style(1.0, may_catch=False),
    "lazy": Style(1.0, most=1),
}


class Schedule:
    """Runs parts of a device's work as a style says.

    Args:
        device: in schedule mode.
        copy_stream: identity of the engine's copy stream.
        seed: of the choices.
        style: how to choose.
    """

    def __init__(self, device: VirtualDevice, copy_stream: int, seed: int, style: Style) -> None:
        self._device = device
        self._copy_stream = copy_stream
        self._random = random.Random(seed)
        self._style = style
        self.copies = style.copies

    def choose(self, ready: list[Part]) -> Part:
        """While the host waits: something must run."""
        others = [part for part in ready if part.stream_id != self._copy_stream]
        late = self._random.random() >= self.copies
        return self._random.choice(others if late and others else ready)

    def on_host_call(self) -> None:
        """At a call of the host: some parts may run."""
        most = self._style.most
        draws = 10**6 if most is None else self._random.randint(0, most)
        for _ in range(draws):
            ready = self._device.ready()
            if most is None and self.copies == 0:
                ready = [part for part in ready if part.stream_id != self._copy_stream]
            if not ready:
                return
            part = self._random.choice(ready)
            if part.stream_id != self._copy_stream or self._random.random() < self.copies:
                self._device.step(part)


@dataclass
class Ran:
    """What an engine gave under a schedule: tokens, and errors by request."""

    tokens: dict[str, list[int]]
    errors: dict[str, str]
    engine: LLMEngine

    def silently_changed(self, expected: dict[str, list[int]]) -> list[str]:
        """Requests that ended well with other tokens."""
        return [
            name
            for name, tokens in expected.items()
            if name not in self.errors and self.tokens.get(name, []) != tokens
        ]


def run(style: str | None, seed: int, **settings: Any) -> Ran:
    """Run the requests under a schedule; ``None`` runs by the device's clock."""
    chosen = None if style is None else STYLES[style]
    schedule: list[Schedule] = []
    device = (
        VirtualDevice("MI355X")
        if chosen is None
        else VirtualDevice(
            "MI355X", mode="schedule", chooser=lambda ready: schedule[0].choose(ready)
        )
    )
    # the engine's copy stream is the first that is made
    expected_stream = device.default_stream.stream_id + 1
    if chosen is not None:
        schedule.append(Schedule(device, expected_stream, seed, chosen))
    engine = make_engine(device, **{**SETTINGS, **settings})
    copy_stream = engine.runner.processor.async_copy_stream  # type: ignore[attr-defined]
    assert copy_stream.stream_id == expected_stream
    if schedule:
        device.on_host_call = schedule[0].on_host_call
    ran = Ran({}, {}, engine)
    for number, prompt in enumerate(SHORT):
        engine.add_request(prompt, PARAMS, request_id=f"short-{number}")
    late = True
    while engine.has_unfinished_requests():
        if late and engine.counters.decode_steps >= 1:
            late = False
            if chosen is not None and chosen.late_copies is not None:
                schedule[0].copies = chosen.late_copies
            engine.add_request(LONG, PARAMS, request_id="long")
        for output in engine.step():
            ran.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.error is not None:
                ran.errors[output.request_id] = output.error
    assert engine.counters.middle_chunks >= 2
    return ran


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Greedy tokens without drafts, by the clock."""
    ran = run(None, 0, draft_tokens=0)
    assert sorted(ran.tokens) == ["long", "short-0", "short-1", "short-2"]
    return ran.tokens


@pytest.mark.parametrize("protocol", SAFE)
@pytest.mark.parametrize("style", STYLES)
def test_a_safe_protocol_gives_the_same_tokens_under_every_schedule(
    protocol: CopyProtocol, style: str, expected: dict[str, list[int]]
) -> None:
    # no net below it: a stale value could only show itself as another token
    nets = {"epoch_tag": False, "guard": GuardMode.NONE, "status_check": StatusCheck.NONE}
    for seed in STYLES[style].seeds:
        ran = run(style, seed, copy_protocol=protocol, **nets)
        assert ran.errors == {}
        assert ran.tokens == expected
        assert ran.engine.runner.processor.live_sources() == 0  # type: ignore[attr-defined]
        ran.engine.close()


def unpatched(style: str, seed: int, **settings: Any) -> Ran:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnpatchedWarning)
        return run(style, seed, copy_protocol=CopyProtocol.UNPATCHED, **settings)


@pytest.mark.parametrize("style", ["copies last, device ahead", "copies last, device behind"])
def test_unpatched_without_nets_changes_tokens_silently(
    style: str, expected: dict[str, list[int]]
) -> None:
    """The control of the test above: the same engine, requests and schedules."""
    ran = unpatched(style, 0, epoch_tag=False, status_check=StatusCheck.NONE)
    assert ran.silently_changed(expected)
    # what the host took for counts are the next prefill's context lengths and chunks
    assert ran.engine.counters.impossible_statuses > 0
    # a record that came with such bytes blames no request for a row that no batch has
    assert not [error for error in ran.errors.values() if "batch row -" in error]


@pytest.mark.parametrize("style", STYLES)
def test_with_tags_unpatched_never_changes_a_token_silently(
    style: str, expected: dict[str, list[int]]
) -> None:
    caught = 0
    for seed in STYLES[style].seeds:
        ran = unpatched(style, seed)
        assert ran.silently_changed(expected) == []
        caught += ran.engine.counters.stale_payloads
    # where copies are late the tags had something to catch
    assert caught or not STYLES[style].may_catch


@pytest.mark.parametrize(
    ("style", "lost"),
    [
        ("copies last, device ahead", "tokens of step 1 were lost"),
        ("copies last from the long prompt on", "the status of step"),
    ],
)
def test_tags_alone_catch_stale_ids_and_stale_statuses(
    style: str, lost: str, expected: dict[str, list[int]]
) -> None:
    alone = {"status_check": StatusCheck.NONE, "guard": GuardMode.NONE}
    ran = unpatched(style, 0, **alone)
    assert ran.silently_changed(expected) == []
    assert any(error.startswith(lost) for error in ran.errors.values()), ran.errors
