"""Kernels between the engine's pools and contiguous staging blocks.

The content of a KV entry is: for each block of its chunk, and each attention layer, the keys of the
block, then its values; behind that the same of the MTP layer. That of a state image is the
conv rows of all layers, then their recurrent states.

Two pairs of KV kernels give the same bytes. The ``rows`` kernels move all blocks at once by index,
in one launch; they name the whole pool as their operand. The ``blocks`` kernels name each block, so
that what watches the virtual device sees exactly what is read and written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atom.device.interface import Kernel

Tensors = Sequence[Tensor]


def words_of(pool: Tensor) -> Tensor:
    """A KV pool ``[layers, 2, blocks, block size, HKV, DH]`` as rows ``[layers * 2 * blocks, w]``.

    A row is one block's keys or values in one layer, in words of 8 bytes if they fit, else bytes.
    """
    rows = pool.shape[0] * 2 * pool.shape[2]
    row_bytes = pool.numel() * pool.element_size() // rows
    kind = torch.int64 if row_bytes % 8 == 0 else torch.uint8
    return pool.view(torch.uint8).view(rows, row_bytes).view(kind)


def row_numbers(layers: int, num_blocks: int, blocks: Sequence[int]) -> NDArray[np.int64]:
    """Rows of :func:`words_of` that hold ``blocks``, in the order of an entry's content."""
    pairs = np.arange(2 * layers, dtype=np.int64) * num_blocks
    numbers = np.asarray(blocks, dtype=np.int64)[:, None] + pairs[None, :]
    return np.ascontiguousarray(numbers.reshape(-1))


def pack_rows(reads: Tensors, writes: Tensors) -> None:
    """Kernel body: rows ``reads[0]`` of the pool words ``reads[1]`` into staging bytes."""
    rows, words = reads
    torch.index_select(words, 0, rows, out=_as_words(writes[0], words))


def unpack_rows(reads: Tensors, writes: Tensors) -> None:
    """Kernel body: staging bytes ``reads[1]`` into rows ``reads[0]`` of the pool words."""
    rows, staging = reads
    words = writes[0]
    words.index_copy_(0, rows, _as_words(staging, words))


def _as_words(staging: Tensor, words: Tensor) -> Tensor:
    return staging.view(words.dtype).view(-1, words.shape[1])


def pack_blocks(reads: Tensors, writes: Tensors) -> None:
    """Kernel body: blocks ``[layers, 2, block size, HKV, DH]`` into staging bytes, in order."""
    staging = writes[0].view(reads[0].dtype).view(len(reads), *reads[0].shape)
    for number, block in enumerate(reads):
        staging[number].copy_(block)


def unpack_blocks(reads: Tensors, writes: Tensors) -> None:
    """Kernel body: staging bytes into blocks ``[layers, 2, block size, HKV, DH]``, in order."""
    staging = reads[0].view(writes[0].dtype).view(len(writes), *writes[0].shape)
    for number, block in enumerate(writes):
        block.copy_(staging[number])


def pack_state(reads: Tensors, writes: Tensors) -> None:
    """Kernel body: conv rows ``[layers, W - 1, D]``, states ``[layers, HV, K, V]`` into bytes."""
    conv, recurrent = reads
    first, last = _state_parts(writes[0], conv, recurrent)
    first.copy_(conv)
    last.copy_(recurrent)


def unpack_state(reads: Tensors, writes: Tensors) -> None:
    """Kernel body: the other way."""
    conv, recurrent = writes
    first, last = _state_parts(reads[0], conv, recurrent)
    conv.copy_(first)
    recurrent.copy_(last)


def _state_parts(staging: Tensor, conv: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor]:
    cut = conv.numel() * conv.element_size()
    rest = staging[padded(cut) :]
    return (
        staging[:cut].view(conv.dtype).view(conv.shape),
        rest.view(recurrent.dtype).view(recurrent.shape),
    )


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up so that any type may begin behind them."""
    return -(-nbytes // 16) * 16


PACK_ROWS = Kernel("offload_pack_rows", pack_rows)
UNPACK_ROWS = Kernel("offload_unpack_rows", unpack_rows)
PACK_BLOCKS = Kernel("offload_pack_blocks", pack_blocks)
UNPACK_BLOCKS = Kernel("offload_unpack_blocks", unpack_blocks)
PACK_STATE = Kernel("offload_pack_state", pack_state)
UNPACK_STATE = Kernel("offload_unpack_state", unpack_state)
