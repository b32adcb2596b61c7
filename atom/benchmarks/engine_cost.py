"""The engine's decode loop of the protocol-cost experiment.

The arms of a protocol share one engine: weights, pools, buffers and graphs are the same memory, and
only what sends to the host is another object. So two arms differ by the protocol alone. A guard is
compiled into the kernels, so each guard has an engine of its own; they are built from the same
weights and compared with an unguarded one that runs twice.

``host check`` is the guard of an engine without any: before each step the host reads the last
step's counts back, waits for them, and looks at them.
"""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from atom.benchmarks.engine_arms import EngineArm, Prompts, RequestFailed
from atom.benchmarks.engine_clock import TimedRunner
from atom.benchmarks.engine_speed_rows import Clock
from atom.benchmarks.protocol_cost_rows import (
    ENGINE_ARMS,
    GUARD_ARMS,
    GUARDS,
    PROTOCOLS,
    CostArm,
    CostRow,
    Loop,
    Pressure,
)
from atom.benchmarks.protocol_cost_settings import (
    CostPoint,
    ProtocolSweepSettings,
    engine_settings,
)
from atom.benchmarks.transfer_loop import CopyStreamWork, memory_columns, microseconds
from atom.config import CopyProtocol, GuardMode
from atom.device import DeviceKind
from atom.device.interface import AllocatorSample, Device
from atom.device.plain_copy import counted_events
from atom.errors import DeviceError
from atom.model_engine.engine_builder import load_model
from atom.model_engine.output_transfer import TokenIDProcessor
from atom.model_engine.request_output import RequestOutput
from atom.model_engine.scheduled_batch import BatchKind, ScheduledBatch
from atom.models.presets import EMBEDDING_SCALES, preset, random_checkpoint
from atom.models.weights import LoadedModel
from atom.transfer.copy_protocol import UnpatchedWarning


class CostRunner(TimedRunner):
    """A :class:`TimedRunner` that times sends and receives, and can check counts on the host.

    Attributes:
        sends, receives: host seconds of each step's sends and receives, waits not counted.
        host_check: whether the host reads the counts back before each decode step.
        work: what else the copy stream has to do; ``None`` is nothing.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.sends: list[float] = [0.0]
        self.receives: list[float] = [0.0]
        self.host_check = False
        self.work: CopyStreamWork | None = None
        self._step = 0
        self._decoded = False
        self._counts = self.device.pinned(self.buffers.num_bonus.shape, torch.int32)
        self._count_event = self.device.new_event()

    def use(self, processor: TokenIDProcessor) -> None:
        """Send with ``processor`` from now on. Nothing is under way.

        Raises:
            DeviceError: something is.
        """
        if self.processor.copies_in_flight:
            raise DeviceError("a transfer is under way: the engine must be empty between arms")
        self.processor = processor
        self._decoded = False

    def timed(self, processor: TokenIDProcessor) -> TokenIDProcessor:
        """``processor`` with clocks around its sends and receives."""
        status, drafts, now = processor.spec_status, processor.draft_ids, self.device.host_seconds

        def clocked(call: Callable[..., Any], sums: str) -> Callable[..., Any]:
            def timed_call(*arguments: Any) -> Any:
                began = now()
                try:
                    return call(*arguments)
                finally:
                    getattr(self, sums)[-1] += now() - began

            return timed_call

        for owner, name, sums in (
            (status, "send", "sends"),
            (drafts, "send", "sends"),
            (processor, "send_to_cpu_async", "sends"),
            (status, "receive", "receives"),
            (drafts, "receive", "receives"),
            (processor, "recv_async_output", "receives"),
        ):
            setattr(owner, name, clocked(getattr(owner, name), sums))
        return processor

    def launch(self, batch: ScheduledBatch, forced_bonus: Sequence[int] | None) -> None:
        """See :class:`TimedRunner`."""
        if batch.kind is BatchKind.DECODE:
            if self.work is not None:
                self.work.queue(self.device, self.processor.async_copy_stream, self._step)
            self._step += 1
            # before the first decode step nothing has written the counts
            if self.host_check and self._decoded:
                self._check_counts(len(batch.rows))
            self._decoded = True
        super().launch(batch, forced_bonus)

    def _check_counts(self, rows: int) -> None:
        """Read the last step's counts back and look at them: the guard that costs a sync."""
        self.device.copy(self._counts, self.buffers.num_bonus)
        self._count_event.record(self.device.default_stream)
        self._count_event.synchronize()
        found = self._counts[:rows]
        if not bool(((found >= 0) & (found <= self.settings.draft_tokens)).all()):
            raise DeviceError(f"impossible counts on the device: {found.tolist()}")


