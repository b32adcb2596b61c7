"""Paged drafting against a few lines of plain attention over the whole sequence."""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from atom.config import GuardMode
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.models.model_config import ModelConfig
from atom.models.presets import random_checkpoint
from atom.models.qwen3_next import Qwen3NextForCausalLM
from atom.models.qwen3_next_mtp import Qwen3NextMTP
from atom.models.weights import load_model
from atom.spec_decode.mtp import Drafts, draft, draft_first_pass, draft_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
from paged_requests import PagedRequests, small_config

CONFIGS = {
    "grouped": small_config(),
    "tied, biased": small_config(
        tie_word_embeddings=True,
        attention_bias=True,
        num_key_value_heads=1,
        partial_rotary_factor=0.5,
        head_dim=8,
    ),
}


@dataclass
class Plain:
    """The checkpoint's own tensors, and drafting by the definition."""

    config: ModelConfig
    weights: dict[str, Tensor]
    model: Qwen3NextForCausalLM
    mtp: Qwen3NextMTP
    states: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def hidden(self, text: Tensor) -> Tensor:
        """The model's states behind its final norm, from one prefill."""
        key = tuple(text.tolist())
        if key not in self.states:
            self.states[key] = PagedRequests(self.model, requests=1).run([0], [text], prefill=True)[
                1
            ]
        return self.states[key]

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * (1 + self.weights[name])

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        return functional.linear(x, self.weights[f"{name}.weight"], bias)

    def rotate(self, x: Tensor) -> Tensor:
        size = self.config.rotary_dim
        inverse = self.config.rope_theta ** (-torch.arange(0, size, 2) / size)
        turn = torch.polar(torch.ones(1), torch.arange(len(x))[:, None] * inverse)[:, None]
        pairs = torch.complex(x[..., : size // 2], x[..., size // 2 : size]) * turn
        return torch.cat([pairs.real, pairs.imag, x[..., size:]], -1)

    def layer(self, next_ids: Tensor, hidden: Tensor) -> Tensor:
        """States of the MTP layer at every position, all of them given."""
        config, at = self.config, "mtp.layers.0.self_attn"
        embedding = self.norm(
            self.weights["model.embed_tokens.weight"][next_ids], "mtp.pre_fc_norm_embedding.weight"
        )
        hidden = self.norm(hidden, "mtp.pre_fc_norm_hidden.weight")
        stream = self.linear(torch.cat([embedding, hidden], -1), "mtp.fc")
        x = self.norm(stream, "mtp.layers.0.input_layernorm.weight")
        heads, size, ratio = (
            config.num_attention_heads,
            config.head_dim,
            config.num_attention_heads // config.num_key_value_heads,
        )
        query, gate = self.linear(x, f"{at}.q_proj").view(-1, heads, 2 * size).chunk(2, -1)
        key = self.linear(x, f"{at}.k_proj").view(len(x), -1, size)
        value = self.linear(x, f"{at}.v_proj").view(len(x), -1, size)
        query = self.rotate(self.norm(query, f"{at}.q_norm.weight"))
        key = self.rotate(self.norm(key, f"{at}.k_norm.weight"))
        mixed = functional.scaled_dot_product_attention(
            query.transpose(0, 1),
            key.repeat_interleave(ratio, 1).transpose(0, 1),
            value.repeat_interleave(ratio, 1).transpose(0, 1),
            is_causal=True,
        ).transpose(0, 1)
        stream = stream + self.linear((mixed * gate.sigmoid()).flatten(1), f"{at}.o_proj")
        x = self.norm(stream, "mtp.layers.0.post_attention_layernorm.weight")
        up = self.linear(x, "mtp.layers.0.mlp.up_proj")
        gated = functional.silu(self.linear(x, "mtp.layers.0.mlp.gate_proj")) * up
        return self.norm(
            stream + self.linear(gated, "mtp.layers.0.mlp.down_proj"), "mtp.norm.weight"
        )

    def drafts(self, text: Tensor, end: int, count: int) -> tuple[list[int], list[float]]:
        """Drafts behind ``text[:end]``, whose last token was just sampled, from scratch."""
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        hidden = self.hidden(text)[: end - 1]
        next_ids, ids, confidence = text[1:end], [], []
        for _ in range(count):
            states = self.layer(next_ids, hidden)
            best = functional.linear(states[-1], head).softmax(-1).max(-1)
            ids.append(int(best.indices))
            confidence.append(float(best.values))
            next_ids = torch.cat([next_ids, best.indices[None]])
            # the layer's own state stands in for the model's at the position behind
            hidden = torch.cat([hidden, states[-1:]])
        return ids, confidence


@pytest.fixture(scope="module", params=list(CONFIGS))
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    folder = tmp_path_factory.mktemp("checkpoint")
    random_checkpoint(folder, CONFIGS[request.param], seed=3)
    loaded = load_model(folder)
    assert loaded.mtp is not None
    tensors = load_file(str(folder / "model.safetensors"))
    return Plain(loaded.config, tensors, loaded.model, loaded.mtp)


class Drafting(PagedRequests):
    """Paged requests whose every step drafts."""

    def __init__(self, mtp: Qwen3NextMTP, *, requests: int, **settings: int) -> None:
        super().__init__(mtp.target, requests=requests, **settings)
        self.mtp = mtp

    def step(
        self,
        rows: list[int],
        tokens: list[Tensor],
        *,
        sampled: Tensor | None = None,
        num_bonus: list[int] | None = None,
        known: list[int] | None = None,
        count: int = 3,
        padding: int = 0,
        shift: int = 0,
    ) -> Drafts:
        """One step of the model and its drafts; ``sampled`` is ``[rows, 1 + k]``.

        ``shift`` moves the ids given to the layer, for the control.
        """
        prefill = num_bonus is None
        _, hidden, meta = self.run(rows, tokens, prefill=prefill, padding=padding)
        device = self.model.device
        if sampled is not None:
            sampled = functional.pad(sampled, (0, 0, 0, padding), value=-1).to(device)
        plan = draft_plan(
            self.ids(tokens, padding),
            meta,
            count,
            self.block_size,
            sampled_ids=sampled,
            num_bonus=None
            if num_bonus is None
            else torch.tensor(num_bonus + [0] * padding, dtype=torch.int32, device=device),
            known_next_ids=None
            if known is None
            else torch.tensor(known + [-1] * padding, device=device),
        )
        plan.next_ids.copy_(plan.next_ids.roll(shift))
        return self.finish(hidden, meta, plan, len(rows))

    def finish(self, hidden: Tensor, meta: AttentionMetadata, plan: object, rows: int) -> Drafts:
        """The layer's passes; rows of padding are cut off."""
        cache = self.caches.mtp_kv_cache
        assert cache is not None
        states = draft_first_pass(self.mtp, hidden, meta, cache, plan)  # type: ignore[arg-type]
        found = draft(self.mtp, states, meta, cache, plan)  # type: ignore[arg-type]
        return Drafts(found.ids[:rows], found.confidence[:rows])


def texts(config: ModelConfig, lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(config.vocab_size, (n,), generator=generator) for n in lengths]


def sampled_column(ids: list[Tensor]) -> Tensor:
    """Verdict ids of prefill rows: one each, then nothing."""
    return torch.tensor([[int(i), -1, -1, -1] for i in ids])


def assert_drafts(
    found: Drafts, row: int, plain: Plain, text: Tensor, *, end: int | None = None, count: int = 3
) -> None:
    ids, confidence = plain.drafts(text, len(text) if end is None else end, count)
    assert found.ids[row].tolist() == ids
    torch.testing.assert_close(found.confidence[row], torch.tensor(confidence), atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_drafts_behind_prompts_of_mixed_lengths(plain: Plain, count: int) -> None:
    words = texts(plain.config, [2, 3, 18, 65])
    found = Drafting(plain.mtp, requests=4).step(
        [0, 1, 2, 3],
        [t[:-1] for t in words],
        sampled=sampled_column([t[-1] for t in words]),
        count=count,
        padding=2,
    )
    for row, text in enumerate(words):
        # the last block may end before the last draft: then it sees less
        if (len(text) + count - 2) // 16 == (len(text) - 2) // 16:
            assert_drafts(found, row, plain, text, count=count)


def test_chunks_hand_the_next_prompt_token_on(plain: Plain) -> None:
    (text,) = texts(plain.config, [40])
    drafting = Drafting(plain.mtp, requests=1)
    cuts = [0, 1, 16, 17, 39]
    for begin, end in itertools.pairwise(cuts):
        final = end == 39
        found = drafting.step(
            [0],
            [text[begin:end]],
            sampled=sampled_column([text[39]]) if final else None,
            known=[-1 if final else int(text[end])],
        )
        drafting.requests[0].context = end
    assert_drafts(found, 0, plain, text)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("look_ahead", [True, False])
def test_drafts_behind_partly_accepted_drafts(plain: Plain, seed: int, look_ahead: bool) -> None:
    """Ragged verification with rejected drafts, in any order of rows.

    With look-ahead the rows have blocks for their drafts; without, drafts whose last pass lies in
    a block that is not there are not compared.
    """
    chance = random.Random(seed)
    words = texts(plain.config, [80, 80, 80], seed)
    junk = texts(plain.config, [1000], seed + 50)[0]
    drafting = Drafting(plain.mtp, requests=3, block_size=16)
    prompts = [1, 14, 31]
    if look_ahead:
        for request in drafting.requests:
            request.blocks = [drafting.free.pop() for _ in range(6)]
    first = [t[:n] for t, n in zip(words, prompts, strict=True)]
    ends = [t[n] for t, n in zip(words, prompts, strict=True)]
    drafting.step([0, 1, 2], first, sampled=sampled_column(ends))
    for request, length in zip(drafting.requests, prompts, strict=True):
        request.context = length
    compared = 0
    for _ in range(10):
        rows = chance.sample(range(3), 3)
        tokens, bonus, verdict = [], [], []
        for row in rows:
            text, place = words[row], drafting.requests[row].context
            drafts = chance.randint(0, 3)
            right = chance.randint(0, drafts)
            wrong = junk[place * 3 : place * 3 + drafts - right]
            tokens.append(torch.cat([text[place : place + 1 + right], wrong]))
            kept = text[place + 1 : place + 2 + right].tolist()
            verdict.append(kept + [-1] * (4 - len(kept)))
            bonus.append(right)
        found = drafting.step(
            rows,
            tokens,
            sampled=torch.tensor(verdict),
            num_bonus=bonus,
            padding=chance.randint(0, 2),
        )
        for number, (row, right) in enumerate(zip(rows, bonus, strict=True)):
            drafting.accept(row, right)
            end = drafting.requests[row].context
            if end + 2 <= len(drafting.requests[row].blocks) * 16:
                assert_drafts(found, number, plain, words[row], end=end + 1)
                compared += 1
    assert compared > 20


def test_the_comparison_can_fail(plain: Plain) -> None:
    """Ids moved by one place too many give other drafts."""
    words = texts(plain.config, [30, 21])
    found = Drafting(plain.mtp, requests=2).step(
        [0, 1], [t[:-1] for t in words], sampled=sampled_column([t[-1] for t in words]), shift=1
    )
    with pytest.raises(AssertionError):
        assert_drafts(found, 0, plain, words[0])


def test_drafts_past_the_blocks_write_nowhere(plain: Plain) -> None:
    """A row at the end of its only block drafts on, and leaves every other block alone."""
    words = texts(plain.config, [16])
    drafting = Drafting(plain.mtp, requests=1)
    found = drafting.step([0], [words[0][:15]], sampled=sampled_column([words[0][15]]), count=5)
    (block,) = drafting.requests[0].blocks
    cache = drafting.caches.mtp_kv_cache
    assert cache is not None
    assert cache[:, block].isfinite().all()
    others = torch.cat([cache[:, :block], cache[:, block + 1 :]], 1)
    assert others.isnan().all()
    # the second draft's pass is at the block's last place; the later ones have none
    assert found.ids[0, :2].tolist() == plain.drafts(words[0], 16, 2)[0]
    assert found.confidence.isfinite().all()


def test_rows_of_padding_write_nowhere(plain: Plain) -> None:
    (text,) = texts(plain.config, [9])
    drafting = Drafting(plain.mtp, requests=1)
    drafting.step([0], [text[:8]], sampled=sampled_column([text[8]]), padding=5)
    cache = drafting.caches.mtp_kv_cache
    assert cache is not None
    written = cache[0, :, :, 0, 0].isfinite().nonzero()
    (block,) = drafting.requests[0].blocks
    # 8 positions of the prompt, 2 of the drafts
    assert written.tolist() == [[block, place] for place in range(10)]


@pytest.mark.gpu
def test_a_captured_step_of_drafts_equals_the_eager_one(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, small_config(), seed=3, dtype=torch.bfloat16)
    mtp = load_model(tmp_path, device="cuda").mtp
    assert mtp is not None
    words = texts(mtp.config, [30, 25])
    drafting = Drafting(mtp, requests=2)
    first = [t[:20] for t in words]
    drafting.step([0, 1], first, sampled=sampled_column([t[20] for t in words]))
    for request in drafting.requests:
        request.context = 20
    tokens = [t[20:24] for t in words]
    meta = drafting.metadata([0, 1], [4, 4], prefill=False, padding=2)
    ids = drafting.ids(tokens, 2)
    hidden = mtp.target(ids, meta, drafting.caches, guard=GuardMode.REPORT, record=drafting.record)
    verdict = torch.tensor([[5, 6, -1, -1], [7, -1, -1, -1], [-1] * 4, [-1] * 4], device="cuda")
    bonus = torch.tensor([1, 0, 0, 0], dtype=torch.int32, device="cuda")

    def drafts() -> Drafts:
        plan = draft_plan(ids, meta, 3, 16, sampled_ids=verdict, num_bonus=bonus)
        return drafting.finish(hidden, meta, plan, 2)

    eager = Drafts(*(t.clone() for t in drafts()))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = drafts()
    captured.ids.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.ids, eager.ids)
    assert torch.equal(captured.confidence, eager.confidence)
