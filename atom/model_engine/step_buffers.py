"""Device memory that lives as long as a runner: pools, inputs of graphs, results of a step.

Everything here is read and written on the default stream alone, so its order is the stream's.
What the host reads is never sent from here: it is copied into fresh payloads first, because a
buffer that lives on would be written again under a copy that is late.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atom.device.interface import Device
from atom.model_engine.engine_settings import EngineSettings, scheduler_config
from atom.model_engine.memory_plan import MemoryPlan
from atom.model_engine.step_inputs import InputLayout
from atom.model_engine.step_kernels import FILL
from atom.model_ops.guard import RECORD_WORDS
from atom.models.caches import ModelCaches
from atom.models.model_config import ModelConfig
from atom.transfer.payload import PayloadKind, PayloadLayout, payload_layout


def _status_layout(rows: int, tagged: bool) -> PayloadLayout:
    shape = (2 * rows + RECORD_WORDS,)
    return payload_layout(PayloadKind.SPEC_STATUS, shape, torch.int32, None, tagged)


class StepBuffers:
    """Allocates all buffers of a runner, zeroed. ``M`` is ``max_num_seqs``, ``k`` the drafts.

    Args:
        device: where they lie.
        config: the model.
        settings: the engine.
        plan: sizes of the pools.
        dtype: of KV, conv states, hidden states and logits.

    Attributes:
        layout: of the inputs.
        inputs: uint8, all that the host sends for a decode step. Views of it are the next six.
        metadata: int32 ``[4, M]``.
        block_tables: int32 ``[M, max_blocks]``.
        forced_bonus: int32 ``[M]``.
        temperature_top_p: float32 ``[2, M]``; this and the next two of any step that samples.
        top_k: int32 ``[M]``.
        seeds: int64 ``[M]``.
        token_table: int64 ``[groups + 1, 1 + k]``: last token and drafts of each state group; the
            last row takes what padding rows write.
        logits: ``[M * (1 + k), vocabulary]``.
        hidden: ``[tokens, H]``.
        num_bonus: int32 ``[M]``.
        sampled_ids: int64 ``[M, 1 + k]``.
        step_drafts: of a decode step: the drafts that it verifies int64 ``[M, k]``, their number
            int32 ``[M]``, the position of the first verified token int64 ``[M]``, and the row's
            place in the token table int32 ``[M]``.
        draft_ids: int64 ``[M, k]``, for the next step.
        confidence: float32 ``[M, k]``.
        record: int32 ``[8]``, the guard's.
        scratch: what :class:`atom.model_ops.decode_inputs.StepInputs` is made of.
        pools: conv states, recurrent states, KV, and the MTP layer's KV if there are drafts.
        rings: keys with values, and gates, of the tokens to replay, if states are kept so.
        checkpoints: conv and recurrent states kept for the prefix cache.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        settings: EngineSettings,
        plan: MemoryPlan,
        *,
        dtype: torch.dtype,
    ) -> None:
        self._device = device
        most, query, drafts = settings.max_num_seqs, settings.query_tokens, settings.draft_tokens
        rows = most * query
        tokens = max(settings.max_num_batched_tokens, rows)
        max_blocks = scheduler_config(settings).max_blocks_per_seq(settings.block_size)
        self.layout = InputLayout(most, max_blocks)
        self.inputs = self._zeros((self.layout.nbytes,), torch.uint8)
        parts = self.layout.tensors(self.inputs)
        self.metadata, self.block_tables = parts.metadata, parts.block_tables
        self.forced_bonus, self.seeds = parts.forced_bonus, parts.seeds
        self.temperature_top_p, self.top_k = parts.temperature_top_p, parts.top_k
        self.token_table = self._zeros((plan.num_groups + 1, query), torch.int64)
        self.logits = self._zeros((rows, config.vocab_size), dtype)
        self.hidden = self._zeros((tokens, config.hidden_size), dtype)
        self.num_bonus = self._zeros((most,), torch.int32)
        self.sampled_ids = self._zeros((most, query), torch.int64)
        self.step_drafts: tuple[Tensor, ...] = (
            self._zeros((most, drafts), torch.int64),
            self._zeros((most,), torch.int32),
            self._zeros((most,), torch.int64),
            self._zeros((most,), torch.int32),
        )
        self.draft_ids = self._zeros((most, max(drafts, 1)), torch.int64)
        self.confidence = self._zeros((most, max(drafts, 1)), torch.float32)
        self.record = self._zeros((RECORD_WORDS,), torch.int32)
        self._status = self._zeros((_status_layout(most, True).host_bytes,), torch.uint8)
        self.scratch: tuple[Tensor, ...] = (
            self._zeros((most + 1,), torch.int32),
            self._zeros((tokens,), torch.int64),
            self._zeros((tokens,), torch.int64),
            self._zeros((tokens,), torch.int64),
            self._zeros((most, query), torch.int32),
        )
        caches = ModelCaches.allocate(
            config,
            num_blocks=plan.num_blocks,
            num_groups=plan.num_groups,
            draft_tokens=drafts,
            dtype=dtype,
            block_size=settings.block_size,
            with_mtp=drafts > 0,
            recurrent_states=settings.recurrent_states,
            empty=self._zeros,
        )
        pools = [caches.conv_state, caches.recurrent_state, caches.kv_cache]
        if caches.mtp_kv_cache is not None:
            pools.append(caches.mtp_kv_cache)
        self.pools: tuple[Tensor, ...] = tuple(pools)
        self.rings: tuple[Tensor, ...] = ()
        if caches.replay is not None:
            self.rings = caches.replay.keys_values, caches.replay.gates
        count = max(plan.num_checkpoints, 1)
        conv, recurrent = caches.conv_state.shape, caches.recurrent_state.shape
        self.checkpoints: tuple[Tensor, ...] = (
            self._zeros((conv[0], count, config.linear_conv_kernel_dim - 1, conv[3]), dtype),
            self._zeros((recurrent[0], count, *recurrent[2:]), torch.float32),
        )

    def unsent_status(self, rows: int, tagged: bool) -> Tensor:
        """Where the sampler puts the status of a step that sends none: uint8, never copied."""
        return self._status[: _status_layout(rows, tagged).host_bytes]

    @property
    def states(self) -> tuple[Tensor, ...]:
        """Conv and recurrent state pools."""
        return self.pools[:2]

    def _zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = self._device.empty(tuple(shape), dtype)
        self._device.launch(FILL, (), (tensor,), scalars=(0,))
        return tensor
