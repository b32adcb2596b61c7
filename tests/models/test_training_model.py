"""The differentiable model against the engine's, its checkpoint and its drafts; in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged_requests import PagedRequests, small_config

from atom.model_ops.gated_delta_rule import gated_delta_rule_recurrence
from atom.models.training_layers import gated_delta_rule, unit_lower_inverse
from atom.models.training_model import DRAFT_PASSES, TrainingModel
from atom.models.weights import LoadedModel, load_model, write_checkpoint
from atom.spec_decode.mtp import draft, draft_first_pass, draft_plan

_TOKENS = 64


def perturbed(config: object, seed: int = 3) -> TrainingModel:
    """A model whose norms and gates are not at their neutral beginnings."""
    model = TrainingModel(config, seed=seed)  # type: ignore[arg-type]
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=noise)
    return model


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainingModel, LoadedModel]:
    """A model in training, and the engine's from its checkpoint."""
    config = small_config(tie_word_embeddings=request.param)
    model = perturbed(config)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, config, model.tensors(torch.float32))
    return model, load_model(folder)


def ids_of(rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_the_engine_computes_what_was_trained(pair: tuple[TrainingModel, LoadedModel]) -> None:
    model, loaded = pair
    ids = ids_of(2, 2 * _TOKENS)
    trained = model.logits(model.hidden(ids))
    served = PagedRequests(loaded.model, requests=2).prefill([0, 1], list(ids))
    spread = trained.std()
    for row in range(2):
        torch.testing.assert_close(served[row], trained[row], atol=1e-4 * spread, rtol=0)


@torch.no_grad()
def test_draft_passes_are_those_of_inference(pair: tuple[TrainingModel, LoadedModel]) -> None:
    """The loss of each pass at one position is that of the engine's drafts behind it."""
    model, loaded = pair
    assert loaded.mtp is not None
    ids = ids_of(1, _TOKENS + 1 + DRAFT_PASSES)
    place = 40
    paged = PagedRequests(loaded.model, requests=1)
    _, hidden, meta = paged.run([0], [ids[0, : place + 1]], prefill=True)
    plan = draft_plan(
        ids[0, : place + 1], meta, DRAFT_PASSES, 16, sampled_ids=ids[:, place + 1 : place + 2]
    )
    cache = paged.caches.mtp_kv_cache
    assert cache is not None
    states = draft_first_pass(loaded.mtp, hidden, meta, cache, plan)
    drafts = draft(loaded.mtp, states, meta, cache, plan).ids[0]
    # a text that goes on as the engine drafts: then training follows the same chain
    ids[0, place + 2 : place + 2 + DRAFT_PASSES] = drafts
    answers = torch.zeros_like(ids, dtype=torch.bool)
    answers[0, place + 2 : place + 2 + DRAFT_PASSES] = True
    chosen = torch.tensor([[place]])
    losses = model.losses(ids, answers, chosen, question_weight=0.0, draft_weight=0.0)
    # passes behind the first are scored at the chosen place alone: every draft is the likeliest
    assert losses.drafts_right[1:].tolist() == [1.0] * (DRAFT_PASSES - 1)
    ids[0, place + 4] = (ids[0, place + 4] + 1) % 97
    other = model.losses(ids, answers, chosen, question_weight=0.0, draft_weight=0.0)
    assert other.drafts_right[1:].tolist() == [1.0, 0.0]


@torch.no_grad()
def test_gated_delta_rule_equals_the_recurrence() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 3 * _TOKENS, 2, 16).unbind(0)
    v = torch.randn(1, 3 * _TOKENS, 4, 8)
    g, beta = -torch.rand(1, 3 * _TOKENS, 4), torch.rand(1, 3 * _TOKENS, 4)
    ours = gated_delta_rule(q, k, v, g, beta)[0]
    state = torch.zeros(4, 16, 8)
    theirs, _ = gated_delta_rule_recurrence(q[0], k[0], v[0], g[0], beta[0], state, 16**-0.5)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_the_inverse_and_its_gradient() -> None:
    torch.manual_seed(0)
    # equal keys are the hardest case: all of the triangle is nearly 1
    lower = (0.9 + 0.1 * torch.rand(2, 32, 32, dtype=torch.float64)).tril(-1).requires_grad_()
    identity = torch.eye(32, dtype=torch.float64)
    inverse = unit_lower_inverse(lower)
    torch.testing.assert_close(inverse @ (identity + lower), identity.expand(2, -1, -1))
    small = (torch.rand(4, 4, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: unit_lower_inverse(x.tril(-1)), small)


def test_every_parameter_is_learned() -> None:
    model = perturbed(small_config(tie_word_embeddings=True))
    ids = ids_of(2, _TOKENS + 1 + DRAFT_PASSES)
    answers = torch.rand(ids.shape) < 0.5
    chosen = torch.tensor([[3, 9], [20, 50]])
    losses = model.losses(ids, answers, chosen, question_weight=0.1, draft_weight=0.3)
    losses.total.backward()
    lost = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert not lost
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_checkpoint_goes_to_bfloat16_and_back(tmp_path: Path) -> None:
    config = small_config(dtype=torch.bfloat16)
    model = TrainingModel(config, seed=1)
    write_checkpoint(tmp_path, config, model.tensors(torch.bfloat16))
    assert load_model(tmp_path).model.dtype is torch.bfloat16
