"""The paged model against transformers' own, in float32 on the CPU."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from paged_requests import PagedRequests, small_config
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next

from atom.models.model_config import FULL, LINEAR, ModelConfig
from atom.models.presets import PRESETS, random_checkpoint
from atom.models.qwen3_next import Qwen3NextForCausalLM
from atom.models.weights import load_model

TOLERANCE = 1e-4

CONFIGS: dict[str, ModelConfig] = {
    "grouped": small_config(),
    "tied": small_config(tie_word_embeddings=True, partial_rotary_factor=0.5),
    "one head each": small_config(
        num_key_value_heads=4,
        head_dim=8,
        linear_num_key_heads=4,
        partial_rotary_factor=1.0,
        rope_theta=500.0,
    ),
    "unequal heads": small_config(
        num_attention_heads=6,
        num_key_value_heads=1,
        head_dim=24,
        linear_num_key_heads=1,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        partial_rotary_factor=0.25,
    ),
    "biased, other layers": small_config(
        attention_bias=True,
        num_hidden_layers=3,
        layer_types=(FULL, LINEAR, FULL),
        hidden_size=40,
        vocab_size=61,
        linear_conv_kernel_dim=3,
    ),
    "linear only": small_config(num_hidden_layers=2, layer_types=(LINEAR, LINEAR)),
    "tiny": PRESETS["tiny"],
}

Truth = Callable[[Tensor], Tensor]
Pair = tuple[Qwen3NextForCausalLM, Truth]


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Our model and transformers' logits of a whole sequence, from one checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint")
    random_checkpoint(folder, CONFIGS[request.param], seed=5)
    peer, report = transformers.Qwen3NextForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not [name for name in report["unexpected_keys"] if not name.startswith("mtp.")]
    peer.eval()

    def truth(ids: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = peer(ids[None], use_cache=False).logits[0]
        return logits

    return load_model(folder, with_mtp=False).model, truth


def sequences(vocabulary: int, lengths: list[int], seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (n,), generator=generator) for n in lengths]


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_the_tolerance_is_small_beside_the_logits(pair: Pair) -> None:
    model, truth = pair
    logits = truth(sequences(model.config.vocab_size, [33])[0])
    assert logits.std() > 100 * TOLERANCE


def test_prefill_of_mixed_lengths_with_padding(pair: Pair) -> None:
    model, truth = pair
    prompts = sequences(model.config.vocab_size, [1, 2, 3, 17, 64, 65, 131])
    ours = PagedRequests(model, requests=len(prompts)).prefill(
        range(len(prompts)), prompts, padding=3
    )
    for logits, prompt in zip(ours, prompts, strict=True):
        assert_equal(logits, truth(prompt))


@pytest.mark.parametrize("block_size", [16, 64])
def test_chunked_prefill_at_odd_boundaries(pair: Pair, block_size: int) -> None:
    model, truth = pair
    prompts = sequences(model.config.vocab_size, [97, 30])
    paged = PagedRequests(model, requests=2, block_size=block_size)
    seen: list[list[Tensor]] = [[], []]
    # chunk ends of each prompt: around the blocks, around the convolution's width, single tokens
    cuts = [[0, 1, 2, 5, 15, 17, 32, 33, 96, 97], [0, 3, 4, 7, 8, 9, 20, 28, 29, 30]]
    for step in range(9):
        chunks = [p[cut[step] : cut[step + 1]] for p, cut in zip(prompts, cuts, strict=True)]
        for row, logits in enumerate(paged.prefill([0, 1], chunks, padding=step % 2)):
            seen[row].append(logits)
    for parts, prompt in zip(seen, prompts, strict=True):
        assert_equal(torch.cat(parts), truth(prompt))


def test_prefill_then_decode_token_by_token(pair: Pair) -> None:
    model, truth = pair
    texts = sequences(model.config.vocab_size, [25, 40, 22])
    prompt = [5, 20, 2]
    paged = PagedRequests(model, requests=3, draft_tokens=0)
    paged.prefill([0, 1, 2], [t[:n] for t, n in zip(texts, prompt, strict=True)])
    expected = [truth(text) for text in texts]
    for step in range(20):
        # the batch's order changes, as requests come and go
        order = [[0, 1, 2], [2, 0, 1]][step % 2]
        places = [prompt[row] + step for row in order]
        tokens = [texts[row][p : p + 1] for row, p in zip(order, places, strict=True)]
        ours = paged.decode(order, tokens, [0, 0, 0], padding=step % 3)
        for logits, row, place in zip(ours, order, places, strict=True):
            assert_equal(logits[0], expected[row][place])


@pytest.mark.parametrize("seed", [1, 2])
def test_partly_accepted_drafts_equal_computing_from_scratch(pair: Pair, seed: int) -> None:
    model, truth = pair
    chance = random.Random(seed)
    texts = sequences(model.config.vocab_size, [70, 70, 70], seed)
    junk = iter(sequences(model.config.vocab_size, [3] * 100, seed + 100))
    paged = PagedRequests(model, requests=3)
    prompts = [1, 18, 33]
    paged.prefill([0, 1, 2], [t[:n] for t, n in zip(texts, prompts, strict=True)])
    expected = [truth(text) for text in texts]
    for _ in range(8):
        tokens, bonus, places = [], [], []
        for row, request in enumerate(paged.requests):
            drafts = chance.randint(0, 3)
            right = chance.randint(0, drafts)
            place = request.context
            wrong = next(junk)[: drafts - right]
            tokens.append(torch.cat([texts[row][place : place + 1 + right], wrong]))
            bonus.append(right)
            places.append(place)
        ours = paged.decode([0, 1, 2], tokens, bonus, padding=2)
        for row, (logits, place, right) in enumerate(zip(ours, places, bonus, strict=True)):
            assert_equal(logits[: 1 + right], expected[row][place : place + 1 + right])


def test_prefill_goes_on_where_drafts_were_rejected_in_another_request(pair: Pair) -> None:
    """Blocks and groups of one request are not touched by another's rejected drafts."""
    model, truth = pair
    texts = sequences(model.config.vocab_size, [40, 40])
    paged = PagedRequests(model, requests=2)
    first = paged.prefill([0], [texts[0][:7]])[0]
    paged.prefill([1], [texts[1][:19]])
    paged.decode([1], [texts[1][19:23].flip(0)], [0])
    second = paged.prefill([0], [texts[0][7:]])[0]
    assert_equal(torch.cat([first, second]), truth(texts[0]))


