"""The fault in a whole engine: a decode step, a prefill chunk, and a store on the copy stream.

Method. An engine decodes a batch of short requests with drafts. A prompt of several token budgets
arrives. Steps alternate then: decode, middle chunk, decode. Ahead of each decode step's launch a
bulk store is queued on the copy stream, so the step's status copy waits behind it, while the next
step (a middle chunk, which drains nothing) allocates its metadata. Arms differ in the copy protocol
and in the nets below it; each runs the same requests. Output tokens are compared with those of
``hold`` with all nets on, and a second ``hold`` arm is the null arm of that comparison.
"""

from __future__ import annotations

import gc
import logging
import random
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch

from atom.benchmarks.engine_fault_arms import (
    EngineFaultSettings,
    FaultArm,
    build_points,
    point_id,
)
from atom.benchmarks.engine_fault_rows import EngineFaultRow
from atom.benchmarks.lifetime_paths import own_queue_stream
from atom.config import DeviceChoice
from atom.device import Device, open_device
from atom.device.interface import DeviceKind, Stream
from atom.errors import DeviceError, StalePayload
from atom.model_engine import debug_checks
from atom.model_engine.engine_builder import build_engine, load_model
from atom.model_engine.engine_settings import EngineSettings
from atom.model_engine.llm_engine import LLMEngine
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.scheduled_batch import BatchKind, ScheduledBatch
from atom.model_engine.sequence import SamplingParams
from atom.model_engine.step_runner import StepStatus
from atom.models.weights import LoadedModel
from atom.transfer.copy_protocol import UnpatchedWarning

EXPERIMENT = "engine_fault"
PARK_SECONDS = 0.01
_DRAFTS = 3
_SHOWN_VALUES = 8
#: an address is another one in each process, and equal settings are to give equal rows
_ADDRESS = re.compile(r" at 0x[0-9a-f]+(: .*)?$")


@dataclass
class Seen:
    """What one arm showed."""

    middle_chunks: int = 0
    statuses: int = 0
    impossible: int = 0
    #: statuses with another step's tag
    refused: int = 0
    largest_bonus: int = -1
    budget_statuses: int = 0
    status_lines: int = 0
    out_of_bounds_lines: int = 0
    first_line: str | None = None
    guard_value: int | None = None
    stale_payloads: int = 0
    guard_errors: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    crash: str | None = None
    exit_code: int | None = None
    draft_tokens: int = 0
    #: num_bonus of each status that was received, in order; None where the tag refused it
    bonuses: list[list[int] | None] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "done": sorted(self.done)}

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """The inverse of :meth:`plain`."""
        return cls(**{**values, "done": set(values["done"])})


