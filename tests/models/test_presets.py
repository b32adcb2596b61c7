"""Named sizes, their parameters counted, and the memory of their caches."""

from __future__ import annotations

import pytest
import torch
import transformers

from atom.config import RecurrentStates
from atom.errors import BadInput, DeviceError
from atom.models.caches import ModelCaches, bytes_per_block, bytes_per_group
from atom.models.presets import PRESETS, count_parameters, preset
from atom.models.registry import lookup, register, release


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_counted_as_transformers_counts(name: str) -> None:
    config = preset(name)
    values = {key: value for key, value in config.to_dict().items() if key != "model_type"}
    with torch.device("meta"):
        peer = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**values))
    assert count_parameters(config) == sum(p.numel() for p in peer.parameters())


def test_the_size_that_is_measured_has_its_parameters() -> None:
    assert round(count_parameters(preset("m395")) / 1e6) in (394, 395)
    assert count_parameters(preset("m395"), with_mtp=True) > count_parameters(preset("m395"))


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(BadInput, match="known: tiny, m395"):
        preset("huge")


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("with_mtp", [False, True])
@pytest.mark.parametrize("kept", RecurrentStates)
def test_the_memory_plan_adds_up(
    name: str, draft_tokens: int, with_mtp: bool, kept: RecurrentStates
) -> None:
    config, dtype = preset(name), torch.bfloat16

    def on_nothing(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    caches = ModelCaches.allocate(
        config,
        num_blocks=7,
        num_groups=5,
        draft_tokens=draft_tokens,
        dtype=dtype,
        block_size=32,
        with_mtp=with_mtp,
        recurrent_states=kept,
        empty=on_nothing,
    )
    pools = [caches.conv_state, caches.recurrent_state, caches.kv_cache]
    assert (caches.replay is not None) is (kept is RecurrentStates.REPLAY)
    if caches.replay is not None:
        pools += [caches.replay.keys_values, caches.replay.gates]
    if caches.mtp_kv_cache is not None:
        pools.append(caches.mtp_kv_cache)
    planned = 7 * bytes_per_block(config, dtype, block_size=32, with_mtp=with_mtp)
    planned += 5 * bytes_per_group(config, dtype, draft_tokens=draft_tokens, recurrent_states=kept)
    assert sum(pool.nbytes for pool in pools) == planned
    assert caches.block_size == 32
    assert len(caches.kv_caches) == len(config.full_layers)


def test_a_model_is_found_by_its_number_until_it_is_released() -> None:
    first, second = register("a model"), register("another")
    assert (lookup(first), lookup(second)) == ("a model", "another")
    release(first)
    release(first)
    with pytest.raises(DeviceError, match=f"handle {first}"):
        lookup(first)
    assert lookup(second) == "another"
    release(second)
    assert register("a third") not in (first, second)
