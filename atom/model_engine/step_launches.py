"""Launches of a step's large kernels, their graphs for decode steps, and their first run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atom.device.interface import Device, Graph
from atom.model_engine.engine_settings import EngineSettings
from atom.model_engine.step_buffers import StepBuffers
from atom.model_engine.step_kernels import DRAFT, FILL, FORWARD
from atom.model_ops.decode_inputs import QUERY_LENS, STATE_SLOTS

#: place of the packed token ids among the scratch tensors
_INPUT_IDS = 3
#: tokens of the prompt that a new engine computes for nobody
_WARM_TOKENS = 256


@dataclass(frozen=True)
class StepShape:
    """Host numbers of a launch; see :class:`atom.model_ops.attention_metadata`."""

    rows: int
    tokens: int
    max_query_len: int
    max_context_len: int
    is_prefill: bool


@dataclass(frozen=True)
class DecodeGraphs:
    """Graphs of one batch size; ``draft`` is ``None`` without speculation.

    Nothing that goes to the host is among their outputs: what lives in a graph is written again by
    the next replay, whatever still reads it.
    """

    forward: Graph
    draft: Graph | None


class StepLaunches:
    """Queues the model's kernels over a runner's buffers.

    Args:
        device: where.
        buffers: what they read and write.
        settings: the engine's.
        handle: of the model.
    """

    def __init__(
        self, device: Device, buffers: StepBuffers, settings: EngineSettings, handle: int
    ) -> None:
        self.device = device
        self.buffers = buffers
        self.settings = settings
        self._handle = handle

    def decode_shape(self, rows: int) -> StepShape:
        """A decode step of so many rows, padding included, with all drafts."""
        query = self.settings.query_tokens
        return StepShape(rows, rows * query, query, self.settings.max_model_len, False)

    def forward(
        self, shape: StepShape, metadata: Tensor, block_tables: Tensor, ids: Tensor, logits: bool
    ) -> None:
        """The language model; ``ids`` are packed prompt ids, or for a decode the token table."""
        buffers = self.buffers
        self.device.launch(
            FORWARD,
            (metadata, block_tables, ids),
            (
                *(buffers.logits, buffers.hidden, buffers.record, *buffers.scratch, *buffers.pools),
                *buffers.rings,
                *(() if shape.is_prefill else buffers.step_drafts),
            ),
            scalars=(
                self._handle,
                shape.rows,
                shape.tokens,
                shape.max_query_len,
                shape.max_context_len,
                shape.is_prefill,
                logits,
            ),
        )

    def decode_forward(self, shape: StepShape) -> None:
        """The language model over the buffers of decode steps."""
        buffers = self.buffers
        self.forward(shape, buffers.metadata, buffers.block_tables, buffers.token_table, True)

    def decode_draft(self, shape: StepShape) -> None:
        """The drafts over the buffers of decode steps."""
        buffers = self.buffers
        ids = buffers.scratch[_INPUT_IDS]
        self.draft(shape, buffers.metadata, buffers.block_tables, ids, True, None)

    def draft(
        self,
        shape: StepShape,
        metadata: Tensor,
        block_tables: Tensor,
        input_ids: Tensor,
        wants_drafts: bool,
        next_prompt_ids: Tensor | None,
    ) -> None:
        """The MTP layer; see :func:`atom.model_engine.step_kernels.draft`."""
        buffers = self.buffers
        reads = [metadata, block_tables, input_ids, buffers.hidden]
        reads += [buffers.num_bonus, buffers.sampled_ids]
        if next_prompt_ids is not None:
            reads.append(next_prompt_ids)
        self.device.launch(
            DRAFT,
            tuple(reads),
            (
                buffers.token_table,
                buffers.draft_ids,
                buffers.confidence,
                *buffers.scratch,
                buffers.pools[3],
            ),
            scalars=(
                self._handle,
                shape.rows,
                shape.tokens,
                shape.max_query_len,
                shape.max_context_len,
                shape.is_prefill,
                wants_drafts,
            ),
        )


def graph_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes that decode steps are padded to: powers of two, and the largest batch."""
    sizes = [2**power for power in range(most.bit_length()) if 2**power < most]
    return (*sizes, most)


def warm_up_prefill(kernels: StepLaunches) -> None:
    """Compute a prompt that owns no block and no state, so that kernels are compiled and tuned."""
    device, settings = kernels.device, kernels.settings
    tokens = min(settings.max_num_batched_tokens, _WARM_TOKENS)
    metadata = device.empty((4, settings.max_num_seqs), torch.int32)
    tables = device.empty((1, 1), torch.int32)
    ids = device.empty((tokens,), torch.int64)
    following = device.empty((1,), torch.int64)
    for tensor, value in (
        *((metadata, 0), (metadata[QUERY_LENS, :1], tokens), (metadata[STATE_SLOTS], -1)),
        *((tables, -1), (ids, 0), (following, 0)),
    ):
        device.launch(FILL, (), (tensor,), scalars=(value,))
    shape = StepShape(1, tokens, tokens, 0, True)
    kernels.forward(shape, metadata, tables, ids, True)
    if settings.draft_tokens:
        kernels.draft(shape, metadata, tables, ids, True, following)
    device.synchronize()


def capture_decode(kernels: StepLaunches, sizes: Sequence[int]) -> dict[int, DecodeGraphs]:
    """Capture the decode step of every batch size, largest first."""
    device, drafts = kernels.device, kernels.settings.draft_tokens > 0
    captured = {}
    for size in sorted(sizes, reverse=True):
        shape = kernels.decode_shape(size)
        # the first run compiles kernels and makes library handles, which no graph may do
        for _ in range(2):
            kernels.decode_forward(shape)
            if drafts:
                kernels.decode_draft(shape)
        device.synchronize()
        with device.capture() as forward:
            kernels.decode_forward(shape)
        draft = None
        if drafts:
            with device.capture() as draft:
                kernels.decode_draft(shape)
        captured[size] = DecodeGraphs(forward, draft)
    device.synchronize()
    return captured
