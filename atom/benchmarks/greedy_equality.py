"""Whether greedy tokens stay the same however the engine makes them, and where they do not, why.

Method. Each arm is one engine over the same weights and requests; its greedy tokens are compared
with those of an engine without drafts. In float32 on a CPU they must be equal. In bfloat16 two
right engines may differ where the two likeliest tokens lie closer together than rounding moves
them, since batches of other shapes add up in another order. So the rounding error is measured: the
tokens of the reference are computed once more in one piece, in bfloat16 and, from the same weights,
in float32; the largest change of the gap between the two likeliest tokens is the bound. A first
difference counts against an arm when one of its two tokens falls short of the likeliest by more.

A null arm (no drafts, other batches) shows how often rounding alone does it. A control arm is wrong
on purpose: its state kernels read the row of another step's count, as after a stale status that is
in range. It must differ by more than the bound, or the experiment could not see such a fault.
"""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atom.benchmarks.greedy_equality_rows import (
    EqualityArm,
    GreedyEqualityRow,
    GreedyEqualitySettings,
    Precision,
    build_arms,
)
from atom.config import GuardMode
from atom.device import Device, DeviceKind, open_device
from atom.model_engine.engine_builder import PRESET, build_engine
from atom.model_engine.engine_settings import EngineSettings
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.scheduled_batch import BatchKind, ScheduledBatch
from atom.model_engine.sequence import SamplingParams
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.models.caches import ModelCaches
from atom.models.presets import EMBEDDING_SCALES, preset, random_checkpoint
from atom.models.qwen3_next import Qwen3NextForCausalLM
from atom.models.weights import LoadedModel, load_model

_BLOCK = 16
_DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}


class WrongCountRunner(ModelRunner):
    """A runner whose decode steps read the state as if no draft had been accepted before."""

    def launch(self, batch: ScheduledBatch, forced_bonus: Sequence[int] | None) -> None:
        """Launch with counts of 1."""
        if batch.kind is not BatchKind.DECODE:
            super().launch(batch, forced_bonus)
            return
        counts = [row.seq.num_bonus for row in batch.rows]
        try:
            for row in batch.rows:
                row.seq.num_bonus = 0
            super().launch(batch, forced_bonus)
        finally:
            for row, count in zip(batch.rows, counts, strict=True):
                row.seq.num_bonus = count


@dataclass(frozen=True)
class Models:
    """One set of weights, as the engines run it and as float32.

    Attributes:
        served: the model of the engines.
        exact: the same weights in float32; the same object in float32.
    """

    served: LoadedModel
    exact: Qwen3NextForCausalLM


@dataclass(frozen=True)
class Truth:
    """The reference's tokens and what float32 makes of their places.

    Attributes:
        tokens: of each request.
        logits: float32 ``[output tokens, vocabulary]`` of each request, each row what follows the
            prompt and the reference's tokens before it.
        bound: see :class:`GreedyEqualityRow`.
        margins: float32 ``[places]``, gaps between the two likeliest tokens.
    """

    tokens: list[list[int]]
    logits: list[Tensor]
    bound: float
    margins: Tensor


def load_models(settings: GreedyEqualitySettings, device: Device) -> Models:
    """The weights of the settings, on the device, or in host memory for a virtual one.

    Raises:
        BadInput: no such model.
    """
    place = "cpu" if device.properties.kind is DeviceKind.VIRTUAL else "cuda"
    longest = settings.prompt_tokens + settings.output_tokens + 64
    dtype = _DTYPES[settings.precision]
    with tempfile.TemporaryDirectory() as made:
        folder: str | Path = settings.model
        if settings.model.startswith(PRESET):
            folder, size = made, settings.model.removeprefix(PRESET)
            scale = EMBEDDING_SCALES.get(size, 1.0)
            random_checkpoint(
                folder, preset(size), settings.seed, dtype, with_mtp=True, embedding_scale=scale
            )
        served = load_model(folder, dtype=dtype, device=place, with_mtp=True, max_positions=longest)
        exact = served.model
        if settings.precision is not Precision.FLOAT32:
            exact = load_model(
                folder, dtype=torch.float32, device=place, with_mtp=False, max_positions=longest
            ).model
    return Models(served, exact)


