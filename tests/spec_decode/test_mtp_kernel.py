"""The draft plan's kernel against its reference: interpreted here, compiled on a GPU."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# the interpreter's process starts beside the operators' tests
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model_ops"))
from interpreter import assert_check_passes, check_names

from atom.model_ops.attention_metadata import AttentionMetadata
from atom.spec_decode.mtp import (
    draft_plan,
    draft_plan_reference,
    keep_drafts,
    likeliest,
    likeliest_reference,
)

Step = tuple[tuple[Any, ...], dict[str, Any]]


def random_step(
    rows: int, *, prefill: bool, sampled: bool = True, known: bool = True, device: str = "cpu"
) -> Step:
    """Arguments of :func:`draft_plan` for a random batch with padding rows and tokens."""
    chance = random.Random(rows)
    generator = torch.Generator().manual_seed(rows)
    longest = 1100 if prefill else 4
    real = chance.randint(1, rows)
    lengths = [chance.randint(1, longest) for _ in range(real)] + [0] * (rows - real)
    starts = torch.tensor([sum(lengths[:i]) for i in range(rows + 1)], dtype=torch.int32)
    contexts = [chance.randint(0, 100) for _ in lengths]
    tokens = sum(lengths) + chance.randint(0, 90)
    positions = torch.zeros(tokens, dtype=torch.int64)
    tables = torch.full((rows, 160), -1, dtype=torch.int32)
    for row, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        begin = int(starts[row])
        positions[begin : begin + length] = context + torch.arange(length)
        blocks = -(-(context + length) // 16) + chance.randint(0, 1)
        tables[row, :blocks] = torch.randperm(1000, generator=generator)[:blocks].int()
    bonus = [0 if prefill else chance.randint(0, max(n - 1, 0)) for n in lengths]
    verdict = torch.full((rows, 4), -1)
    for row, count in enumerate(bonus):
        verdict[row, : count + 1] = torch.randint(97, (count + 1,), generator=generator)
    meta = AttentionMetadata(
        query_start_loc=starts.to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        state_slots=torch.zeros(rows, dtype=torch.int32, device=device),
        num_accepted_tokens=torch.ones(rows, dtype=torch.int32, device=device),
        state_table=torch.zeros(rows, 4, dtype=torch.int32, device=device),
        # a slice, as of a table wide enough for any batch
        block_tables=tables.to(device)[:, :150],
        positions=positions.to(device),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
        num_tokens=tokens,
        max_query_len=longest,
        max_context_len=100,
        is_prefill=prefill,
    )
    given: dict[str, Any] = {}
    if sampled:
        given["sampled_ids"] = verdict.to(device)
    if prefill and known:
        ends = [chance.choice([-1, 5]) if sampled else 5 for _ in range(rows)]
        given["known_next_ids"] = torch.tensor(ends, device=device)
    if not prefill:
        given["num_bonus"] = torch.tensor(bonus, dtype=torch.int32, device=device)
    ids = torch.randint(97, (tokens,), generator=generator).to(device)
    return (ids, meta, 3, 16), given


def steps(device: str = "cpu") -> list[Step]:
    """Batches of both kinds, of one row and of many."""
    found = [random_step(rows, prefill=False, device=device) for rows in (1, 2, 5, 17)]
    found += [random_step(rows, prefill=True, device=device) for rows in (1, 3)]
    found.append(random_step(2, prefill=True, sampled=False, device=device))
    found.append(random_step(4, prefill=True, known=False, device=device))
    return found


def assert_same_plan(found: object, expected: object) -> None:
    for name in expected.__dataclass_fields__:  # type: ignore[attr-defined]
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("name", check_names(__file__))
def test_in_the_interpreter(name: str) -> None:
    assert_check_passes(__file__, name)


def check_plans() -> None:
    from atom.spec_decode import mtp_triton

    for arguments, given in steps():
        found = mtp_triton.draft_plan(*arguments, **given)
        assert_same_plan(found, draft_plan_reference(*arguments, **given))


def rows_of_logits() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 9000, generator=generator) * 3
    # equal logits in several chunks, and rows with few or no numbers at all
    wide[1] = wide[1].round().clamp(max=4)
    wide[2, 3:] = float("-inf")
    wide[3] = -wide[3].abs() - 90
    return [wide, wide[:, :4096].bfloat16(), torch.randn(1, 7, generator=generator)]


def assert_same_likeliest(run: Callable[..., None], logits: torch.Tensor) -> None:
    """Into the second of three columns; the others stay."""
    both = []
    for step, values in ((likeliest_reference, logits.cpu()), (run, logits)):
        ids = torch.full((len(values), 3), -5, device=values.device)
        confidence = torch.full((len(values), 3), -5.0, device=values.device)
        step(values, ids[:, 1], confidence[:, 1])
        both.append((ids.cpu(), confidence.cpu()))
    (expected_ids, expected), (ids, found) = both
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def assert_drafts_are_kept(run: Callable[..., None], device: str) -> None:
    groups = torch.tensor([3, -1, 0, 4, 9], dtype=torch.int32, device=device)
    ids = torch.arange(20, device=device).view(5, 4)[:, :3]
    table = torch.full((5, 4), -8, device=device)
    run(table, groups, ids)
    kept = table.tolist()
    assert kept[3] == [-8, 0, 1, 2]
    assert kept[0] == [-8, 8, 9, 10]
    assert kept[1] == kept[2] == [-8] * 4
    # of those that have no row
    assert kept[4] in ([-8, 4, 5, 6], [-8, 12, 13, 14], [-8, 16, 17, 18])


def check_kept_drafts() -> None:
    from atom.spec_decode import mtp_triton

    assert_drafts_are_kept(mtp_triton.keep_drafts, "cpu")


def test_drafts_are_kept() -> None:
    assert_drafts_are_kept(keep_drafts, "cpu")


@pytest.mark.gpu
def test_drafts_are_kept_on_the_accelerator() -> None:
    assert_drafts_are_kept(keep_drafts, "cuda")


def assert_an_entry(run: Callable[..., None], device: str) -> None:
    """Rows of padding: their ids are indices of the next pass all the same."""
    logits = torch.full((4, 5000), torch.nan, device=device)
    logits[1] = float("-inf")
    logits[2, 4500] = 3.0
    logits[3, :4096] = 2.0
    ids = torch.full((4,), -1, device=device)
    run(logits, ids, torch.zeros(4, device=device))
    assert ids.tolist() == [0, 0, 4500, 0]


def check_rows_without_numbers() -> None:
    from atom.spec_decode import mtp_triton

    assert_an_entry(mtp_triton.likeliest, "cpu")


@pytest.mark.gpu
def test_rows_without_numbers_on_the_accelerator() -> None:
    assert_an_entry(likeliest, "cuda")


def check_likeliest() -> None:
    from atom.spec_decode import mtp_triton

    for logits in rows_of_logits():
        assert_same_likeliest(mtp_triton.likeliest, logits)


@pytest.mark.gpu
def test_likeliest_on_the_accelerator() -> None:
    for logits in rows_of_logits():
        assert_same_likeliest(likeliest, logits.cuda())


@pytest.mark.gpu
def test_on_the_accelerator() -> None:
    for arguments, given in steps("cuda"):
        assert_same_plan(draft_plan(*arguments, **given), draft_plan_reference(*arguments, **given))