class CostEngineArm(EngineArm):
    """The engine under one arm; engines are shared, see the module's text.

    Attributes:
        tokens: of each request since :meth:`start`.
    """

    runner: CostRunner

    def __init__(self, loaded: LoadedModel, settings: Any, device: Device, max_tokens: int) -> None:
        super().__init__(loaded, settings, device, max_tokens, runner_class=CostRunner)
        self.tokens: list[list[int]] = []

    def start(self, prompts: Prompts) -> None:
        """See :class:`EngineArm`."""
        self.tokens = [[] for _ in prompts]
        super().start(prompts)

    def _count(self, outputs: Sequence[RequestOutput]) -> int:
        for output in outputs:
            row = self._row.get(output.request_id)
            if row is not None:
                self.tokens[row] += output.new_token_ids
        return super()._count(outputs)


class EngineCostBench(AbstractContextManager["EngineCostBench"]):
    """Weights, and the engines of the batch at hand.

    Args:
        settings: of the experiment.
        device: where.
    """

    def __init__(self, settings: ProtocolSweepSettings, device: Device) -> None:
        self.settings = settings
        self.device = device
        virtual = device.properties.kind is DeviceKind.VIRTUAL
        self.clock = Clock.SIMULATION if virtual else Clock.ACCELERATOR
        config = preset(settings.preset)
        longest = engine_settings(settings, 1).max_model_len
        with tempfile.TemporaryDirectory() as folder:
            scale = EMBEDDING_SCALES[settings.preset]
            random_checkpoint(Path(folder), config, settings.seed, embedding_scale=scale)
            self.loaded = load_model(folder, device, max_positions=longest + 64)
        self._batch = 0
        self._engines: dict[GuardMode, CostEngineArm] = {}
        self._processors: dict[CostArm, TokenIDProcessor] = {}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_engines()

    def _close_engines(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        self._processors.clear()
        gc.collect()
        if self.clock is Clock.ACCELERATOR:
            self.device.empty_cache()

    def _engine(self, guard: GuardMode) -> CostEngineArm:
        found = self._engines.get(guard)
        if found is None:
            settings = engine_settings(self.settings, self._batch, guard=guard)
            most = settings.max_model_len - self.settings.prompt_tokens
            found = CostEngineArm(self.loaded, settings, self.device, most)
            self._engines[guard] = found
        return found

    def ready(self, arm: CostArm) -> CostEngineArm:
        """The engine of an arm, which sends as the arm does."""
        engine = self._engine(GUARDS.get(arm, GuardMode.REPORT))
        runner = engine.runner
        processor = self._processors.get(arm)
        if processor is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnpatchedWarning)
                processor = TokenIDProcessor(
                    self.device,
                    PROTOCOLS.get(arm, CopyProtocol.HOLD),
                    copy_stream=runner.processor.async_copy_stream,
                    epoch_tag=arm is not CostArm.NO_TAG,
                )
            self._processors[arm] = runner.timed(processor)
        runner.use(processor)
        runner.host_check = arm is CostArm.HOST_CHECK
        return engine

    def arms(self, point: CostPoint) -> list[CostArm]:
        """Arms of a point: the guard's only with an idle copy stream."""
        guards = self.settings.guards and point.pressure is Pressure.IDLE
        names = (*ENGINE_ARMS, *(GUARD_ARMS if guards else ()))
        return [arm for arm in names if self.settings.wants(arm)]

    def run(
        self, point: CostPoint, work: CopyStreamWork, number: int, collect: Callable[[], None]
    ) -> Iterator[CostRow]:
        """All rows of a point; ``collect`` is called between windows.

        An unprotected arm whose requests fail, in front of the timed windows or in one, has rows
        that say so in place of times.

        Raises:
            RequestFailed: a request failed under a protocol that protects its copies.
        """
        if point.batch != self._batch:
            self._close_engines()
            self._batch = point.batch
        settings, arms = self.settings, self.arms(point)
        failed: dict[CostArm, str] = {}
        if self.clock is Clock.ACCELERATOR:
            # kernels are compiled and clocks go up in front of the first timed window
            for arm in arms:
                engine = self.ready(arm)
                try:
                    engine.start(self._prompts(settings.engine_repeats))
                    engine.window(2)
                except RequestFailed as error:
                    failed[arm] = lost_requests(arm, error)
                finally:
                    self._leave(engine)
        random = np.random.default_rng([settings.seed, 4, number])
        for repeat in range(settings.engine_repeats):
            order = [arms[index] for index in random.permutation(len(arms))]
            yield from self._repeat(point, work, repeat, order, collect, failed)

    def _prompts(self, repeat: int) -> list[list[int]]:
        random = np.random.default_rng([self.settings.seed, 5, repeat])
        shape = (self._batch, self.settings.prompt_tokens)
        found: list[list[int]] = random.integers(self.loaded.config.vocab_size, size=shape).tolist()
        return found

    def _repeat(
        self,
        point: CostPoint,
        work: CopyStreamWork,
        repeat: int,
        order: Sequence[CostArm],
        collect: Callable[[], None],
        failed: Mapping[CostArm, str],
    ) -> Iterator[CostRow]:
        same: dict[str, Any] = {
            "point_id": point.point_id,
            "clock": self.clock,
            "loop": Loop.ENGINE,
            "batch": point.batch,
            "lead": 1,
            "pressure": point.pressure,
            "repeat": repeat,
        }
        found: list[dict[str, Any]] = []
        tokens: dict[CostArm, list[list[int]]] = {}
        for position, arm in enumerate(order):
            if arm in failed:
                found.append({**same, "arm": arm, "left_out": failed[arm]})
                continue
            collect()
            engine = self.ready(arm)
            base = self.device.allocator_sample()
            try:
                engine.start(self._prompts(repeat))
                engine.runner.work = work
                values = self._measure(engine, repeat, base)
                tokens[arm] = engine.tokens
                found.append({**same, **values, "arm": arm, "position": position})
            except RequestFailed as error:
                found.append({**same, "arm": arm, "left_out": lost_requests(arm, error)})
            finally:
                self._leave(engine)
        for values in found:
            arm = values["arm"]
            if arm in tokens and CostArm.UNPATCHED in tokens:
                values["agreement"] = agreement(tokens[arm], tokens[CostArm.UNPATCHED])
            yield CostRow(**values)

    def _measure(self, engine: CostEngineArm, repeat: int, base: AllocatorSample) -> dict[str, Any]:
        settings, device, runner = self.settings, self.device, engine.runner
        now = device.host_seconds
        for _ in range(settings.engine_warmup_steps):
            engine.step()
        waits = runner.clock.status_wait + runner.clock.output_wait
        runner.sends, runner.receives, times = [], [], []
        last = now()
        for _ in range(settings.steps_of(self._batch)):
            runner.sends.append(0.0)
            runner.receives.append(0.0)
            engine.step()
            ended = now()
            times.append(ended - last)
            last = ended
        waits = runner.clock.status_wait + runner.clock.output_wait - waits
        columns: dict[str, Any] = {
            "steps": len(times),
            # its clock is the wall's, which says nothing of a virtual device
            "wait_us": None if self.clock is Clock.SIMULATION else waits / len(times) * 1e6,
            "stale": 0,
        }
        columns |= microseconds(times, "step")
        columns |= microseconds(runner.sends, "send")
        columns |= microseconds(runner.receives, "receive")
        device.synchronize()
        samples: list[AllocatorSample] = []
        for _ in range(settings.engine_watched_steps):
            engine.step()
            samples.append(device.allocator_sample())
        columns |= memory_columns(samples, base)
        if repeat == 0:
            with counted_events(device) as made:
                for _ in range(settings.counted_steps):
                    engine.step()
            columns |= {"events_created": made[0], "counted_steps": settings.counted_steps}
        return columns

    def _leave(self, engine: CostEngineArm) -> None:
        """Drop the requests; nothing is under way afterwards."""
        engine.runner.work = None
        engine.runner.host_check = False
        engine.stop()
        self.device.synchronize()


def lost_requests(arm: CostArm, error: RequestFailed) -> str:
    """Why an unprotected arm has no times: a late copy fails its requests.

    Raises:
        RequestFailed: ``error``, of an arm that protects its copies.
    """
    if PROTOCOLS.get(arm) is not CopyProtocol.UNPATCHED:
        raise error
    return f"requests failed of stale bytes: {error}".splitlines()[0][:200]


def agreement(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Share of equal tokens, over what both have of each request; 1 if neither has any."""
    pairs = [pair for a, b in zip(found, expected, strict=True) for pair in zip(a, b, strict=False)]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else 1.0
