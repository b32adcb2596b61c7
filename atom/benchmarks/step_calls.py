"""What one decode step asks of the device and the host, by copy protocol and guard: counts.

Method. A small engine decodes a full batch on the virtual device, with nothing else on it. After a
few steps every pinned slot and event exists; from then on all calls are counted for a number of
steps. Counts are of the code, and the same on any device: they are no times. A wait is a call that
returns only when the device has done something, or a question that was answered with yes.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from atom.config import CopyProtocol, GuardMode
from atom.device.operations import Operation, OperationKind
from atom.device.virtual import VirtualDevice
from atom.model_engine.engine_builder import build_engine, load_model
from atom.model_engine.engine_settings import EngineSettings
from atom.model_engine.sequence import SamplingParams
from atom.models.weights import LoadedModel
from atom.transfer.copy_protocol import UnpatchedWarning

_WARM_UP = 4
_PROMPT_TOKENS = 6
_DRAFTS = 3

#: protocol, guard, tags: protocols with all nets, then hold with a net changed
ARMS = (
    *((protocol, GuardMode.REPORT, True) for protocol in CopyProtocol),
    (CopyProtocol.HOLD, GuardMode.NONE, True),
    (CopyProtocol.HOLD, GuardMode.TRAP, True),
    (CopyProtocol.HOLD, GuardMode.REPORT, False),
)


class StepCalls(BaseModel):
    """Calls of one arm, summed over its counted decode steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    protocol: CopyProtocol
    guard: GuardMode
    epoch_tag: bool
    steps: int = Field(ge=1)
    events_created: int = Field(ge=0)
    events_recorded: int = Field(ge=0)
    host_waits: int = Field(ge=0)
    stream_waits: int = Field(ge=0)
    """Times that one stream was told to wait for an event of another."""
    streams_told: int = Field(ge=0)
    """Calls of ``record_stream``."""
    kernels: int = Field(ge=0)
    copies: int = Field(ge=0)
    """Copies in either direction, and on the device."""
    blocks: int = Field(ge=0)
    """Blocks taken from the allocator."""

    def a_step(self, name: str) -> float:
        """Calls of that kind a step."""
        return float(getattr(self, name)) / self.steps


class _Counter:
    """A device observer that counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def owned(self, block: Any) -> None:
        # pinned buffers are told of as well
        self.counts["blocks"] += type(block).__name__ == "Block"

    def died(self, block: Any) -> None:
        pass

    def stream_recorded(self, block: Any, stream_id: int) -> None:
        self.counts["streams_told"] += 1

    def queued(self, operation: Operation, stream_id: int) -> None:
        if operation.kind is OperationKind.KERNEL:
            self.counts["kernels"] += 1
        elif operation.kind in (OperationKind.ENGINE_COPY, OperationKind.KERNEL_COPY):
            self.counts["copies"] += 1

    def event_recorded(self, event: object, stream_id: int) -> None:
        self.counts["events_recorded"] += 1

    def event_waited_by(self, event: object, stream_id: int) -> None:
        self.counts["stream_waits"] += 1

    def event_observed(self, event: object) -> None:
        self.counts["host_waits"] += 1

    def stream_waited(self, stream_id: int) -> None:
        self.counts["host_waits"] += 1

    def device_waited(self) -> None:
        self.counts["host_waits"] += 1


class _EventCounter(VirtualDevice):
    """A virtual device that counts the events made on it."""

    events_created = 0

    def new_event(self, timing: bool = False) -> Any:
        """See :class:`VirtualDevice`."""
        self.events_created += 1
        return super().new_event(timing)


def count_calls(
    profile: str = "MI355X", *, batch: int = 4, steps: int = 8, seed: int = 42
) -> Iterator[StepCalls]:
    """Count every arm's calls over ``steps`` decode steps of ``batch`` requests."""
    loaded = load_model(
        "preset:tiny", VirtualDevice(profile), seed=seed, max_positions=_longest(steps)
    )
    for protocol, guard, epoch_tag in ARMS:
        yield count_arm(loaded, protocol, guard, epoch_tag, profile, batch, steps, seed)


def _longest(steps: int) -> int:
    # every step may accept all drafts
    return _PROMPT_TOKENS + (1 + _DRAFTS) * (_WARM_UP + steps + 4)


def count_arm(
    loaded: LoadedModel,
    protocol: CopyProtocol,
    guard: GuardMode,
    epoch_tag: bool,
    profile: str,
    batch: int,
    steps: int,
    seed: int,
) -> StepCalls:
    """Count one arm's calls; see the module's text."""
    device = _EventCounter(profile)
    longest = _longest(steps)
    settings = EngineSettings(
        copy_protocol=protocol,
        guard=guard,
        epoch_tag=epoch_tag,
        draft_tokens=_DRAFTS,
        max_num_seqs=batch,
        max_num_batched_tokens=max(64, batch * _PROMPT_TOKENS),
        max_model_len=longest,
        num_kv_blocks=batch * (-(-longest // 16) + 1),
        prefix_caching=False,
        seed=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnpatchedWarning)
        engine = build_engine(loaded.model, loaded.mtp, settings, device)
    generator = random.Random(seed)
    vocabulary = engine.vocab_size or 2
    params = SamplingParams(max_tokens=longest - _PROMPT_TOKENS, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        prompt = [generator.randrange(vocabulary) for _ in range(_PROMPT_TOKENS)]
        engine.add_request(prompt, params, request_id=str(number))
    while engine.counters.decode_steps < _WARM_UP:
        engine.step()
    counter = _Counter()
    device.observe(counter)
    first, created = engine.counters.decode_steps, device.events_created
    for _ in range(steps):
        engine.step()
    device.observe(None)
    counted = engine.counters.decode_steps - first
    made = device.events_created - created
    engine.close()
    return StepCalls(
        protocol=protocol,
        guard=guard,
        epoch_tag=epoch_tag,
        steps=counted,
        events_created=made,
        **_all(counter.counts),
    )


def _all(counts: Counter[str]) -> dict[str, int]:
    names = (
        "events_recorded",
        "host_waits",
        "stream_waits",
        "streams_told",
        "kernels",
        "copies",
        "blocks",
    )
    return {name: counts[name] for name in names}
