"""Requests over shuffled blocks and caches full of NaN, as the tests of the models run them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atom.config import GuardMode
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.models.caches import ModelCaches
from atom.models.model_config import ModelConfig
from atom.models.qwen3_next import Qwen3NextForCausalLM


@dataclass
class Request:
    """What an engine remembers of a request."""

    group: int
    blocks: list[int] = field(default_factory=list)
    context: int = 0
    accepted: int = 1


class PagedRequests:
    """Caches, block tables and state groups of a few requests, for one model."""

    def __init__(
        self,
        model: Qwen3NextForCausalLM,
        *,
        requests: int,
        draft_tokens: int = 3,
        blocks: int = 64,
        block_size: int = 16,
        seed: int = 0,
    ) -> None:
        self.model, self.draft_tokens, self.block_size = model, draft_tokens, block_size
        shuffle = random.Random(seed)
        self.free = shuffle.sample(range(blocks), blocks)
        groups = shuffle.sample(range(requests + 2), requests)
        self.requests = [Request(group) for group in groups]
        device = model.device

        def nans(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.full(shape, float("nan"), dtype=dtype, device=device)

        self.caches = ModelCaches.allocate(
            model.config,
            num_blocks=blocks,
            num_groups=requests + 2,
            draft_tokens=draft_tokens,
            dtype=model.dtype,
            block_size=block_size,
            empty=nans,
        )
        self.record = torch.zeros(8, dtype=torch.int32, device=device)

    def metadata(
        self, rows: Sequence[int], lengths: Sequence[int], *, prefill: bool, padding: int = 0
    ) -> AttentionMetadata:
        """A batch of the next ``lengths`` tokens of some requests, and padding rows and tokens."""
        chosen = [self.requests[row] for row in rows]
        for request, length in zip(chosen, lengths, strict=True):
            while len(request.blocks) * self.block_size < request.context + length:
                request.blocks.append(self.free.pop())
        places = [
            (request.context + i, request.blocks)
            for request, length in zip(chosen, lengths, strict=True)
            for i in range(length)
        ]
        slots = [
            blocks[position // self.block_size] * self.block_size + position % self.block_size
            for position, blocks in places
        ]
        width = max(len(request.blocks) for request in chosen) + 1
        tables = [r.blocks + [-1] * (width - len(r.blocks)) for r in chosen]
        groups = [request.group for request in chosen]
        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        columns = 1 + self.draft_tokens
        table = [[group * columns + i for i in range(columns)] for group in groups]

        def tensor(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.model.device)

        return AttentionMetadata(
            query_start_loc=tensor(starts + starts[-1:] * padding),
            context_lens=tensor([r.context for r in chosen] + [0] * padding),
            state_slots=tensor(groups + [-1] * padding),
            num_accepted_tokens=tensor([r.accepted for r in chosen] + [0] * padding),
            state_table=tensor(table + [[-1] * columns] * padding),
            block_tables=tensor(tables + [[-1] * width] * padding),
            positions=tensor([p for p, _ in places] + [0] * padding, torch.int64),
            slot_mapping=tensor(slots + [-1] * padding, torch.int64),
            num_tokens=len(places) + padding,
            max_query_len=max(lengths),
            max_context_len=max(r.context for r in chosen),
            is_prefill=prefill,
        )

    def ids(self, tokens: Sequence[Tensor], padding: int = 0) -> Tensor:
        """Packed ids of a batch."""
        device = self.model.device
        return torch.cat(
            [*(t.to(device) for t in tokens), torch.zeros(padding, device=device).long()]
        )

    def run(
        self, rows: Sequence[int], tokens: Sequence[Tensor], *, prefill: bool, padding: int = 0
    ) -> tuple[list[Tensor], Tensor, AttentionMetadata]:
        """One step.

        Returns:
            Logits of each row ``[its tokens, vocabulary]``, all hidden states, and the batch.
        """
        lengths = [len(t) for t in tokens]
        meta = self.metadata(rows, lengths, prefill=prefill, padding=padding)
        hidden = self.model(
            self.ids(tokens, padding),
            meta,
            self.caches,
            guard=GuardMode.REPORT,
            record=self.record,
        )
        logits = self.model.compute_logits(hidden[: sum(lengths)])
        assert self.record.tolist() == [0] * 8
        return list(logits.split(lengths)), hidden, meta

    def prefill(
        self, rows: Sequence[int], tokens: Sequence[Tensor], padding: int = 0
    ) -> list[Tensor]:
        """One batch of prompt chunks; returns each row's logits."""
        logits = self.run(rows, tokens, prefill=True, padding=padding)[0]
        for row, chunk in zip(rows, tokens, strict=True):
            self.requests[row].context += len(chunk)
        return logits

    def decode(
        self, rows: Sequence[int], tokens: Sequence[Tensor], bonus: Sequence[int], padding: int = 0
    ) -> list[Tensor]:
        """One decode batch of which each row then keeps its first token and ``bonus`` more."""
        logits = self.run(rows, tokens, prefill=False, padding=padding)[0]
        for row, kept in zip(rows, bonus, strict=True):
            self.accept(row, kept)
        return logits

    def accept(self, row: int, bonus: int) -> None:
        """Keep a row's first token and ``bonus`` drafts."""
        self.requests[row].context += 1 + bonus
        self.requests[row].accepted = 1 + bonus


def small_config(**changes: object) -> ModelConfig:
    """A model of a few thousand weights."""
    sizes: dict[str, object] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "dtype": torch.float32,
    }
    return ModelConfig(**{**sizes, **changes})  # type: ignore[arg-type]
