"""What the host sends for a decode step: one block of bytes, and its parts on either side.

A copy of a few bytes costs the host and the device about as much as one of some thousand. So the
inputs of decode steps lie side by side in one block of the device, a pinned slot is laid out alike,
and a step is one copy from the block's beginning. Block tables stand last, leading rows first:
the copy ends behind the last row that the device lacks, or in front of all of them.
"""

from __future__ import annotations

import math
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = TypeVar("Array")
#: bytes; kernels are compiled for pointers that are multiples of 16
_ALIGNMENT = 128
#: bytes of block tables that travel with the rest; more are sent ahead, on their own, because the
#: device stands still while the one copy behind the status runs: at 50 GB/s these take 1.3 us
MOST_TABLE_BYTES = 64 * 1024


class InputParts(NamedTuple, Generic[Array]):
    """Parts of one block, in its order. ``M`` is ``max_num_seqs``.

    Attributes:
        metadata: int32 ``[4, M]``; see :mod:`atom.model_ops.decode_inputs`.
        forced_bonus: int32 ``[M]``.
        temperature_top_p: float32 ``[2, M]``.
        top_k: int32 ``[M]``.
        seeds: int64 ``[M]``.
        block_tables: int32 ``[M, max_blocks]``.
    """

    metadata: Array
    forced_bonus: Array
    temperature_top_p: Array
    top_k: Array
    seeds: Array
    block_tables: Array


class InputLayout:
    """Where the parts lie.

    Args:
        max_rows: ``M``.
        max_blocks: columns of the block tables.

    Attributes:
        nbytes: of the block.
        sampling: the bytes of temperature and top-p, top-k and seeds.
    """

    def __init__(self, max_rows: int, max_blocks: int) -> None:
        row = (max_rows,)
        self._parts: InputParts[tuple[tuple[int, ...], torch.dtype]] = InputParts(
            ((4, max_rows), torch.int32),
            (row, torch.int32),
            ((2, max_rows), torch.float32),
            (row, torch.int32),
            (row, torch.int64),
            ((max_rows, max_blocks), torch.int32),
        )
        offsets, end = [], 0
        for shape, dtype in self._parts:
            offsets.append(end)
            end = _aligned(end + math.prod(shape) * dtype.itemsize, _ALIGNMENT)
        self._offsets = InputParts(*offsets)
        self._row_bytes = max_blocks * torch.int32.itemsize
        self.nbytes = end
        self.sampling = slice(self._offsets.temperature_top_p, self._offsets.block_tables)

    def tensors(self, raw: Tensor) -> InputParts[Tensor]:
        """Views of ``raw``, uint8 ``[nbytes]``."""
        views = []
        for (shape, dtype), start in zip(self._parts, self._offsets, strict=True):
            end = start + math.prod(shape) * dtype.itemsize
            views.append(raw[start:end].view(dtype).view(shape))
        return InputParts(*views)

    def arrays(self, raw: Tensor) -> InputParts[NDArray[Any]]:
        """The same of host memory, for NumPy."""
        return InputParts(*(view.numpy() for view in self.tensors(raw)))

    def metadata(self, values: NDArray[np.uint8]) -> NDArray[np.int32]:
        """The metadata within the leading bytes of a block."""
        shape, dtype = self._parts.metadata
        return values[: math.prod(shape) * dtype.itemsize].view(np.int32).reshape(shape)

    def bytes_with(self, table_rows: int) -> int:
        """Leading bytes of the block that hold everything and so many rows of block tables."""
        return _aligned(self._offsets.block_tables + table_rows * self._row_bytes, 8)

    def travels_along(self, table_rows: int) -> bool:
        """Whether so many rows of block tables are few enough for the one copy."""
        return table_rows * self._row_bytes <= MOST_TABLE_BYTES


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
