"""Host-bound payloads and the epoch tag that brackets their bytes.

Layout of one allocation::

    int64 tag | data, padded to 8 bytes | int64 tag | rest (never copied to the host)
    <------------- what travels to the host ------->

The tag names the step and the kind of payload. Host code reads both tags after the copy's event: if
the block was overwritten before the copy ran, at least one of them is not the expected one. This
finds a stale count that is *in range*, which no bounds check can, and costs no synchronisation.

Both tags are written twice. A payload is *opened* before its data (:meth:`Payload.open`, queued
where it is made) and *stamped* behind it: tags written behind the data alone leave a window in
which the next step's data lies between this step's tags. What a copy reads last is then a word that
the next writer changed first. So a copy that reads at least one tag after all of the data, in
whatever order it reads the rest, cannot bring foreign data between two right tags.

What remains: a copy that reads both ends before the middle (the threads of a kernel promise no
order) while the next step goes through its opening and on to its data; a writer that is no payload
and writes into the middle alone; and a producer that is not opened before the kernel that writes
its data (a kernel that writes data and tags at once is fine, behind an opening of its own: inside
one kernel nothing orders the two). The tags are a net. A transfer is right by edge (c) alone.

``rest`` is for a tensor of which only the first rows go to the host: the rejection sampler's
verdict keeps its status rows as ``data`` and its other rows as ``rest``, in the same block, so the
copied range is one contiguous slice with a tag at each end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atom.device.interface import Device, Kernel, Stream
from atom.errors import AtomError, StalePayload

if TYPE_CHECKING:
    from atom.transfer.pinned_ring import PinnedSlot

TAG_BYTES = 8
_MAGIC = 0x4154
_OPEN_MAGIC = 0x414F
_STEP_BITS = 40


class PayloadKind(IntEnum):
    """What a payload holds; part of its tag, since one step sends several payloads."""

    OTHER = 0
    SPEC_STATUS = 1
    TOKEN_IDS = 2
    LOGPROBS = 3
    DRAFT_IDS = 4
    ELL = 5

    # an enum hashes its name, in Python: layouts are looked up several times a step
    __hash__ = int.__hash__

    @property
    def label(self) -> str:
        """The kind in words, for messages."""
        return "payload" if self is PayloadKind.OTHER else self.name.lower().replace("_", " ")


def epoch_tag(step: int, kind: PayloadKind = PayloadKind.OTHER) -> int:
    """The int64 tag of a step's payload: 16 bits of a magic number, 8 of kind, 40 of step.

    Raises:
        ValueError: ``step`` is negative or needs more than 40 bits.
    """
    if step < 0 or step >> _STEP_BITS:
        raise ValueError(f"step {step} is outside 0..{2**_STEP_BITS - 1}")
    return (_MAGIC << 48) | (kind << _STEP_BITS) | step


def open_tag(step: int, kind: PayloadKind = PayloadKind.OTHER) -> int:
    """The int64 that stands in both tags while the payload is being written.

    Raises:
        ValueError: as :func:`epoch_tag`.
    """
    return epoch_tag(step, kind) ^ ((_MAGIC ^ _OPEN_MAGIC) << 48)


def split_tag(tag: int) -> tuple[int, PayloadKind] | None:
    """Step and kind of a tag, or ``None`` if the eight bytes are not a tag at all."""
    return _split(tag, _MAGIC)


def split_open_tag(tag: int) -> tuple[int, PayloadKind] | None:
    """Step and kind of the tag of an open payload, or ``None`` if it is no such tag."""
    return _split(tag, _OPEN_MAGIC)


def _split(tag: int, magic: int) -> tuple[int, PayloadKind] | None:
    if tag < 0 or tag >> 48 != magic:
        return None
    kind = (tag >> _STEP_BITS) & 0xFF
    if kind > max(PayloadKind):
        return None
    return tag & ((1 << _STEP_BITS) - 1), PayloadKind(kind)


def _padded(size: int) -> int:
    return (size + 7) // 8 * 8


@dataclass(frozen=True)
class PayloadLayout:
    """Where the parts of a payload lie. Get one from :func:`payload_layout`, which caches it.

    Attributes:
        kind: what the payload holds.
        shape: shape of the data.
        dtype: type of the data and of the rest.
        rest_shape: shape of the rows that stay on the device, or ``None``.
        tagged: whether the tags are there (off to study untagged layouts).
        data_offset: bytes before the data.
        host_bytes: bytes that travel to the host, tags included; a multiple of 8.
        total_bytes: bytes of the device allocation.
    """

    kind: PayloadKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    rest_shape: tuple[int, ...] | None
    tagged: bool
    data_offset: int = field(init=False)
    host_bytes: int = field(init=False)
    total_bytes: int = field(init=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if any(extent < 0 for extent in self.shape + (self.rest_shape or ())):
            raise ValueError(f"negative extent in {self.shape} or {self.rest_shape}")
        size = self.dtype.itemsize
        if 8 % size:
            raise ValueError(f"{self.dtype} has {size} bytes an element; at most 8 are supported")
        tag = TAG_BYTES if self.tagged else 0
        host_bytes = _padded(math.prod(self.shape) * size) + 2 * tag
        rest_bytes = _padded(math.prod(self.rest_shape) * size) if self.rest_shape else 0
        object.__setattr__(self, "data_offset", tag)
        object.__setattr__(self, "host_bytes", host_bytes)
        object.__setattr__(self, "total_bytes", host_bytes + rest_bytes)
        whole = (self.kind, self.shape, self.dtype, self.rest_shape, self.tagged)
        object.__setattr__(self, "_hash", hash(whole))

    def __hash__(self) -> int:
        return self._hash

    def data(self, raw: Tensor) -> Tensor:
        """The data's view of ``raw``: uint8, at least ``host_bytes`` long."""
        return self._part(raw, self.data_offset, self.shape)

    def rest(self, raw: Tensor) -> Tensor | None:
        """The view of the rows that stay on the device, or ``None`` without such rows."""
        if self.rest_shape is None:
            return None
        return self._part(raw, self.host_bytes, self.rest_shape)

    def _part(self, raw: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
        end = offset + math.prod(shape) * self.dtype.itemsize
        return raw[offset:end].view(self.dtype).view(shape)

    def tags(self, raw: Tensor) -> Tensor:
        """Both tags as one strided int64 view, so that one launch writes them."""
        words = raw[: self.host_bytes].view(torch.int64)
        return words[:: words.numel() - 1]


@lru_cache(maxsize=4096)
def payload_layout(
    kind: PayloadKind,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rest_shape: tuple[int, ...] | None = None,
    tagged: bool = True,
) -> PayloadLayout:
    """The cached layout of such a payload. See :class:`PayloadLayout`."""
    return PayloadLayout(kind, shape, dtype, rest_shape, tagged)


def write_tags(reads: Sequence[Tensor], writes: Sequence[Tensor], tag: int) -> None:
    """Kernel body: write ``tag`` into every element of ``writes[0]``."""
    writes[0].fill_(tag)


STAMP = Kernel("stamp_epoch_tag", write_tags)


class Payload:
    """One step's tensor that goes to the host, with its tags.

    Attributes:
        layout: where its parts lie.
        step: the step that produces it.
        raw: uint8 ``[total_bytes]``, the whole allocation (``[host_bytes]`` in a pinned slot).
        rest: rows that stay on the device, or ``None``.
        slot: the pinned slot that ``raw`` aliases, or ``None`` for a device block.
    """

    __slots__ = ("__weakref__", "_data", "layout", "raw", "rest", "slot", "step")

    def __init__(
        self,
        layout: PayloadLayout,
        step: int,
        raw: Tensor,
        *,
        rest: Tensor | None = None,
        slot: PinnedSlot | None = None,
    ) -> None:
        self.layout = layout
        self.step = step
        self.raw = raw
        self._data: Tensor | None = None
        self.rest = rest if slot is not None else layout.rest(raw)
        self.slot = slot

    @property
    def data(self) -> Tensor:
        """The producer's view, ``layout.shape`` of ``layout.dtype``; made when it is asked for.

        Its three views cost more than the send, and a kernel that writes data and tags at once
        takes ``raw``.
        """
        if self._data is None:
            self._data = self.layout.data(self.raw)
        return self._data

    @property
    def copied(self) -> Tensor:
        """uint8 ``[host_bytes]``: exactly what travels to the host."""
        layout = self.layout
        if layout.rest_shape is None:
            return self.raw
        return self.raw[: layout.host_bytes]

    def open(self, device: Device, *, stream: Stream | None = None) -> None:
        """Queue one launch that marks both tags as not written yet, before any data.

        Whoever makes a payload does it, unless its producer does. Without tags it does nothing.
        """
        if self.layout.tagged:
            self._mark(device, open_tag(self.step, self.layout.kind), stream)

    def stamp(self, device: Device, *, stream: Stream | None = None) -> None:
        """Queue one launch that writes both tags. Call it on the producer's stream, after the data.

        Without tags in the layout it does nothing.
        """
        if self.layout.tagged:
            self._mark(device, epoch_tag(self.step, self.layout.kind), stream)

    def _mark(self, device: Device, tag: int, stream: Stream | None) -> None:
        tags = self.layout.tags(self.raw)
        device.launch(STAMP, (), (tags,), scalars=(tag,), stream=stream)


class WrongPayload(AtomError):
    """A payload of one kind was handed to what sends another kind."""


def refuse_other_kind(payload: Payload, kind: PayloadKind, who: str) -> None:
    """Check that ``payload`` is what ``who`` sends.

    Raises:
        WrongPayload: it is of another kind; nothing has been queued.
    """
    found = payload.layout.kind
    if found is not kind:
        raise WrongPayload(
            f"{who} takes {kind.label} and was given {found.label} of step {payload.step} "
            f"{list(payload.layout.shape)}: send it where it was made"
        )


def tag_fault(layout: PayloadLayout, step: int, first: int, last: int) -> str | None:
    """What is wrong with the tags that the host found, in words; ``None`` if nothing is.

    Args:
        layout: the expected layout.
        step: the expected step.
        first, last: the two int64 words at the ends of the payload.
    """
    expected = epoch_tag(step, layout.kind)
    if first == expected and last == expected:
        return None
    label = layout.kind.label
    detail = f"first tag 0x{first & (2**64 - 1):016x}, last 0x{last & (2**64 - 1):016x}"
    found_first, found_last = _tag_words(first, layout.kind), _tag_words(last, layout.kind)
    if found_first is None and found_last is None:
        return f"{label} carries no step at all where step {step} was expected: {detail}"
    if found_first == found_last:
        return f"{label} carries {found_first} where step {step} was expected ({detail})"
    return (
        f"{label} carries {found_first or 'no step'} in its first tag and "
        f"{found_last or 'no step'} in its last where step {step} was expected ({detail})"
    )


def _tag_words(tag: int, kind: PayloadKind) -> str | None:
    found, unfinished = split_tag(tag), split_open_tag(tag)
    which = found or unfinished
    if which is None:
        return None
    of_kind = f" of {which[1].label}" if which[1] != kind else ""
    return f"step {which[0]}{of_kind}" + (", still being written," if unfinished else "")


def stale_payload(fault: str) -> StalePayload:
    """The error of a payload whose tags are wrong, with what to do about it."""
    return StalePayload(
        f"{fault}. The source's bytes were written again before its copy ran, or the host read "
        "before the copy ended, or the payload was never stamped. "
        "Check that every payload is stamped behind its data, that the engine runs "
        "the 'hold' protocol and that no static buffer is sent without its next writer waiting on "
        "the copy's event."
    )


def read_payload(host_raw: Tensor, layout: PayloadLayout, step: int) -> Tensor:
    """The payload's data, copied out of a host buffer whose copy has been waited on.

    Args:
        host_raw: uint8 host tensor, at least ``layout.host_bytes`` long.
        layout: what was sent.
        step: the step that was sent.

    Raises:
        StalePayload: the tags name another step, another kind or none; both are in the message.
    """
    if layout.tagged:
        first, last = layout.tags(host_raw).tolist()
        fault = tag_fault(layout, step, first, last)
        if fault is not None:
            raise stale_payload(fault)
    return layout.data(host_raw).clone()
