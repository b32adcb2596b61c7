"""The engine-speed experiment: this engine beside transformers on the same weights and device.

Method. One process writes one checkpoint of random weights, which both load. Prompts are random
and the same for all arms of a repeat; arms run in an order drawn from the seed. A decode arm gets
fresh requests in every repeat: prompts are computed, some steps warm up, then steps are timed one
by one, from return to return. Everything is greedy, and no request ends. The first tokens of all
arms are compared: an arm whose first tokens are others' is not timed but stops the run.

The engine's tokens reach the host one step late; in steady state a step gives the tokens of one
step all the same. transformers' loop reads each step's ids, too. It runs fewer steps, so its
contexts are a little shorter than ours, in its favour. Prefix caching is off: no prompt comes
twice. A prefill's time runs from the prompt's ids on the host to its first token there.

Floor: see :mod:`atom.benchmarks.engine_floor`. Device time by category: one profiled stretch of
steps an arm, outside the timed ones. Memory: an engine of the largest batch with drafts and all
defaults, alone on the device, through a prompt that fills its token budget and some decode steps.

On a virtual device the same code runs; its times are those of a simulation, and labelled so.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from atom.benchmarks.engine_arms import (
    DecodeArm,
    EngineArm,
    TransformersArm,
    Window,
    load_peer,
)
from atom.benchmarks.engine_floor import copy_rate, decode_floor
from atom.benchmarks.engine_profile import device_spans, shares
from atom.benchmarks.engine_speed_rows import (
    Category,
    Clock,
    DeviceTimeRow,
    FloorRow,
    Job,
    MemoryRow,
    SpeedArm,
    SpeedRow,
)
from atom.benchmarks.engine_speed_settings import (
    FORCED_ARMS,
    OUR_DECODE,
    EngineSpeedSettings,
    PointKind,
    SpeedPoint,
    build_points,
    engine_settings,
    recurrent_states,
)
from atom.device import DeviceKind
from atom.device.interface import Device
from atom.errors import DeviceError
from atom.model_engine.engine_builder import load_model
from atom.models.presets import EMBEDDING_SCALES, preset, random_checkpoint
from atom.models.weights import LoadedModel

Tables = dict[str, list[BaseModel]]
#: least share of first tokens that are those of ``ours``; a wrong model has about none
_LEAST_AGREEMENT = 0.5
_PEER_PROFILE_STEPS = 5
_MEMORY_STEPS = 20


class SpeedBench(AbstractContextManager["SpeedBench"]):
    """One checkpoint, loaded by both sides; transformers' only once it is needed.

    Args:
        settings: of the experiment.
        device: where both run.
    """

    def __init__(self, settings: EngineSpeedSettings, device: Device) -> None:
        self.settings = settings
        self.device = device
        self.virtual = device.properties.kind is DeviceKind.VIRTUAL
        self.clock = Clock.SIMULATION if self.virtual else Clock.ACCELERATOR
        config = preset(settings.preset)
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name)
        # drafts of random weights are then sometimes right and sometimes not
        scale = EMBEDDING_SCALES[settings.preset]
        random_checkpoint(path, config, settings.seed, embedding_scale=scale)
        longest = max(settings.prefill_tokens, settings.max_model_len) + settings.most_new_tokens
        self.loaded: LoadedModel = load_model(path, device, max_positions=longest + 64)
        self.config = self.loaded.config
        self.dtype = self.loaded.model.dtype
        self._peer: Any = None

    def peer(self) -> Any:
        """transformers' model, or the reason why there is none."""
        if self._peer is None:
            self._peer = load_peer(self._folder.name, self.device, self.dtype)
        return self._peer

    def prompts(self, count: int, tokens: int, repeat: int) -> list[list[int]]:
        """Random prompts of a repeat."""
        random = np.random.default_rng([self.settings.seed, 1, repeat])
        found: list[list[int]] = random.integers(
            self.config.vocab_size, size=(count, tokens)
        ).tolist()
        return found

    def engine_arm(self, point: SpeedPoint, arm: SpeedArm) -> EngineArm:
        """An arm of ours with its own engine."""
        most = 1 if point.kind is PointKind.PREFILL else self.settings.most_new_tokens
        chosen = engine_settings(self.settings, point, arm)
        return EngineArm(self.loaded, chosen, self.device, most)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._folder.cleanup()


