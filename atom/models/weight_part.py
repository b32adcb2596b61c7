"""Where each tensor of a checkpoint lives in a model whose projections are merged for speed.

A merged parameter holds several checkpoint tensors, row beside row, in an order that suits the
operators. A :class:`WeightPart` says which rows are whose, so that loading and saving go by the
checkpoint's own names and orders.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atom.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One checkpoint tensor.

    Attributes:
        parameter: the parameter that holds it.
        shape: its shape in the checkpoint.
        rows: int64 ``[shape[0]]`` on the CPU, the parameter's row of each of its rows; ``None`` if
            it is the whole parameter (but for axes of length 1).
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    rows: Tensor | None = None

    def load(self, tensor: Tensor) -> None:
        """Copy a checkpoint tensor of :attr:`shape` into the parameter."""
        target = self.parameter.data
        value = tensor.to(device=target.device, dtype=target.dtype)
        if self.rows is None:
            target.copy_(value.reshape(target.shape))
        else:
            target.index_copy_(0, self.rows.to(target.device), value)

    def save(self) -> Tensor:
        """The checkpoint tensor: a copy on the CPU, in the parameter's dtype."""
        source = self.parameter.data.cpu()
        value = source.clone() if self.rows is None else source.index_select(0, self.rows)
        return value.reshape(self.shape).contiguous()


def plain(parameter: nn.Parameter, *shape: int) -> WeightPart:
    """A checkpoint tensor that is a whole parameter; ``shape`` where it has axes of length 1."""
    return WeightPart(parameter, shape or tuple(parameter.shape))


def merged(parameter: nn.Parameter, *sizes: int) -> list[WeightPart]:
    """Checkpoint tensors of so many rows each, that stand one behind the other."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        WeightPart(
            parameter,
            (size, *parameter.shape[1:]),
            torch.arange(start, start + size),
        )
        for start, size in zip(starts, sizes, strict=True)
    ]


def interleaved_rows(groups: int, sizes: tuple[int, ...], starts: tuple[int, ...]) -> Tensor:
    """Rows of a tensor whose heads are grouped, once each kind of row stands together.

    The checkpoint holds ``groups`` groups, each of ``sizes[0]`` rows of the first kind, then
    ``sizes[1]`` of the second, and so on. Kind ``n`` goes to rows ``starts[n]`` and on, group after
    group.

    Returns:
        int64 ``[groups * sum(sizes)]``, the new row of each checkpoint row.
    """
    columns = [
        start + torch.arange(groups * size).reshape(groups, size)
        for size, start in zip(sizes, starts, strict=True)
    ]
    return torch.cat(columns, dim=1).reshape(-1)


def qkvz_ba_parts(config: ModelConfig, parameter: nn.Parameter) -> tuple[WeightPart, WeightPart]:
    """``in_proj_qkvz`` and ``in_proj_ba`` within rows ordered q, k, v, z, b, a.

    In the checkpoint both are grouped by key head: its query, its key, the values and output gates
    of its value heads; and their betas and decays.
    """
    heads = config.linear_num_key_heads
    ratio = config.linear_num_value_heads // heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim * ratio
    v = 2 * config.key_dim
    z = config.conv_dim
    b = z + config.value_dim
    a = b + config.linear_num_value_heads
    qkvz = interleaved_rows(heads, (key, key, value, value), (0, config.key_dim, v, z))
    ba = interleaved_rows(heads, (ratio, ratio), (b, a))
    width = parameter.shape[1]
    return (
        WeightPart(parameter, (len(qkvz), width), qkvz),
        WeightPart(parameter, (len(ba), width), ba),
    )


def query_gate_key_value_parts(
    config: ModelConfig, parameter: nn.Parameter
) -> tuple[WeightPart, WeightPart, WeightPart]:
    """``q_proj``, ``k_proj`` and ``v_proj`` within rows ordered query, key, value, gate.

    In the checkpoint ``q_proj`` holds, for each head, its query and then its output gate. A bias
    has the same order.
    """
    size = config.head_dim
    query, key = config.num_attention_heads * size, config.num_key_value_heads * size
    heads = interleaved_rows(config.num_attention_heads, (size, size), (0, query + 2 * key))
    rest = parameter.shape[1:]
    return (
        WeightPart(parameter, (2 * query, *rest), heads),
        WeightPart(parameter, (key, *rest), torch.arange(query, query + key)),
        WeightPart(parameter, (key, *rest), torch.arange(query + key, query + 2 * key)),
    )