def forced_logits(model: Qwen3NextForCausalLM, ids: Sequence[int]) -> Tensor:
    """Logits behind every token of one text, computed in one piece; float32 ``[T, vocabulary]``."""
    count, device = len(ids), model.device
    blocks = -(-count // _BLOCK)

    def numbers(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    places = torch.arange(count, device=device)
    meta = AttentionMetadata(
        query_start_loc=numbers([0, count]),
        context_lens=numbers([0]),
        state_slots=numbers([0]),
        num_accepted_tokens=numbers([0]),
        state_table=numbers([[0]]),
        block_tables=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        positions=places,
        slot_mapping=places,
        num_tokens=count,
        max_query_len=count,
        max_context_len=0,
        is_prefill=True,
    )
    caches = ModelCaches.allocate(
        model.config,
        num_blocks=blocks,
        num_groups=1,
        draft_tokens=0,
        dtype=model.dtype,
        block_size=_BLOCK,
        with_mtp=False,
        empty=lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device),
    )
    with torch.no_grad():
        hidden = model(
            numbers(list(ids), torch.int64),
            meta,
            caches,
            guard=GuardMode.REPORT,
            record=numbers([0] * 8),
        )
        return model.compute_logits(hidden)


def random_prompts(settings: GreedyEqualitySettings, vocabulary: int) -> list[list[int]]:
    """Prompts of the settings: a quarter of the longest length, or more."""
    generator = random.Random(settings.seed)
    longest = settings.prompt_tokens
    return [
        [
            generator.randrange(vocabulary)
            for _ in range(generator.randint(max(longest // 4, 1), longest))
        ]
        for _ in range(settings.requests)
    ]


def engine_settings(settings: GreedyEqualitySettings, arm: EqualityArm) -> EngineSettings:
    """The engine of an arm."""
    rows = -(-settings.requests // 2) if arm.other_batches else settings.requests
    longest = settings.prompt_tokens + settings.output_tokens + 16
    whole = max(settings.requests * settings.prompt_tokens, rows * 4, 256)
    # no multiple of anything: chunks end inside prompts, wherever blocks allow it
    small = max(rows * 4, settings.prompt_tokens // 3 + _BLOCK)
    changes: dict[str, Any] = {"dspark_threshold": 0.2} if arm.dspark else {}
    return EngineSettings(
        draft_tokens=arm.draft_tokens,
        graphs=arm.graphs,
        dspark=arm.dspark,
        recurrent_states=arm.recurrent_states,
        max_num_seqs=rows,
        max_num_batched_tokens=small if arm.chunks else whole,
        max_model_len=longest,
        num_kv_blocks=rows * (-(-longest // _BLOCK) + 2),
        prefix_caching=False,
        block_size=_BLOCK,
        seed=settings.seed,
        **changes,
    )


@dataclass(frozen=True)
class ArmTokens:
    """What an arm generated, in the order of the requests."""

    tokens: list[list[int]]
    drafted: int
    accepted: int


def run_arm(
    device: Device, models: Models, settings: GreedyEqualitySettings, arm: EqualityArm
) -> ArmTokens:
    """Generate with the engine of an arm.

    Raises:
        BadInput: it does not fit.
        EngineDead: a request failed.
    """
    gc.collect()
    device.synchronize()
    device.empty_cache()
    served = models.served
    prompts = random_prompts(settings, served.config.vocab_size)
    params = SamplingParams(max_tokens=settings.output_tokens, temperature=0.0, ignore_eos=True)
    engine = build_engine(
        served.model,
        served.mtp,
        engine_settings(settings, arm),
        device,
        runner_class=WrongCountRunner if arm.wrong_count else ModelRunner,
    )
    try:
        if arm.other_batches:
            tokens = engine.generate(prompts[::-1], params)[::-1]
        else:
            tokens = engine.generate(prompts, params)
        counters = engine.counters
        return ArmTokens(tokens, counters.drafted_tokens, counters.accepted_tokens)
    finally:
        engine.close()


def make_truth(
    models: Models, settings: GreedyEqualitySettings, reference: Sequence[Sequence[int]]
) -> Truth:
    """Compute the reference's places in one piece, in float32 and in the engines' precision."""
    prompts = random_prompts(settings, models.served.config.vocab_size)
    kept, errors, margins = [], [], []
    for prompt, tokens in zip(prompts, reference, strict=True):
        text, first = [*prompt, *tokens[:-1]], len(prompt) - 1
        exact = forced_logits(models.exact, text)[first:]
        pair = exact.topk(2)
        margins.append(pair.values[:, 0] - pair.values[:, 1])
        if models.served.model is models.exact:
            errors.append(torch.zeros_like(margins[-1]))
        else:
            rounded = forced_logits(models.served.model, text)[first:].gather(1, pair.indices)
            errors.append((rounded[:, 0] - rounded[:, 1] - margins[-1]).abs())
        kept.append(exact)
    return Truth(
        [list(tokens) for tokens in reference],
        kept,
        float(torch.cat(errors).max()),
        torch.cat(margins).cpu(),
    )


def compare(
    settings: GreedyEqualitySettings, arm: EqualityArm, made: ArmTokens, truth: Truth
) -> GreedyEqualityRow:
    """Compare an arm's tokens with the reference's."""
    compared, shortfalls = 0, []
    for ours, own, logits in zip(made.tokens, truth.tokens, truth.logits, strict=True):
        place = next(
            (i for i, pair in enumerate(zip(ours, own, strict=True)) if len({*pair}) > 1), None
        )
        compared += len(own) if place is None else place + 1
        if place is not None:
            row = logits[place]
            shortfalls.append(float(row.max() - row[[ours[place], own[place]]].min()))
    return GreedyEqualityRow(
        point_id=arm.name,
        arm=arm.name,
        control=arm.wrong_count,
        precision=settings.precision,
        requests=settings.requests,
        tokens_compared=compared,
        drafted_tokens=made.drafted,
        accepted_tokens=made.accepted,
        first_differences=len(shortfalls),
        above_bound=sum(shortfall > truth.bound for shortfall in shortfalls),
        largest_shortfall=max(shortfalls, default=None),
        bound=truth.bound,
        median_margin=float(truth.margins.median()),
        places_above_bound=float((truth.margins > truth.bound).float().mean()),
    )


def measure_greedy_equality(
    device: Device,
    models: Models,
    settings: GreedyEqualitySettings,
    done: Collection[str] = (),
) -> Iterator[GreedyEqualityRow]:
    """Run every arm and yield its row, the reference first.

    Arms in ``done`` yield nothing; the reference runs all the same, to compare with.

    Raises:
        BadInput: an unknown arm, or an engine that does not fit.
        EngineDead: a request failed.
    """
    truth = None
    for arm in build_arms(settings):
        if arm.name in done and truth is not None:
            continue
        made = run_arm(device, models, settings, arm)
        truth = truth or make_truth(models, settings, made.tokens)
        if arm.name not in done:
            yield compare(settings, arm, made, truth)


def run_greedy_equality(settings: GreedyEqualitySettings) -> list[GreedyEqualityRow]:
    """The whole experiment on the device of the settings.

    Raises:
        BadInput, DeviceError: see :func:`measure_greedy_equality`; no accelerator.
    """
    device = open_device(settings.device, profile=settings.device_profile, seed=settings.seed)
    return list(measure_greedy_equality(device, load_models(settings, device), settings))
