"""Settings of an engine: each range and each rule between two of them refuses with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from atom.errors import BadInput
from atom.model_engine.engine_settings import EngineSettings, StatusCheck, scheduler_config


def test_the_defaults_are_safe_and_fit_together() -> None:
    settings = EngineSettings()
    assert settings.copy_protocol == "hold"
    assert settings.guard == "report"
    assert settings.status_check is StatusCheck.RAISE
    assert settings.epoch_tag
    assert settings.max_num_batched_tokens == 16384
    assert settings.query_tokens == 4
    limits = scheduler_config(settings, (7,))
    assert limits.num_drafts == 3
    assert limits.eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("copy_protocol", "held"),
        ("copy_path", "dma"),
        ("guard", "maybe"),
        ("status_check", "sometimes"),
        ("epoch_tag", "often"),
        ("draft_tokens", -1),
        ("draft_tokens", 8),
        ("draft_tokens", 2.5),
        ("forced_acceptance_length", 0.9),
        ("dspark_threshold", 0.0),
        ("dspark_threshold", 1.0),
        ("max_num_seqs", 0),
        ("max_num_seqs", 1025),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 1),
        ("max_waiting", 0),
        ("block_size", 0),
        ("num_kv_blocks", 0),
        ("memory_utilization", 0.0),
        ("memory_utilization", 0.99),
        ("memory_utilization", float("nan")),
        ("state_checkpoint_tokens", 0),
        ("num_state_checkpoints", -1),
        ("seed", -1),
        ("no_such_setting", 1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadInput, match=name):
        EngineSettings.parse({name: value}, where="the engine")
    with pytest.raises(ValidationError, match=name):
        EngineSettings(**{name: value})


@pytest.mark.parametrize(
    ("given", "reason", "mended"),
    [
        (
            {"max_num_batched_tokens": 15, "block_size": 16},
            "no chunk could end at a block's border",
            {"max_num_batched_tokens": 16},
        ),
        (
            {"state_checkpoint_tokens": 40, "block_size": 16},
            "state_checkpoint_tokens 40 is no multiple of block_size 16",
            {"state_checkpoint_tokens": 48},
        ),
        (
            {"state_checkpoint_tokens": 40, "block_size": 16},
            "no multiple",
            {"prefix_caching": False},
        ),
        (
            {"forced_acceptance_length": 2.5, "draft_tokens": 1},
            "more than the 2 tokens that 1 drafts can give",
            {"draft_tokens": 2},
        ),
        (
            {"forced_acceptance_length": 1.5, "draft_tokens": 0},
            "more than the 1 tokens",
            {"draft_tokens": 1},
        ),
        ({"dspark": True, "draft_tokens": 0}, "draft_tokens is 0", {"draft_tokens": 1}),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    given: dict[str, Any], reason: str, mended: dict[str, Any]
) -> None:
    with pytest.raises(BadInput, match=reason):
        EngineSettings.parse(given, where="the engine")
    # the control: one change makes it fit
    EngineSettings.parse({**given, **mended}, where="the engine")


def test_a_decode_step_over_the_budget_is_refused() -> None:
    settings = EngineSettings(max_num_seqs=64, max_num_batched_tokens=255)
    with pytest.raises(BadInput, match="has 256 tokens, over max_num_batched_tokens 255"):
        scheduler_config(settings)
    scheduler_config(EngineSettings(max_num_seqs=64, max_num_batched_tokens=256))
    scheduler_config(EngineSettings(max_num_seqs=64, max_num_batched_tokens=64, draft_tokens=0))


def test_settings_do_not_change_afterwards() -> None:
    settings = EngineSettings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.draft_tokens = 1  # type: ignore[misc]


def test_every_setting_says_what_it_is() -> None:
    for name, field in EngineSettings.model_fields.items():
        assert field.description, f"{name} has no description"
