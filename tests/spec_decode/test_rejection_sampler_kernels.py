"""The sampler's Triton kernels against their references: interpreted here, compiled on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

# the interpreter's process starts beside the operators' tests
_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS / "spec_decode"), str(_TESTS / "model_ops")]
from interpreter import assert_check_passes, check_names  # noqa: E402
from sampler_cases import Batch, K, assert_same, make_batch, move, settings  # noqa: E402

from atom.spec_decode.rejection_sampler import (  # noqa: E402
    HostOutputs,
    verify_reference,
    write_outputs,
    write_outputs_reference,
)
from atom.spec_decode.sampling import SamplingTensors, is_warm, thresholds_reference  # noqa: E402
from atom.transfer.payload import PayloadKind, epoch_tag, open_tag, payload_layout  # noqa: E402

LENGTHS = [4, 1, 0, 3, 2, 0]
STEP = 4096


def mixed_settings(requests: int) -> SamplingTensors:
    """Greedy, plain, top-k, top-p and both, in turn; one is greedy by a hair above 0."""
    heat, count, share = zip(
        *[
            (0.0, 0, 1.0),
            (0.8, 0, 1.0),
            (1.3, 5, 1.0),
            (1.0, 0, 0.7),
            (2.0, 20, 0.9),
            (1e-40, 3, 0.2),
            (0.7, 1, 1.0),
            (0.9, 0, 0.0),
        ],
        strict=True,
    )
    plain = settings(requests)
    turns = [i % len(heat) for i in range(requests)]
    return SamplingTensors(
        torch.tensor([heat[i] for i in turns]),
        torch.tensor([count[i] for i in turns], dtype=torch.int32),
        torch.tensor([share[i] for i in turns]),
        plain.seed,
        plain.positions,
        True,
    )


def batches() -> dict[str, tuple[Batch, bool]]:
    """Name -> batch, and whether the host knows that all are greedy."""
    small = make_batch(LENGTHS, 1000, padding_rows=3)
    warm = settings(len(LENGTHS), temperature=0.9)
    forced = torch.tensor([2, 1, 0, 9, -1, 1], dtype=torch.int32)
    nan = small.logits.clone()
    nan[0, 17] = float("nan")
    nan[1] = float("nan")
    nan[5, 3:] = float("-inf")
    mixed = make_batch(
        [1, 1, 2, 2, 1, 1, 1, 2, 0], 400, seed=2, sampling=mixed_settings(9), drafts=1
    )
    wide = make_batch([2, 1], 9 * 1024 + 17, seed=4, drafts=1)
    # a gathered row of the token table: the drafts are its columns behind the first
    gathered = torch.cat([small.draft_ids[:, :1] * 0, small.draft_ids], 1)[:, 1:]
    return {
        "greedy": (small, True),
        "drafts of a table": (small.with_(draft_ids=gathered), True),
        "greedy, unknown to the host": (small, False),
        "warm": (small.with_(sampling=warm), False),
        "mixed": (mixed, False),
        "forced": (small.with_(forced_bonus=forced), True),
        "forced, warm": (small.with_(forced_bonus=forced, sampling=warm), False),
        "no numbers": (small.with_(logits=nan), True),
        "several chunks": (wide, True),
        # equal logits in all chunks and words: the first of them counts
        "equal logits": (wide.with_(logits=wide.logits.clamp(max=4.0)), True),
        "several chunks, warm": (wide.with_(sampling=settings(2, temperature=1.1)), False),
        "bf16": (small.with_(logits=small.logits.bfloat16()), True),
        "mixed bf16": (mixed.with_(logits=mixed.logits.bfloat16()), False),
        "no drafts": (make_batch([1, 0, 1], 300, drafts=0), True),
        "seven drafts": (make_batch([8, 5], 300, drafts=7), True),
    }


def host_bytes(batch: Batch, *, tagged: bool, wanted: bool) -> tuple[HostOutputs, Tensor]:
    requests, drafts = batch.draft_ids.shape
    device = batch.logits.device
    shapes = [
        (PayloadKind.SPEC_STATUS, (2 * requests + 8,), torch.int32),
        (PayloadKind.TOKEN_IDS, (requests, 1 + drafts), torch.int64),
        (PayloadKind.LOGPROBS, (requests, 1 + drafts), torch.float32),
    ]
    raws = []
    for kind, shape, dtype in shapes:
        layout = payload_layout(kind, shape, dtype, None, tagged)
        raws.append(torch.full((layout.host_bytes,), 0x5A, dtype=torch.uint8, device=device))
    tags = [epoch_tag(STEP, kind) if tagged else 0 for kind, _, _ in shapes]
    outputs = HostOutputs(raws[0], raws[1], raws[2] if wanted else None, *tags)
    record = torch.arange(8, dtype=torch.int32, device=device) * 5 + 1
    return outputs, record


def table_arguments(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    requests, drafts = batch.draft_ids.shape
    device = batch.logits.device
    slots = torch.arange(requests, dtype=torch.int32, device=device).flip(0) + 2
    lengths = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
    slots = torch.where(lengths > 0, slots, -1)
    table = torch.full((requests + 4, 1 + drafts), 55, device=device)
    counts = torch.full((requests,), 66, dtype=torch.int32, device=device)
    kept = torch.full((requests, 1 + drafts), 66, dtype=torch.int64, device=device)
    return slots, table, counts, kept


def check_verdicts() -> None:
    from atom.spec_decode.rejection_sampler_triton import verify_triton

    for name, (batch, all_greedy) in batches().items():
        for wanted in (True, False) if name == "greedy" else (True,):
            expected = batch.arguments(all_greedy=all_greedy, wanted=wanted)
            found = batch.arguments(all_greedy=all_greedy, wanted=wanted)
            verify_reference(*expected)
            verify_triton(*found)
            torch.testing.assert_close(
                found[-1], expected[-1], equal_nan=True, rtol=1e-4, atol=1e-4
            )


def check_outputs() -> None:
    from atom.spec_decode.rejection_sampler_triton import write_outputs_triton

    for name in ("greedy", "mixed", "forced", "no drafts"):
        batch, all_greedy = batches()[name]
        for tagged, wanted in ((True, True), (True, False), (False, True)):
            compare_outputs(write_outputs_triton, batch, all_greedy, tagged, wanted)


def compare_outputs(
    launcher: Callable[..., None], batch: Batch, all_greedy: bool, tagged: bool, wanted: bool
) -> None:
    front = batch.arguments(all_greedy=all_greedy)[:-1]
    outputs, tensors = [], []
    runs: tuple[Callable[..., None], ...] = (write_outputs_reference, launcher)
    for run in runs:
        host, record = host_bytes(batch, tagged=tagged, wanted=wanted)
        slots, table, counts, tokens = table_arguments(batch)
        run(*front, host, record, slots, table, counts, tokens)
        outputs.append(host)
        tensors.append((host.status, host.sampled_ids, table, counts, tokens))
    for expected, found in zip(*tensors, strict=True):
        assert torch.equal(expected, found)
    if wanted:
        compare_logprobs(outputs[0].logprobs, outputs[1].logprobs, batch.draft_ids, tagged)


def compare_logprobs(
    expected: Tensor | None, found: Tensor | None, draft_ids: Tensor, tagged: bool
) -> None:
    assert expected is not None
    assert found is not None
    front = 2 if tagged else 0
    entries = draft_ids.numel() + len(draft_ids)
    one, other = (raw.view(torch.float32)[front : front + entries] for raw in (expected, found))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
    if tagged:
        ends = [raw.view(torch.int64)[:: raw.numel() // 8 - 1] for raw in (expected, found)]
        assert torch.equal(*ends)


def check_payloads_are_open_until_the_data_is_written() -> None:
    from atom.spec_decode.rejection_sampler_triton import _row_parts

    # the first row of the first program is padding
    batch = make_batch([0, 4, 1], 50)
    for wanted in (True, False):
        outputs, _ = host_bytes(batch, tagged=True, wanted=wanted)
        _row_parts(batch.logits, batch.query_start_loc, 3, K, None, True, wanted, outputs)
        kinds = (PayloadKind.SPEC_STATUS, PayloadKind.TOKEN_IDS, PayloadKind.LOGPROBS)
        for raw, kind in zip(outputs[:3], kinds, strict=True):
            if raw is not None:
                words = raw.view(torch.int64).tolist()
                assert words[0] == words[-1] == open_tag(STEP, kind)
                assert set(words[1:-1]) == {0x5A5A5A5A5A5A5A5A}


def check_thresholds() -> None:
    from atom.spec_decode.sampling_triton import row_thresholds

    compare_thresholds(row_thresholds, "cpu")


def compare_thresholds(launcher: Callable[..., Tensor], device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 700, generator=generator) * 2
    # equal logits, logits of both signs and of none
    logits[3] = logits[3].round()
    logits[4] = -logits[4].abs()
    logits[5, 40:] = float("-inf")
    logits[6, 0] = float("nan")
    rows = mixed_settings(12)
    heat = torch.where(is_warm(rows.temperature), rows.temperature, 1.0)
    expected = thresholds_reference(logits, heat, rows.top_k, rows.top_p)
    arguments = (part.to(device) for part in (logits, heat, rows.top_k, rows.top_p))
    assert torch.equal(launcher(*arguments).cpu(), expected)


@pytest.mark.parametrize("name", check_names(__file__))
def test_in_the_interpreter(name: str) -> None:
    assert_check_passes(__file__, name)


@pytest.mark.gpu
class TestOnHardware:
    def test_verdicts(self) -> None:
        from atom.spec_decode.rejection_sampler import verify

        for batch, all_greedy in batches().values():
            expected = batch.arguments(all_greedy=all_greedy)
            found = batch.to("cuda").arguments(all_greedy=all_greedy)
            verify_reference(*expected)
            verify(*found)
            for one, other in zip(found[-1], expected[-1], strict=True):
                torch.testing.assert_close(one.cpu(), other, equal_nan=True, rtol=1e-4, atol=1e-4)

    def test_outputs(self) -> None:
        for batch, all_greedy in batches().values():
            compare_outputs(write_outputs, batch.to("cuda"), all_greedy, True, True)

    def test_thresholds(self) -> None:
        from atom.spec_decode.sampling_triton import row_thresholds

        compare_thresholds(row_thresholds, "cuda")

    def test_a_real_vocabulary_in_a_graph(self) -> None:
        from atom.spec_decode.rejection_sampler import verify

        batch = make_batch([1 + K] * 16, 151936, sampling=mixed_settings(16))
        expected = batch.arguments()
        verify_reference(*expected)
        moved = batch.to("cuda")
        found = moved.arguments()
        verify(*found)
        for part in found[-1]:
            part.fill_(77)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            verify(*found)
        graph.replay()
        assert_same(found[-1], expected[-1], tolerance=1e-3)

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        from atom.spec_decode.rejection_sampler import verify

        batch = make_batch([1 + K] * 24, 151936, sampling=mixed_settings(24)).to("cuda")
        whole = batch.arguments()
        verify(*whole)
        for request in (0, 7, 23):
            pick = slice(request, request + 1)
            first = request * (1 + K)
            alone = Batch(
                batch.logits[first : first + 1 + K],
                torch.tensor([0, 1 + K], dtype=torch.int32, device="cuda"),
                batch.draft_ids[pick],
                batch.num_drafts[pick],
                SamplingTensors(
                    *(
                        getattr(move(batch.sampling, "cuda"), name)[pick]
                        for name in ("temperature", "top_k", "top_p", "seed", "positions")
                    )
                ),
            ).arguments()
            verify(*alone)
            for one, many in zip(alone[-1], whole[-1], strict=True):
                assert torch.equal(one[0], many[request])
