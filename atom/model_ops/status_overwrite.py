"""What the host reads when a next-step tensor was written over the status block before its copy.

The caching allocator rounds every small request up to 512 bytes, so a tensor of one element takes
the same block as a verdict of many. Its kernel writes only the tensor's own bytes: behind them the
old verdict survives, and the host reads a mixture of two steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atom.errors import BadInput

#: the allocator's smallest block, and the step of every small size (PyTorch)
BLOCK_BYTES = 512
#: the step number in front of a payload and behind it, 8 bytes each
EPOCH_TAG_BYTES = 16


class Fit(StrEnum):
    """How a candidate tensor compares with the logged values."""

    FITS = "fits"
    HEAD_DIFFERS = "first value differs"
    TAIL_DIFFERS = "later values differ"


@dataclass(frozen=True)
class NextTensor:
    """A tensor that the next step could have put into the freed block.

    Attributes:
        name: what the tensor is.
        values: its first values; later ones cannot reach the logged part.
        mixed_batch: whether it exists only where prefill and decode share a batch.
    """

    name: str
    values: tuple[int, ...]
    mixed_batch: bool = False


def candidate_tensors(token_budget: int, batch_size: int) -> tuple[NextTensor, ...]:
    """Prefill metadata that a step with a full token budget prepares, one entry a content."""
    ones = (1,) * min(max(batch_size - 1, 2), 63)
    return (
        NextTensor("one number: tokens of the step or of its one request", (token_budget,)),
        NextTensor("tokens, then 1 request", (token_budget, 1)),
        NextTensor("tokens, then a context of twice as many", (token_budget, 2 * token_budget)),
        NextTensor("cumulative lengths [0, tokens]", (0, token_budget)),
        NextTensor("number of prefill requests", (1,)),
        NextTensor("positions 0, 1, 2, ...", (0, 1, 2, 3)),
        NextTensor("the token count in every element", (token_budget,) * (1 + len(ones))),
        NextTensor("tokens of each request, decodes behind", (token_budget, *ones), True),
    )


def host_reads(verdict: NDArray[np.generic], written: NDArray[np.generic]) -> NDArray[np.generic]:
    """The verdict as the host reads it after ``written`` was stored at the start of its block.

    Args:
        verdict: 1-D, the step's own values.
        written: 1-D, the next step's tensor; its bytes past the verdict's end are not read.

    Returns:
        Shape and dtype of ``verdict``; bytes in little-endian order.
    """
    block = bytearray(verdict.astype(verdict.dtype.newbyteorder("<")).tobytes())
    new = written.astype(written.dtype.newbyteorder("<")).tobytes()[: len(block)]
    block[: len(new)] = new
    return np.frombuffer(bytes(block), dtype=verdict.dtype.newbyteorder("<"))


def compare(read: NDArray[np.generic], logged: ArrayLike) -> Fit:
    """Compare the first values that the host reads with the logged ones."""
    expected = np.asarray(logged)
    if read[0] != expected[0]:
        return Fit.HEAD_DIFFERS
    return Fit.FITS if np.array_equal(read[: len(expected)], expected) else Fit.TAIL_DIFFERS


@dataclass(frozen=True)
class Reading:
    """One candidate written over one verdict, and what the host makes of it.

    Attributes:
        tensor: the candidate.
        dtype: its dtype.
        verdict_dtype: the verdict's dtype.
        bytes_written: bytes of the candidate that fall on the verdict.
        read: the first values that the host reads.
        fit: comparison with the log.
    """

    tensor: NextTensor
    dtype: str
    verdict_dtype: str
    bytes_written: int
    read: tuple[int, ...]
    fit: Fit


def enumerate_readings(
    logged: tuple[int, ...],
    token_budget: int,
    batch_size: int,
    *,
    dtypes: tuple[str, ...] = ("int16", "int32", "int64", "float32", "float64"),
    verdict_dtypes: tuple[str, ...] = ("int32", "int64"),
    surviving: int = 1,
) -> list[Reading]:
    """Write every candidate in every dtype over a verdict of ``surviving`` values.

    Args:
        logged: first values of the log.
        token_budget: tokens of the next prefill step.
        batch_size: requests of the verdict; at least as many as ``logged`` has values.
        dtypes: dtypes of the candidates. One that cannot hold the content is left out.
        verdict_dtypes: dtypes of the verdict (not published).
        surviving: the verdict's own value in every element.

    Raises:
        BadInput: if the verdict is shorter than the log.
    """
    if batch_size < len(logged):
        raise BadInput(
            f"status overwrite: {len(logged)} logged values need a batch of at least "
            f"{len(logged)} requests, got {batch_size}"
        )
    readings = []
    for tensor in candidate_tensors(token_budget, batch_size):
        for dtype in dtypes:
            kind = np.dtype(dtype)
            if kind.kind == "i" and max(tensor.values) > np.iinfo(kind).max:
                continue
            written = np.array(tensor.values, dtype=kind)
            for verdict_dtype in verdict_dtypes:
                verdict = np.full(batch_size, surviving, dtype=verdict_dtype)
                read = host_reads(verdict, written)
                readings.append(
                    Reading(
                        tensor=tensor,
                        dtype=dtype,
                        verdict_dtype=verdict_dtype,
                        bytes_written=min(written.nbytes, verdict.nbytes),
                        read=tuple(int(value) for value in read[: len(logged)]),
                        fit=compare(read, logged),
                    )
                )
    return readings


def share_of_ones(mean_length: float) -> float:
    """Share of true bonus counts that are 1 when a mean length is forced.

    The sampler is taken to mix the two whole counts next to ``mean_length - 1``. A mean of 2.32
    then means a bonus of 1 in 68% of cases and of 2 in 32%.

    Raises:
        BadInput: if the mean length is below 1.
    """
    if not mean_length >= 1:
        raise BadInput(
            f"mean length: at least 1 (the token that is always kept), got {mean_length}"
        )
    return max(0.0, 1.0 - abs(mean_length - 2.0))


def chance_of_ones(mean_length: float, values: ArrayLike) -> NDArray[np.float64]:
    """Probability that so many surviving values, drawn one by one, are all 1."""
    return np.asarray(share_of_ones(mean_length) ** np.asarray(values, dtype=np.float64))


def payload_bytes(
    batch_size: ArrayLike, *, rows: int = 2, element_bytes: int = 4, tagged: bool = False
) -> NDArray[np.int64]:
    """Bytes of a status verdict of ``rows`` values a request, with or without the epoch tags."""
    tags = EPOCH_TAG_BYTES if tagged else 0
    return np.asarray(np.asarray(batch_size, dtype=np.int64) * rows * element_bytes + tags)


def block_bytes(payload: ArrayLike) -> NDArray[np.int64]:
    """Size of the block that the caching allocator gives for ``payload`` bytes."""
    size = np.asarray(payload, dtype=np.int64)
    return np.asarray(np.maximum(-(-size // BLOCK_BYTES), 1) * BLOCK_BYTES)


def largest_batch(
    *, blocks: int = 1, rows: int = 2, element_bytes: int = 4, tagged: bool = False
) -> int:
    """Largest batch whose verdict still fits into ``blocks`` steps of 512 bytes."""
    tags = EPOCH_TAG_BYTES if tagged else 0
    return math.floor((blocks * BLOCK_BYTES - tags) / (rows * element_bytes))