def run_points(
    settings: EngineSpeedSettings, device: Device, done: Sequence[str] = ()
) -> Iterator[tuple[SpeedPoint, Tables]]:
    """Run the points that are not done yet, one after the other.

    Args:
        settings: of the experiment.
        device: where it runs.
        done: identities of points to leave out.

    Raises:
        BadInput: an engine does not fit into memory.
        DeviceError: arms disagree about the first tokens, or a request failed.
    """
    with SpeedBench(settings, device) as bench:
        for number, point in enumerate(build_points(settings)):
            if point.point_id in done:
                continue
            yield point, run_point(point, bench, number)
            _tidy(device)


def run_point(point: SpeedPoint, bench: SpeedBench, number: int = 0) -> Tables:
    """Run one point. Returns rows by table.

    Args:
        point: what to run.
        bench: where.
        number: of the point, so that each has an order of its own.
    """
    if point.kind is PointKind.MEMORY:
        return {"memory": list(_memory(point, bench))}
    ours = OUR_DECODE if point.kind is PointKind.DECODE else (SpeedArm.OURS, SpeedArm.NULL)
    names = [name for name in ours if bench.settings.wants(name)]
    engines = {name: bench.engine_arm(point, name) for name in names if name is not SpeedArm.NULL}
    arms: dict[SpeedArm, DecodeArm] = {
        name: engines[SpeedArm.OURS if name is SpeedArm.NULL else name] for name in names
    }
    missing: Tables = {"samples": []}
    wanted = bench.settings.wants(SpeedArm.TRANSFORMERS)
    peer = bench.peer() if wanted else None
    if isinstance(peer, str):
        same = _same(point, bench)
        missing["samples"] = [SpeedRow(**same, arm=SpeedArm.TRANSFORMERS, left_out=peer)]
    elif wanted:
        arms[SpeedArm.TRANSFORMERS] = TransformersArm(peer)
    run = _decode if point.kind is PointKind.DECODE else _prefill
    # two libraries and their models are no garbage: a collection must not look through them all
    _tidy(bench.device)
    gc.freeze()
    try:
        tables = run(point, bench, arms, number)
    finally:
        gc.unfreeze()
        for arm in engines.values():
            arm.close()
    return {**tables, "samples": tables["samples"] + missing["samples"]}


def _same(point: SpeedPoint, bench: SpeedBench) -> dict[str, Any]:
    return {
        "point_id": point.point_id,
        "job": Job.DECODE if point.kind is PointKind.DECODE else Job.PREFILL,
        "clock": bench.clock,
        "batch": point.batch,
        "prompt_tokens": point.prompt_tokens,
    }


def order(
    arms: Sequence[SpeedArm], settings: EngineSpeedSettings, number: int
) -> Iterator[tuple[int, list[SpeedArm]]]:
    """Repeats, each with all arms in an order drawn for it."""
    random = np.random.default_rng([settings.seed, 2, number])
    for repeat in range(settings.repeats):
        yield repeat, [arms[index] for index in random.permutation(len(arms))]


