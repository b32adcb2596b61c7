"""One request as the engine sees it: what was asked, its tokens, and where its state lies."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from atom.errors import BadInput

_MOST_LOGPROBS = 20
_MOST_STOP_IDS = 1024


class SequenceStatus(StrEnum):
    """Where a sequence stands."""

    WAITING = "waiting"  #: in the queue; holds no blocks and no group (preempted ones too)
    RUNNING = "running"  #: holds blocks and a group
    FINISHED = "finished"  #: holds nothing; its late rows are ignored


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  #: an end-of-sequence or stop token
    LENGTH = "length"  #: max_tokens or the model's length
    ABORT = "abort"  #: cancelled by its client
    ERROR = "error"  #: failed; other requests go on


def _number(name: str, value: object, low: float, high: float, *, whole: bool) -> None:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "a whole number" if whole else "a number"
        raise BadInput(f"{name}: expected {kind}, got {value!r}")
    if not low <= value <= high:  # also refuses nan
        top = "" if math.isinf(high) else f" to {high:g}"
        start = f"{low:g}" if top else f"{low:g} or more"
        raise BadInput(f"{name}: expected {start}{top}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are drawn and when it ends. Stop strings belong to the server.

    Attributes:
        max_tokens: most tokens to generate; ``None`` goes on to the longest that fits.
        temperature: 0 is greedy.
        top_k: draw from this many likeliest tokens; 0 or -1 draws from all.
        top_p: draw from the likeliest tokens that hold this share of the mass.
        seed: of the request's own random stream; ``None`` leaves the choice to the engine.
        stop_token_ids: tokens that end the request; they stay in its output.
        ignore_eos: whether the model's own end-of-sequence tokens end it not.
        logprobs: ``True`` gives the sampled tokens' logprobs; a number, that many of the likeliest
            beside them.

    Raises:
        BadInput: a value is not of its kind or range; the message names it.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool | int = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _number("max_tokens", self.max_tokens, 1, 2**31 - 1, whole=True)
        _number("temperature", self.temperature, 0, 100, whole=False)
        _number("top_k", self.top_k, -1, 2**31 - 1, whole=True)
        _number("top_p", self.top_p, 0, 1, whole=False)
        if self.top_p == 0:
            raise BadInput("top_p: expected more than 0, got 0; temperature 0 is greedy")
        if self.seed is not None:
            _number("seed", self.seed, -(2**63), 2**63 - 1, whole=True)
        ids = self.stop_token_ids
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
            raise BadInput(f"stop_token_ids: expected a list of token ids, got {ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        if len(self.stop_token_ids) > _MOST_STOP_IDS:
            raise BadInput(
                f"stop_token_ids: expected {_MOST_STOP_IDS} or fewer, "
                f"got {len(self.stop_token_ids)}"
            )
        for number, token in enumerate(self.stop_token_ids):
            _number(f"stop_token_ids[{number}]", token, 0, 2**31 - 1, whole=True)
        if not isinstance(self.ignore_eos, bool):
            raise BadInput(f"ignore_eos: expected true or false, got {self.ignore_eos!r}")
        if not isinstance(self.logprobs, bool):
            _number("logprobs", self.logprobs, 0, _MOST_LOGPROBS, whole=True)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the sampled tokens' logprobs are to be returned."""
        return self.logprobs is not False

    @property
    def top_logprobs(self) -> int:
        """How many of the likeliest tokens stand beside each sampled one."""
        return 0 if isinstance(self.logprobs, bool) else self.logprobs