@pytest.mark.gpu
def test_bfloat16_is_as_far_off_as_bfloat16_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On average at most twice as far from float32 as transformers' own bf16 on the CPU."""
    folder = tmp_path
    # where flash-linear-attention is installed transformers takes its kernels for a CPU too
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        monkeypatch.setattr(
            modeling_qwen3_next, name, inspect.unwrap(getattr(modeling_qwen3_next, name))
        )
    config = small_config(
        hidden_size=128,
        intermediate_size=256,
        head_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        initializer_range=0.08,
    )
    random_checkpoint(folder, config, seed=5, dtype=torch.bfloat16)
    ids = sequences(config.vocab_size, [150])[0]
    peers = {
        dtype: transformers.Qwen3NextForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    }
    with torch.no_grad():
        exact, rounded = (
            peer(ids[None], use_cache=False).logits[0].float() for peer in peers.values()
        )
    error = (rounded - exact).abs()
    model = load_model(folder, device="cuda", with_mtp=False).model
    paged = PagedRequests(model, requests=1)
    parts = paged.prefill([0], [ids[:77]]) + paged.prefill([0], [ids[77:121]])
    for start in range(121, 149, 4):
        parts += paged.decode([0], [ids[start : start + 4]], [3])
    ours = (torch.cat(parts).cpu() - exact[:149]).abs()
    assert ours.mean() < 2 * error.mean()
    assert ours.max() < 3 * error.max()


@pytest.mark.gpu
def test_a_captured_forward_equals_the_eager_one(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, small_config(), seed=5, dtype=torch.bfloat16)
    model = load_model(tmp_path, device="cuda", with_mtp=False).model
    texts = sequences(model.config.vocab_size, [30, 41])

    def ready() -> PagedRequests:
        paged = PagedRequests(model, requests=2)
        paged.prefill([0, 1], [t[:20] for t in texts])
        return paged

    tokens = [t[20:24] for t in texts]
    eager = ready()
    first = eager.run([0, 1], tokens, prefill=False, padding=2)[1].clone()
    captured = ready()
    meta = captured.metadata([0, 1], [4, 4], prefill=False, padding=2)
    ids = captured.ids(tokens, 2)

    def forward() -> Tensor:
        from atom.config import GuardMode

        return model(ids, meta, captured.caches, guard=GuardMode.REPORT, record=captured.record)

    before = [
        pool.clone() for pool in (captured.caches.conv_state, captured.caches.recurrent_state)
    ]
    # compiles the kernels outside the capture
    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward()
    captured.caches.conv_state.copy_(before[0])
    captured.caches.recurrent_state.copy_(before[1])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output[:8], first[:8])
    assert torch.equal(
        captured.caches.recurrent_state.nan_to_num(), eager.caches.recurrent_state.nan_to_num()
    )