def _decode(
    point: SpeedPoint, bench: SpeedBench, arms: dict[SpeedArm, DecodeArm], number: int
) -> Tables:
    settings = bench.settings
    same = _same(point, bench)
    for arm in dict.fromkeys(arms.values()):
        # compiles and tunes what the timed steps use
        arm.start(bench.prompts(point.batch, point.prompt_tokens, settings.repeats))
        arm.window(2)
        arm.stop()
    rows: list[SpeedRow] = []
    for repeat, turns in order(list(arms), settings, number):
        prompts = bench.prompts(point.batch, point.prompt_tokens, repeat)
        found: list[dict[str, Any]] = []
        first: dict[SpeedArm, list[list[int]]] = {}
        for position, name in enumerate(turns):
            arm = arms[name]
            ours = isinstance(arm, EngineArm)
            gc.collect()
            arm.start(prompts)
            arm.window(settings.warmup_steps if ours else settings.peer_warmup_steps)
            window = arm.window(settings.steps if ours else settings.peer_steps)
            timed = _timed(window)
            marked = arm.marked(settings.marked_steps)
            if marked is not None:
                timed["device_ms"] = float(np.median(marked[0]))
                timed["gap_ms"] = float(np.median(marked[1]))
            first[name] = [list(tokens) for tokens in arm.first_tokens]
            found.append(
                {**same, **timed, "arm": name, "repeat": repeat, "position": position}
                | {"kernels": arm.kernels}
            )
            arm.stop()
        for values in found:
            name = values["arm"]
            # forced lengths accept wrong drafts
            if name not in FORCED_ARMS:
                values["agreement"] = _agreement(first[name], first[SpeedArm.OURS], name)
            rows.append(SpeedRow(**values))
    return {
        "samples": list(rows),
        "device_time": list(_device_times(point, bench, arms, rows)),
        "floors": list(_floors(point, bench, rows)),
    }


def _timed(window: Window) -> dict[str, Any]:
    """Columns of a window."""
    times = np.asarray(window.step_seconds)
    seconds, steps = float(times.sum()), len(times)
    columns: dict[str, Any] = {
        "steps": steps,
        "tokens": window.tokens,
        "seconds": seconds,
        "tokens_per_s": window.tokens / seconds,
        "step_ms": float(np.median(times)) * 1e3,
        "step_p99_ms": float(np.quantile(times, 0.99)) * 1e3,
    }
    if window.waits is not None:
        status, output, staging = (wait / steps * 1e3 for wait in window.waits)
        columns |= {
            "status_wait_ms": status,
            "output_wait_ms": output,
            "staging_ms": staging,
            "host_ms": max(0.0, seconds / steps * 1e3 - status - output),
        }
    return columns


def _agreement(
    found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], name: SpeedArm
) -> float:
    """Share of equal tokens.

    Raises:
        DeviceError: the very first tokens differ in most requests.
    """
    first = [a[0] == b[0] for a, b in zip(found, expected, strict=True)]
    if sum(first) < _LEAST_AGREEMENT * len(first):
        raise DeviceError(
            f"{name}: the first tokens of {len(first) - sum(first)} of {len(first)} requests are "
            "not those of this engine without drafts; a wrong model is not timed"
        )
    pairs = [pair for a, b in zip(found, expected, strict=True) for pair in zip(a, b, strict=False)]
    return sum(a == b for a, b in pairs) / len(pairs)


def _prefill(
    point: SpeedPoint, bench: SpeedBench, arms: dict[SpeedArm, DecodeArm], number: int
) -> Tables:
    settings = bench.settings
    same = _same(point, bench)
    for arm in dict.fromkeys(arms.values()):
        for extra in range(2):
            prompt = bench.prompts(1, point.prompt_tokens, settings.repeats + extra)[0]
            arm.first_token(prompt)
    rows: list[SpeedRow] = []
    for repeat, turns in order(list(arms), settings, number):
        prompt = bench.prompts(1, point.prompt_tokens, repeat)[0]
        results = {}
        for name in turns:
            gc.collect()
            bench.device.synchronize()
            results[name] = arms[name].first_token(prompt)
        for position, name in enumerate(turns):
            seconds, token = results[name]
            rows.append(
                SpeedRow(
                    **same,
                    arm=name,
                    repeat=repeat,
                    position=position,
                    steps=1,
                    tokens=point.prompt_tokens,
                    seconds=seconds,
                    tokens_per_s=point.prompt_tokens / seconds,
                    step_ms=seconds * 1e3,
                    step_p99_ms=seconds * 1e3,
                    agreement=float(token == results[SpeedArm.OURS][1]),
                    kernels=arms[name].kernels,
                )
            )
    return {"samples": list(rows)}


