"""Which requests are refused before they wait: those that could never run to their end."""

from __future__ import annotations

from atom.errors import BadInput
from atom.model_engine.block_manager import BlockManager
from atom.model_engine.scheduled_batch import SchedulerConfig
from atom.model_engine.sequence import Sequence


class RequestRefused(BadInput):
    """A request can never be served here, or not now; the message says why."""


class QueueFull(RequestRefused):
    """As many requests wait as may; try again later."""


def longest_total(seq: Sequence, config: SchedulerConfig, manager: BlockManager) -> int:
    """Most tokens that a request may come to, prompt and output together.

    A request without ``max_tokens`` goes on to the model's length, or as far as the pool alone
    would take it.

    Raises:
        RequestRefused: its prompt is longer than the model's length allows, or all of it would not
            fit even into an empty pool.
    """
    prompt = seq.num_prompt_tokens
    if prompt >= config.max_model_len:
        raise RequestRefused(
            f"the prompt has {prompt} tokens; with max_model_len {config.max_model_len} it may "
            f"have {config.max_model_len - 1}, since one token at least is generated"
        )
    pool = max(manager.num_blocks * manager.block_size - config.overshoot_tokens, 0)
    wanted = seq.params.max_tokens
    if wanted is None:
        longest = max(min(config.max_model_len, pool), prompt + 1)
    else:
        longest = min(config.max_model_len, prompt + wanted)
    if longest > pool:
        raise RequestRefused(
            f"{prompt} prompt tokens and {longest - prompt} to generate need "
            f"{manager.blocks_for(longest + config.overshoot_tokens)} KV blocks; the pool has "
            f"{manager.num_blocks}, enough for {pool} tokens; shorten the prompt, lower "
            f"max_tokens, or give the pool more memory"
        )
    return longest


def admission_tokens(seq: Sequence, config: SchedulerConfig) -> int:
    """Tokens that a request needs blocks for to be admitted: first drafts go behind its prompt."""
    return seq.num_tokens + max(config.num_drafts - 1, 0)