def token_array(ids: Iterable[int], what: str = "prompt") -> array[int]:
    """Token ids as an ``array("q")``, which NumPy and torch read without a copy.

    Raises:
        BadInput: no ids, or one of them is no token id.
    """
    try:
        tokens = ids if isinstance(ids, array) and ids.typecode == "q" else array("q", ids)
    except (TypeError, OverflowError):
        raise BadInput(f"{what}: expected a list of token ids (whole numbers)") from None
    if not tokens:
        raise BadInput(f"{what}: expected at least one token, got none")
    if (least := int(np.frombuffer(tokens, dtype=np.int64).min())) < 0:
        raise BadInput(f"{what}: token ids are 0 or more, got {least}")
    return tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """One request: the fields above the line are its own, the rest are kept by the scheduler.

    Attributes:
        request_id: names the request; one at a time may bear it.
        token_ids: prompt, then output. An array given here is taken over, not copied.
        params: how to sample, when to end.
        cache_salt: requests share cached prefixes only with those of the same salt.
        block_hashes: chained hashes of the full blocks, computed as they are needed. A caller that
            knows them (a simulator) may pass them.
        num_drafts: drafts that its next decode step verifies (``ell``); ``None`` until it is added,
            then the engine's draft tokens.
        num_prompt_tokens: tokens of the prompt as it came.
        num_computed_tokens: tokens whose KV and state are in the caches, confirmed.
        num_cached_tokens: tokens of them that came from the prefix cache at its first admission.
        pending_query_len: query length of the launched decode step whose status is not received.
        num_pending_outputs: launched steps whose ids are not received.
        num_bonus: accepted drafts of the last confirmed step, as its status said.
        block_table: KV blocks in order.
        state_group: its group of recurrent slots.
        restore_slot: checkpoint that its next launch copies into the group.
        num_published_blocks: leading blocks that are in the prefix cache or came from it.
        cache_step: newest step whose work it took from the prefix cache; 0 for none.
        publish_step: last step whose work on its prompt is, or will be, published; 0 for none.
        branch_tokens: boundary at which it takes a checkpoint since another request's prompt
            parts from it there; 0 for none.
        max_total_tokens: prompt and output together at most.
        arrival: order of arrival.
        generation: how often it was put back; a row of an older generation is dead.
        arrival_time, first_scheduled_time, first_token_time, finish_time: by the scheduler's
            clock, in seconds; ``None`` until then.
    """

    request_id: int
    token_ids: array[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    block_hashes: list[bytes] = field(default_factory=list)
    num_drafts: int | None = None
    arrival_time: float | None = None

    num_prompt_tokens: int = field(init=False)
    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    pending_query_len: int = field(default=0, init=False)
    num_pending_outputs: int = field(default=0, init=False)
    num_bonus: int = field(default=0, init=False)
    block_table: list[int] = field(default_factory=list, init=False)
    state_group: int | None = field(default=None, init=False)
    restore_slot: int | None = field(default=None, init=False)
    num_published_blocks: int = field(default=0, init=False)
    cache_step: int = field(default=0, init=False)
    publish_step: int = field(default=0, init=False)
    branch_tokens: int = field(default=0, init=False)
    max_total_tokens: int = field(default=0, init=False)
    arrival: int = field(default=-1, init=False)
    generation: int = field(default=0, init=False)
    first_scheduled_time: float | None = field(default=None, init=False)
    first_token_time: float | None = field(default=None, init=False)
    finish_time: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.token_ids = token_array(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and received output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Received output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as it came."""
        return self.token_ids[: self.num_prompt_tokens].tolist()

    @property
    def output_token_ids(self) -> list[int]:
        """Output received so far."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def num_accepted_tokens(self) -> int:
        """What the kernels add to the state's offset: the last step's bonus, plus 1.

        It is what the status said, in range or not: the guard in the kernels judges it.
        """
        return self.num_bonus + 1

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.status is SequenceStatus.FINISHED

    def most_computed_tokens(self, step_tokens: int) -> int:
        """Upper bound of the computed tokens, from the tokens received.

        Args:
            step_tokens: most tokens that a step whose ids are pending can have confirmed.
        """
        return len(self.token_ids) - 1 + step_tokens * self.num_pending_outputs

    def append(self, ids: Iterable[int], eos: frozenset[int]) -> FinishReason | None:
        """Take sampled ids up to the first that is negative or ends it; returns why it ends."""
        params, tokens = self.params, self.token_ids
        for token in ids:
            if token < 0:
                break
            tokens.append(token)
            if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
                return FinishReason.STOP
            if len(tokens) >= self.max_total_tokens:
                return FinishReason.LENGTH
        return None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}, {self.status}, prompt {self.num_prompt_tokens}, "
            f"output {self.num_output_tokens}, computed {self.num_computed_tokens})"
        )