def _device_times(
    point: SpeedPoint,
    bench: SpeedBench,
    arms: dict[SpeedArm, DecodeArm],
    rows: Sequence[SpeedRow],
) -> Iterator[DeviceTimeRow]:
    settings = bench.settings
    for name, arm in arms.items():
        if name is SpeedArm.NULL:
            continue
        same: dict[str, Any] = {"point_id": point.point_id, "arm": name}
        if bench.virtual:
            yield DeviceTimeRow(**same, left_out="a virtual device has no kernel times")
            continue
        ours = isinstance(arm, EngineArm)
        steps = settings.profile_steps if ours else _PEER_PROFILE_STEPS
        arm.start(bench.prompts(point.batch, point.prompt_tokens, 0))
        arm.window(settings.warmup_steps if ours else settings.peer_warmup_steps)
        spans = device_spans(lambda: arm.window(steps), bench.device.synchronize)  # noqa: B023
        arm.stop()
        if not spans:
            yield DeviceTimeRow(**same, left_out="the profiler saw no kernel")
            continue
        busy = 0.0
        for category, share in shares(spans, has_drafts=arm.has_drafts).items():
            if share.launches == 0:
                continue
            busy += share.microseconds / steps / 1e3
            yield DeviceTimeRow(
                **same,
                category=category,
                steps=steps,
                ms_per_step=share.microseconds / steps / 1e3,
                launches_per_step=share.launches / steps,
            )
        median = float(np.median([row.step_ms for row in rows if row.arm is name and row.step_ms]))
        gaps = max(0.0, median - busy)
        yield DeviceTimeRow(**same, category=Category.GAPS, steps=steps, ms_per_step=gaps)


def _floors(point: SpeedPoint, bench: SpeedBench, rows: Sequence[SpeedRow]) -> Iterator[FloorRow]:
    settings = bench.settings
    rate = copy_rate(bench.device, settings.copy_bytes)
    for name in OUR_DECODE:
        if name is SpeedArm.NULL or not settings.wants(name):
            continue
        mine = [row for row in rows if row.arm is name]
        pace = float(
            np.mean(
                [row.tokens / row.steps / row.batch for row in mine if row.tokens and row.steps]
            )
        )
        context = point.prompt_tokens + pace * (settings.warmup_steps + settings.steps / 2)
        parts = decode_floor(
            bench.config,
            bench.dtype,
            batch=point.batch,
            context=context,
            draft_tokens=0 if name is SpeedArm.OURS else settings.draft_tokens,
            recurrent_states=recurrent_states(name),
            tokens_per_row=pace,
        )
        for part in parts:
            yield FloorRow(
                point_id=point.point_id,
                arm=name,
                part=part.name,
                read_bytes=part.read,
                written_bytes=part.written,
                copy_bytes_per_s=rate,
            )


def _memory(point: SpeedPoint, bench: SpeedBench) -> Iterator[MemoryRow]:
    if not bench.virtual:
        torch.cuda.reset_peak_memory_stats()

    def counted(name: str) -> int | None:
        return None if bench.virtual else bench.device.memory_stats().get(f"{name}_bytes.all.{of}")

    of = "current"
    weights = counted("allocated")
    arm = bench.engine_arm(point, SpeedArm.MTP)
    plan = arm.runner.plan
    built = counted("allocated")
    prompts = bench.prompts(1, point.prompt_tokens, 0)
    prompts += bench.prompts(point.batch - 1, bench.settings.prompt_tokens, 0)
    arm.start(prompts)
    arm.window(_MEMORY_STEPS if not bench.virtual else 2)
    bench.device.synchronize()
    of = "peak"
    pools = plan.state_bytes + plan.checkpoint_bytes + plan.kv_bytes
    for part, planned, measured in (
        ("weights", plan.weight_bytes, weights),
        ("weights and pools, built", plan.weight_bytes + pools, built),
        ("all, at its peak", plan.planned_bytes, counted("allocated")),
        ("reserved, at its peak", plan.planned_bytes, counted("reserved")),
    ):
        yield MemoryRow(
            point_id=point.point_id, part=part, planned_bytes=planned, measured_bytes=measured
        )
    arm.stop()
    arm.close()


def _tidy(device: Device) -> None:
    """Give back what nobody holds."""
    gc.collect()
    if device.properties.kind is not DeviceKind.VIRTUAL:
        device.empty_cache()


__all__ = ["SpeedBench", "Tables", "order", "run_point", "run_points"]