class _DebugLines(logging.Handler):
    """Counts the debug checks' lines."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(debug_checks.STATUS_MARK):
            self._seen.status_lines += 1
        elif text.startswith(debug_checks.OUT_OF_BOUNDS_MARK):
            self._seen.out_of_bounds_lines += 1
            self._seen.first_line = self._seen.first_line or text


class LoadedRunner(ModelRunner):
    """A runner whose decode steps find a bulk store ahead of them on the copy stream."""

    store_bytes = 0
    seen: Seen
    budget = 0

    def launch(self, batch: ScheduledBatch, forced_bonus: Sequence[int] | None) -> None:
        """Queue the store, then the step."""
        if batch.kind is BatchKind.DECODE and self.store_bytes:
            self.device.traffic(self.store_bytes, "d2h", stream=self.processor.async_copy_stream)
        if not batch.produces_output:
            self.seen.middle_chunks += 1
        super().launch(batch, forced_bonus)

    def receive_status(self) -> StepStatus:
        """Look at the status that the engine gets."""
        self.seen.statuses += 1
        self.seen.bonuses.append(None)
        try:
            status = super().receive_status()
        except StalePayload:
            self.seen.refused += 1
            raise
        drafts = self.settings.draft_tokens
        bonus = list(status.num_bonus)
        self.seen.bonuses[-1] = bonus
        self.seen.largest_bonus = max([self.seen.largest_bonus, *bonus])
        self.seen.budget_statuses += self.budget in bonus
        bad = [
            not 0 <= accepted <= drafts or lost not in (drafts - accepted, 0)
            for accepted, lost in zip(bonus, status.num_rejected, strict=True)
        ]
        self.seen.impossible += any(bad)
        return status


def engine_settings(
    settings: EngineFaultSettings, arm: FaultArm, token_budget: int
) -> EngineSettings:
    """The engine of an arm."""
    longest = settings.chunks * token_budget + 64
    return EngineSettings(
        copy_protocol=arm.protocol,
        epoch_tag=arm.epoch_tag,
        status_check=arm.status_check,
        guard=arm.guard,
        draft_tokens=_DRAFTS if arm.drafts else 0,
        max_num_seqs=settings.requests + 1,
        max_num_batched_tokens=token_budget,
        max_model_len=longest + settings.prompt_tokens + settings.output_tokens,
        block_size=64 if token_budget >= 4096 else 16,
        num_kv_blocks=_blocks(settings, token_budget),
        prefix_caching=False,
        seed=settings.seed,
    )


def _blocks(settings: EngineFaultSettings, token_budget: int) -> int:
    size = 64 if token_budget >= 4096 else 16
    short = -(-(settings.prompt_tokens + settings.output_tokens + 16) // size)
    long = -(-(settings.chunks * token_budget + 96) // size)
    return settings.requests * short + long + 8


def run_arm(
    device: Device,
    loaded: LoadedModel,
    settings: EngineFaultSettings,
    arm: FaultArm,
    token_budget: int,
    stream: Stream,
    tell: Callable[[Seen], None] = lambda _: None,
) -> Seen:
    """Run one arm to its end, or to the engine's, with ``stream`` as its copy stream.

    ``tell`` is called behind each step, with what was seen so far.
    """
    seen = Seen()
    # every arm finds the allocator as the first one did
    gc.collect()
    device.synchronize()
    device.empty_cache()
    handler = _DebugLines(seen)
    logger = logging.getLogger(debug_checks.__name__)
    logger.addHandler(handler)
    engine = None
    threads = torch.get_num_threads()
    if device.properties.kind is DeviceKind.VIRTUAL:
        # matrices of a tiny model: more threads would wait for each other
        torch.set_num_threads(1)
    try:
        engine = build_engine(
            loaded.model,
            loaded.mtp,
            engine_settings(settings, arm, token_budget),
            device,
            runner_class=LoadedRunner,
            copy_stream=stream,
        )
        runner = engine.runner
        assert isinstance(runner, LoadedRunner)
        runner.seen, runner.budget = seen, token_budget
        seen.draft_tokens = runner.settings.draft_tokens
        # a first transfer of that size makes its buffers, which may synchronise
        if settings.store_bytes:
            device.traffic(settings.store_bytes, "d2h")
            device.synchronize()
        _serve(engine, runner, settings, arm, token_budget, seen, tell)
    except Exception as error:
        seen.crash = f"{type(error).__name__}: {error}"
    finally:
        torch.set_num_threads(threads)
        logger.removeHandler(handler)
        if engine is not None:
            _close(engine)
    return seen


def _close(engine: LLMEngine) -> None:
    try:
        engine.close()
    except Exception:
        # a dead device fails here again; the arm's row says of what it died
        logging.getLogger(__name__).debug("an engine did not close", exc_info=True)


def _serve(
    engine: LLMEngine,
    runner: LoadedRunner,
    settings: EngineFaultSettings,
    arm: FaultArm,
    token_budget: int,
    seen: Seen,
    tell: Callable[[Seen], None],
) -> None:
    generator = random.Random(settings.seed)
    vocabulary = engine.vocab_size or 2

    def prompt(length: int) -> list[int]:
        return [generator.randrange(vocabulary) for _ in range(length)]

    params = SamplingParams(max_tokens=settings.output_tokens, temperature=0.0, ignore_eos=True)
    for number in range(settings.requests):
        engine.add_request(prompt(settings.prompt_tokens), params, request_id=f"short-{number}")
    # all of them decode before the long prompt comes
    while engine.counters.decode_steps < 2:
        _take(engine, seen)
    runner.store_bytes = settings.store_bytes if arm.store else 0
    # a prompt that fits into the budget is one chunk, and its step drains the status
    length = settings.chunks * token_budget + 1 if arm.middle_chunks else token_budget // 2
    engine.add_request(prompt(length), params, request_id="long")
    while engine.has_unfinished_requests():
        _take(engine, seen)
        tell(seen)
        if runner.store_bytes and seen.middle_chunks >= settings.chunks:
            runner.store_bytes = 0


def _take(engine: LLMEngine, seen: Seen) -> None:
    for output in engine.step():
        seen.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        if output.error is not None:
            seen.failed[output.request_id] = output.error
        elif output.finished:
            seen.done.add(output.request_id)
    seen.stale_payloads = engine.counters.stale_payloads
    if seen.guard_value is None and engine.last_guard_fault is not None:
        seen.guard_value = engine.last_guard_fault.value
    seen.guard_errors = engine.counters.guard_errors


def row_of(
    settings: EngineFaultSettings, arm: FaultArm, budget: int, seen: Seen, reference: Seen
) -> EngineFaultRow:
    """What an arm showed, beside the reference."""
    both = seen.done & reference.done
    if not arm.middle_chunks:
        # its long prompt is another one
        both = both - {"long"}
    error = seen.crash or next(iter(seen.failed.values()), None)
    wrong, right = first_wrong_status(seen, reference)
    differing = [value for value, own in zip(wrong, right, strict=True) if value != own]
    legal = [value for value in differing if 0 <= value <= reference.draft_tokens]
    changed = [name for name in both if seen.tokens[name] != reference.tokens[name]]
    return EngineFaultRow(
        point_id=point_id(arm, budget),
        arm=arm.name,
        protocol=arm.protocol,
        guard=arm.guard,
        status_check=arm.status_check,
        epoch_tag=arm.epoch_tag,
        token_budget=budget,
        requests=settings.requests,
        draft_tokens=_DRAFTS if arm.drafts else 0,
        store_bytes=settings.store_bytes if arm.store else 0,
        middle_chunks=seen.middle_chunks,
        statuses=seen.statuses,
        stale_statuses=seen.impossible + seen.refused,
        largest_bonus=seen.largest_bonus,
        budget_statuses=seen.budget_statuses,
        status_lines=seen.status_lines,
        out_of_bounds_lines=seen.out_of_bounds_lines,
        first_out_of_bounds_line=seen.first_line,
        stale_payloads=seen.stale_payloads,
        guard_errors=seen.guard_errors,
        guard_value=seen.guard_value,
        failed_requests=len(seen.failed),
        changed_requests=len(changed),
        compared_requests=len(both),
        first_wrong_status=_head(wrong) if differing else None,
        first_wrong_rows=len(differing) if differing else None,
        first_wrong_rows_in_range=len(legal) if differing else None,
        crashed=seen.crash is not None,
        exit_code=seen.exit_code,
        error=None if error is None else _ADDRESS.sub("", error.splitlines()[0]),
    )


def first_wrong_status(seen: Seen, reference: Seen) -> tuple[list[int], list[int]]:
    """The first status that differs from the reference's, and the reference's own.

    Up to it both engines did the same. Where the batches differ before the bytes do, or nothing
    does, both lists are empty.
    """
    for found, own in zip(seen.bonuses, reference.bonuses, strict=False):
        if found is None or own is None or len(found) != len(own):
            break
        if found != own:
            return found, own
    return [], []


def _head(values: Sequence[int]) -> str:
    shown = [str(value) for value in values[:_SHOWN_VALUES]]
    return f"[{', '.join(shown + ['...'] * (len(values) > _SHOWN_VALUES))}]"


#: runs an arm elsewhere: settings, arm, token budget
ChildRun = Callable[[EngineFaultSettings, FaultArm, int], Seen]


def measure_engine_fault(
    device: Device,
    loaded: LoadedModel,
    settings: EngineFaultSettings,
    in_child: ChildRun | None = None,
    done: Collection[str] = (),
) -> Iterator[EngineFaultRow]:
    """Run every arm at every token budget and yield its row.

    Args:
        device: where.
        loaded: the model.
        settings: of the experiment.
        in_child: runs the arms that may end their process, so that no other row is lost with it.
            After an arm that killed this process's device, it runs all others too.
        done: identities of points to leave out; a reference runs all the same where an arm of its
            budget is left.

    Raises:
        BadInput: an unknown arm.
        DeviceError: the reference itself failed; nothing can be compared.
    """
    points = build_points(settings)
    open_budgets = {budget for budget, arm in points if point_id(arm, budget) not in done}
    # a stream that shares the default stream's hardware queue would hide the fault
    stream = own_queue_stream(device, PARK_SECONDS)
    broken = False
    references: dict[int, Seen] = {}
    # each arm collects cycles: over all that was loaded before, that takes longer than the arm
    gc.collect()
    gc.freeze()
    try:
        for budget, arm in points:
            known = point_id(arm, budget) in done
            if known and (budget in references or budget not in open_budgets):
                continue
            if in_child is not None and (broken or arm.may_end_process):
                seen = in_child(settings, arm, budget)
            else:
                seen = run_arm(device, loaded, settings, arm, budget, stream)
                broken = seen.crash is not None
            reference = references.setdefault(budget, seen)
            if reference.crash is not None:
                raise DeviceError(f"the reference arm failed: {reference.crash}")
            if not known:
                yield row_of(settings, arm, budget, seen, reference)
    finally:
        gc.unfreeze()


def load_fault_model(settings: EngineFaultSettings, device: Device) -> LoadedModel:
    """The model of the settings, with room for the longest prompt."""
    longest = settings.chunks * max(settings.token_budgets + settings.law_budgets) + 64
    return load_model(
        settings.model,
        device,
        seed=settings.seed,
        max_positions=longest + settings.prompt_tokens + settings.output_tokens + 64,
    )


def run_engine_fault(settings: EngineFaultSettings) -> list[EngineFaultRow]:
    """The whole experiment on the device of the settings.

    Raises:
        BadInput, DeviceError: see :func:`measure_engine_fault`; no accelerator.
    """
    from atom.benchmarks.engine_fault_child import run_in_child

    device = open_device(settings.device, profile=settings.device_profile, seed=settings.seed)
    child = run_in_child if settings.device is DeviceChoice.ACCELERATOR else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnpatchedWarning)
        loaded = load_fault_model(settings, device)
        return list(measure_engine_fault(device, loaded, settings, child))
