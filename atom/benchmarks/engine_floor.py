"""The bytes that a decode step has to move, and how fast this device moves bytes.

Counted is what cannot stay in a cache from one step to the next: every weight once a pass, states,
keys and values, and the logits between the output projection and the sampler. Activations are not
counted. No step of the same arithmetic can be faster than these bytes at the rate of a plain copy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import prod

import torch

from atom.config import RecurrentStates
from atom.device.interface import Device, DeviceKind
from atom.models.model_config import ModelConfig
from atom.models.presets import checkpoint_shapes

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_SHORTEST_SECONDS = 1e-9


@dataclass(frozen=True)
class Part:
    """Bytes of one kind in one step."""

    name: str
    read: int
    written: int


def decode_floor(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    batch: int,
    context: float,
    draft_tokens: int,
    recurrent_states: RecurrentStates = RecurrentStates.PER_DRAFT,
    tokens_per_row: float = 1.0,
) -> list[Part]:
    """Bytes of a decode step, by kind.

    Args:
        config: the model.
        dtype: of weights, conv states, keys, values and logits; recurrent states are float32.
        batch: rows, each with ``1 + draft_tokens`` tokens.
        context: mean tokens in cache in front of a row.
        draft_tokens: drafts a step; each is a pass of the MTP layer and the output projection.
        recurrent_states: how they are kept.
        tokens_per_row: mean tokens of a row that stand: what a step reads of the rings.
    """
    replays = recurrent_states is RecurrentStates.REPLAY
    size, queries = dtype.itemsize, 1 + draft_tokens
    tokens = batch * queries
    shapes = checkpoint_shapes(config, with_mtp=False)
    head = prod(shapes.get(_HEAD, shapes[_EMBEDDING]))
    # of the embedding only the rows of the step's tokens are read
    layers = sum(prod(shape) for name, shape in shapes.items() if name not in (_EMBEDDING, _HEAD))
    hidden, vocabulary = config.hidden_size, config.vocab_size
    heads = config.linear_num_value_heads * config.linear_key_head_dim
    state = len(config.linear_layers) * batch * heads * config.linear_value_head_dim * 4
    row = len(config.linear_layers) * batch * config.conv_dim * size
    history = config.linear_conv_kernel_dim - 1
    key = 2 * config.num_key_value_heads * config.head_dim * size
    cached = int(len(config.full_layers) * batch * context * key)
    parts = [
        Part("weights", (layers + head + tokens * hidden) * size, 0),
        # one state is read; kept is one, or one for each token that may be the last accepted one
        Part("recurrent states", state, state * (1 if replays else queries)),
        Part("conv states", row * history, row * (history - 1 + queries)),
        Part("keys and values", cached, len(config.full_layers) * tokens * key),
        Part("logits", tokens * vocabulary * size, tokens * vocabulary * size),
    ]
    if replays:
        kept = (config.key_dim + config.value_dim) * size + 2 * config.linear_num_value_heads * 4
        entry = len(config.linear_layers) * batch * kept
        parts.append(Part("tokens to replay", int(entry * tokens_per_row), entry * queries))
    if draft_tokens:
        whole = checkpoint_shapes(config, with_mtp=True)
        layer = sum(prod(shape) for name, shape in whole.items() if name not in shapes)
        passes = batch * draft_tokens
        parts += [
            Part("MTP weights", (layer + head + batch * hidden) * draft_tokens * size, 0),
            Part("MTP keys and values", int(passes * context * key), (tokens + passes) * key),
            Part("MTP logits", passes * vocabulary * size, passes * vocabulary * size),
        ]
    return parts


def copy_rate(device: Device, nbytes: int, repeats: int = 10) -> float:
    """Bytes a second, read plus written, of a ``copy_`` of ``nbytes`` within the device."""
    virtual = device.properties.kind is DeviceKind.VIRTUAL
    place = "cpu" if virtual else torch.device("cuda", torch.cuda.current_device())
    source = torch.ones(nbytes, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    times = []
    for _ in range(repeats + 2):
        if virtual:
            began = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - began)
            continue
        start, end = device.new_event(timing=True), device.new_event(timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    # the first ones map memory
    kept = sorted(times[2:])
    return 2 * nbytes / max(kept[len(kept) // 2], _SHORTEST_SECONDS)
