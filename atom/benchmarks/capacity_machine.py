"""What a serving machine takes of time and memory, as a few numbers: the capacity model's input."""

from __future__ import annotations

from pydantic import Field

from atom.config import Settings
from atom.model_engine.scheduled_batch import BatchKind, ScheduledBatch


class Machine(Settings):
    """Costs and sizes of one GPU with its model. Times are of the device unless they say host.

    The defaults are the 395 M-parameter preset on an H200, from the recorded decode steps; a fit
    replaces them (:mod:`atom.benchmarks.capacity_fit`).
    """

    decode_base_seconds: float = Field(0.9e-3, ge=0, le=10)
    """A decode step's share that does not depend on the batch: weights and launches."""

    decode_row_seconds: float = Field(12e-6, ge=0, le=1)
    """Per request of a decode step: its states, read and written, and its query tokens."""

    decode_context_seconds: float = Field(2.6e-9, ge=0, le=1)
    """Per token of context of a decode step: its keys and values, read."""

    prefill_base_seconds: float = Field(4e-3, ge=0, le=10)
    """A prefill step's share that does not depend on its tokens."""

    prefill_token_seconds: float = Field(1.6e-6, ge=0, le=1)
    """Per prompt token computed."""

    prefill_pair_seconds: float = Field(6e-12, ge=0, le=1)
    """Per prompt token and token of context that it attends to."""

    host_seconds: float = Field(0.15e-3, ge=0, le=1)
    """Host time from what a step needs being there to its launch, not hidden by the device."""

    store_bytes_per_second: float = Field(54.9e9, gt=0, le=1e13)
    """Device to host."""

    load_bytes_per_second: float = Field(54.9e9, gt=0, le=1e13)
    """Host to device."""

    copy_seconds: float = Field(20e-6, ge=0, le=1)
    """Fixed share of a store or load job."""

    state_move_seconds: float = Field(8e-6, ge=0, le=1)
    """A state image saved to, or restored from, a checkpoint on the device."""

    loads_block: bool = False
    """Whether a load holds up the steps behind it, as one on the default stream would."""

    looks_up_at_arrival: bool = False
    """Whether the pool is asked for a prompt's KV, and so notes its use, as soon as a request
    comes, and not only, with its state, when it is admitted."""

    kv_bytes_per_token: int = Field(10240, ge=1, le=2**30)
    """Keys and values of one token in all attention layers and the MTP layer."""

    state_image_bytes: int = Field(12_976_128, ge=1, le=2**40)
    """Conv rows and recurrent states of all gated-delta-net layers at one place."""

    def decode_seconds(self, rows: int, context_tokens: int) -> float:
        """A decode step of ``rows`` requests that hold ``context_tokens`` together."""
        return (
            self.decode_base_seconds
            + self.decode_row_seconds * rows
            + self.decode_context_seconds * context_tokens
        )

    def step_seconds(self, batch: ScheduledBatch) -> float:
        """A scheduled step."""
        if batch.kind is BatchKind.DECODE:
            seconds = self.decode_seconds(
                len(batch.rows), sum(row.context_len for row in batch.rows)
            )
        else:
            tokens = pairs = 0
            for row in batch.rows:
                tokens += row.query_len
                pairs += row.query_len * row.context_len + row.query_len * (row.query_len + 1) // 2
            seconds = (
                self.prefill_base_seconds
                + self.prefill_token_seconds * tokens
                + self.prefill_pair_seconds * pairs
            )
        moves = sum(
            (row.restore_slot is not None) + (row.save_slot is not None) for row in batch.rows
        )
        return seconds + self.state_move_seconds * moves
