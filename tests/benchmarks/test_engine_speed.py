"""The engine-speed experiment: one code path on any device, honest sums, goals that can fail."""

from __future__ import annotations

import ast
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from atom.__main__ import main
from atom.benchmarks import engine_speed
from atom.benchmarks.engine_floor import copy_rate, decode_floor
from atom.benchmarks.engine_profile import Span, category_of, shares
from atom.benchmarks.engine_speed import SpeedBench, order, run_point, run_points
from atom.benchmarks.engine_speed_rows import (
    Category,
    Clock,
    DeviceTimeRow,
    Job,
    MemoryRow,
    SpeedArm,
    SpeedRow,
)
from atom.benchmarks.engine_speed_settings import (
    FORCED_ARMS,
    OUR_DECODE,
    VIRTUAL_SIZES,
    EngineSpeedSettings,
    PointKind,
    build_points,
    engine_settings,
    sized,
)
from atom.config import RecurrentStates
from atom.device import open_device
from atom.device.accelerator import why_no_accelerator
from atom.device.virtual import VirtualDevice
from atom.errors import BadInput, DeviceError
from atom.models.caches import bytes_per_group
from atom.models.presets import count_parameters, preset
from atom.transfer.d2h_queue import D2HQueue, SpecStatusQueue
from atom.workbook import engine_speed_runs
from atom.workbook.engine_speed_analysis import (
    MET,
    MISSED,
    OPEN,
    SIMULATED,
    goals,
    summarise,
)
from atom.workbook.engine_speed_runs import record_engine_speed
from atom.workbook.records import check_folder, load_runs

SMALL: dict[str, Any] = {
    "device": "virtual",
    "steps": 3,
    "warmup_steps": 1,
    "marked_steps": 2,
    "peer_steps": 2,
    "prefill_tokens": 32,
    "repeats": 2,
}
PACKAGE = Path(__file__).resolve().parents[2] / "atom"


def small(**values: Any) -> EngineSpeedSettings:
    return sized({**SMALL, **values}, quick=False)


# -- the whole experiment
@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
def test_it_runs_from_the_command_line_and_its_record_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for name in SMALL if name != "device" for word in ("-p", name, str(SMALL[name]))]
    out = ["--out", str(tmp_path), "--json"]
    assert main(["sweep", "engine-speed", "--device", "virtual", *words, *out]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert check_folder(tmp_path) == []
    [run], problems = load_runs([tmp_path], "engine_speed")
    assert problems == []
    assert run.provenance.evidence == "simulated"
    samples = run.tables["samples"]
    assert set(samples["clock"]) == {Clock.SIMULATION}
    decode = samples[samples["job"] == Job.DECODE]
    assert Counter(decode["arm"]) == dict.fromkeys(SpeedArm, 2)
    # float32 on a CPU: every arm that verifies gives the same tokens, transformers' too
    known = decode[~decode["arm"].isin(FORCED_ARMS)]
    assert set(known["agreement"]) == {1.0}
    plain = decode[decode["arm"] == SpeedArm.OURS]
    assert set(plain["tokens"]) == {3 * 2}
    forced = decode[decode["arm"].isin(FORCED_ARMS)]
    assert len(forced) == 4
    assert (forced["tokens"].astype(int) > 6).all()
    parts = plain["host_ms"] + plain["status_wait_ms"] + plain["output_wait_ms"]
    assert list(parts) == pytest.approx(list(plain["seconds"] / plain["steps"] * 1e3))
    assert {goal["outcome"] for goal in printed["goals"]} == {SIMULATED}
    assert len(printed["goals"]) == 5


def test_arms_take_turns_in_an_order_of_the_seed() -> None:
    settings = small(repeats=6)
    first = list(order(OUR_DECODE, settings, 0))
    assert first == list(order(OUR_DECODE, settings, 0))
    assert first != list(order(OUR_DECODE, settings, 1))
    assert first != list(order(OUR_DECODE, settings.model_copy(update={"seed": 1}), 0))
    assert [repeat for repeat, _ in first] == list(range(6))
    assert all(sorted(turns) == sorted(OUR_DECODE) for _, turns in first)
    assert len({tuple(turns) for _, turns in first}) > 1


def test_without_transformers_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_speed, "load_peer", lambda *_: "it is not here")
    settings = small(repeats=2)
    with SpeedBench(settings, VirtualDevice("MI355X")) as bench:
        prefill = build_points(settings)[-1]
        rows = [row for row in run_point(prefill, bench)["samples"] if isinstance(row, SpeedRow)]
    assert Counter(row.arm for row in rows) == {"ours": 2, "ours again": 2, "transformers": 1}
    assert [row.left_out for row in rows if row.left_out] == ["it is not here"]
    assert {row.agreement for row in rows if not row.left_out} == {1.0}


def test_a_failed_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, broken = small(), [True]
    row = MemoryRow(point_id="x", part="weights", planned_bytes=1)

    def points(chosen: Any, device: Any, done: Any = ()) -> Any:
        for point in build_points(chosen):
            if point.point_id in done:
                continue
            if point.kind is PointKind.PREFILL and broken[0]:
                raise DeviceError("lost")
            named = row.model_copy(update={"point_id": point.point_id})
            yield point, {"memory": [named]}

    monkeypatch.setattr(engine_speed_runs, "run_points", points)
    with pytest.raises(DeviceError, match="lost"):
        record_engine_speed(settings, tmp_path)
    [run], _ = load_runs([tmp_path], "engine_speed")
    assert run.provenance.exit_state == "failed"
    assert len(run.tables["memory"]) == 2
    broken[0] = False
    other = settings.model_copy(update={"seed": 7})
    with pytest.raises(BadInput, match="seed"):
        record_engine_speed(other, tmp_path, resume=run.path)
    assert len(record_engine_speed(settings, tmp_path, resume=run.path).tables["memory"]) == 3


def test_a_wrong_model_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(engine_speed.TransformersArm):
        def __init__(self, model: Any) -> None:
            engine_speed.DecodeArm.__init__(self)

        def start(self, prompts: Any) -> None:
            self.first_tokens = [[-1] for _ in prompts]

        def step(self) -> int:
            return 0

        def stop(self) -> None:
            pass

    monkeypatch.setattr(engine_speed, "load_peer", lambda *_: object())
    monkeypatch.setattr(engine_speed, "TransformersArm", Wrong)
    with pytest.raises(DeviceError, match="a wrong model is not timed"):
        list(run_points(small(), VirtualDevice("MI355X")))


# -- settings
def test_settings_keep_what_was_given_and_refuse_what_cannot_run() -> None:
    quick = sized({"batch_sizes": [64]}, quick=True)
    assert quick.batch_sizes == (64,)
    assert (quick.steps, quick.preset) == (100, "m395")
    assert sized({"device": "virtual", "preset": "m395"}, quick=False).preset == "m395"
    with pytest.raises(BadInput, match="max_model_len"):
        sized({"steps": 5000}, quick=False)
    with pytest.raises(BadInput, match="forced_acceptance_length"):
        sized({"forced_acceptance_length": 4.5}, quick=False)
    with pytest.raises(BadInput, match="no --trials"):
        engine_speed_runs.SWEEP.settings_from(_arguments(trials=3))
    with pytest.raises(BadInput, match="only"):
        engine_speed_runs.SWEEP.settings_from(_arguments(only=["x"]))


def _arguments(**values: Any) -> Any:
    import argparse

    names = dict.fromkeys(("trials", "processes", "device", "seed", "resume"))
    rest: dict[str, Any] = {"only": [], "parameters": [], "quick": False}
    return argparse.Namespace(**{**names, **rest, **values})


def test_a_dry_run_lists_the_points(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "engine-speed", "--device", "accelerator", "--quick", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "decode-b32-t128" in text
    assert "2 points" in text
    assert main(["sweep", "engine-speed", "--device", "accelerator", "--dry-run"]) == 0
    assert "decode-b64-t128" in capsys.readouterr().out


def test_engines_are_as_a_user_gets_them() -> None:
    """An arm may set sizes and drafts, and the prefix cache; nothing that makes it faster."""
    settings = EngineSpeedSettings()
    free = {
        "recurrent_states",
        *("draft_tokens", "forced_acceptance_length", "max_num_seqs", "max_num_batched_tokens"),
        *("max_model_len", "block_size", "num_kv_blocks", "prefix_caching", "seed"),
    }
    for point in build_points(settings):
        for arm in OUR_DECODE:
            assert engine_settings(settings, point, arm).model_fields_set == free


# -- clocks
def test_a_slow_status_counts_as_a_wait_and_not_as_host_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = small()
    point = build_points(settings)[1]
    with SpeedBench(settings, VirtualDevice("MI355X")) as bench:
        arm = bench.engine_arm(point, SpeedArm.MTP)
        arm.start(bench.prompts(2, 12, 0))
        wait = D2HQueue._wait_oldest

        def slow(queue: D2HQueue) -> Any:
            # the drafts' queue is one, too
            if isinstance(queue, SpecStatusQueue):
                time.sleep(0.05)
            return wait(queue)

        monkeypatch.setattr(D2HQueue, "_wait_oldest", slow)
        late = arm.window(3)
        monkeypatch.undo()
        arm.window(1)
        inside, gaps = arm.marked(3)
        arm.stop()
        assert arm.engine.num_requests == 0
        arm.close()
    assert late.waits is not None
    # a wait is seen as one, and seen once: the real receive behind it sleeps again
    assert 0.15 <= late.waits[0] < 0.3 <= sum(late.step_seconds)
    assert late.waits[1] < 0.15
    assert len(inside) == 3
    assert len(gaps) == 2
    assert min(inside) > 0


# -- bytes
def test_the_floor_of_a_replay_reads_and_writes_one_state_and_the_rings_tokens() -> None:
    config, kept = preset("m395"), torch.bfloat16
    floors = {
        way: {
            part.name: part
            for part in decode_floor(
                *(config, kept),
                batch=32,
                context=100.0,
                draft_tokens=3,
                recurrent_states=way,
                tokens_per_row=2.5,
            )
        }
        for way in RecurrentStates
    }
    replay, per_draft = floors[RecurrentStates.REPLAY], floors[RecurrentStates.PER_DRAFT]
    tokens = replay.pop("tokens to replay")
    states, before = replay.pop("recurrent states"), per_draft.pop("recurrent states")
    assert replay == per_draft
    assert states.written == states.read == before.read
    # of the pools: half of a ring's places are a step's
    ring, plain = (
        bytes_per_group(config, kept, draft_tokens=3, recurrent_states=way)
        for way in (RecurrentStates.REPLAY, RecurrentStates.PER_DRAFT)
    )
    rings = 32 * (ring - plain) + 3 * before.read
    assert tokens.written == rings / 2
    assert tokens.read == pytest.approx(tokens.written * 2.5 / 4, abs=1)


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_floor_counts_weights_and_states_as_the_model_has_them(drafts: int) -> None:
    config = preset("m395")
    parts = {
        part.name: part
        for part in decode_floor(
            config, torch.bfloat16, batch=32, context=100.0, draft_tokens=drafts
        )
    }
    weights = count_parameters(config) - config.vocab_size * config.hidden_size
    tokens = 32 * (1 + drafts)
    assert parts["weights"].read == 2 * (weights + tokens * config.hidden_size)
    recurrent, conv = parts["recurrent states"], parts["conv states"]
    one = 32 * bytes_per_group(config, torch.bfloat16, draft_tokens=0)
    assert recurrent.read + conv.read == one
    assert recurrent.written == (1 + drafts) * recurrent.read
    assert parts["keys and values"].read == 32 * 100 * 4 * 2 * 2 * 256 * 2
    assert parts["logits"].written == tokens * config.vocab_size * 2
    mtp = {name for name in parts if name.startswith("MTP")}
    assert bool(mtp) == bool(drafts)
    if drafts:
        layer = count_parameters(config, with_mtp=True) - count_parameters(config)
        head = config.vocab_size * config.hidden_size
        rows = 32 * config.hidden_size
        assert parts["MTP weights"].read == 3 * 2 * (layer + head + rows)


def test_a_copy_has_a_rate() -> None:
    assert copy_rate(VirtualDevice("MI355X"), 2**16, repeats=2) > 0


# -- device time
def _kernels() -> dict[str, str]:
    """Triton kernels that are launched, by name, with their file."""
    found = {}
    for path in PACKAGE.rglob("*_triton.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                assert any("jit" in ast.unparse(mark) for mark in node.decorator_list)
                found[node.name] = path.name
    return found


def test_every_kernel_of_ours_has_a_category() -> None:
    kernels = _kernels()
    assert len(kernels) > 15
    assert {name for name in kernels if category_of(name) is Category.OTHER} == set()
    expected = {
        "causal_conv1d": Category.CONV,
        "gated_delta_rule": Category.RECURRENT,
        "decode_attention": Category.ATTENTION,
        "prefill_attention": Category.ATTENTION,
        "paged_attention": Category.ATTENTION,
        "layer_norm": Category.ELEMENTWISE,
        "activation": Category.ELEMENTWISE,
        "rejection_sampler": Category.SAMPLER,
        "sampling": Category.SAMPLER,
        "mtp": Category.DRAFTS,
        "dspark": Category.DRAFTS,
    }
    for name, file in kernels.items():
        wanted = expected.get(file.removesuffix("_triton.py"))
        if wanted is not None and name != "rms_norm_gated_kernel":
            assert category_of(name) is wanted, name


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", Category.LINEAR),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", Category.LINEAR),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", Category.LINEAR),
        ("Cijk_Alik_Bljk_BBS_BH_MT16x16x64", Category.LINEAR),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<cutlass::bfloat16_t>", Category.ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", Category.ATTENTION),
        ("fused_recurrent_gated_delta_rule_fwd_kernel", Category.RECURRENT),
        ("chunk_fwd_kernel_o", Category.RECURRENT),
        ("causal_conv1d_fwd_kernel", Category.CONV),
        ("Memcpy DtoH (Device -> Pinned)", Category.COPIES),
        ("Memset (Device)", Category.COPIES),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::Fill>", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<ArgMaxOps>>", "sampler"),
        ("a_kernel_of_somebody", Category.OTHER),
    ],
)
def test_foreign_kernels_are_told_apart(name: str, category: str) -> None:
    wanted = Category.ELEMENTWISE if category == "elementwise" else Category(category)
    assert category_of(name) is wanted


STEP = [
    ("step_inputs_kernel", Category.ELEMENTWISE),
    ("nvjet_gemm", Category.LINEAR),
    ("row_part_kernel", Category.SAMPLER),
    ("verdict_kernel", Category.SAMPLER),
    ("outputs_kernel", Category.SAMPLER),
    ("nvjet_gemm", Category.DRAFTS),
    ("decode_kernel", Category.DRAFTS),
    ("Memcpy DtoH", Category.COPIES),
    ("Memcpy HtoD", Category.COPIES),
]


def test_what_runs_behind_the_verdict_is_the_drafts() -> None:
    names = [name for name, _ in STEP] * 3
    spans = [Span(name, 10.0 * place, 10.0 * place + 4) for place, name in enumerate(names)]
    found = shares(spans, has_drafts=True)
    counts = Counter(category for _, category in STEP)
    assert {c: share.launches for c, share in found.items() if share.launches} == {
        category: 3 * count for category, count in counts.items()
    }
    plain = shares(spans, has_drafts=False)
    assert plain[Category.DRAFTS].launches == 0
    assert plain[Category.LINEAR].launches == 6


@given(
    st.lists(
        st.tuples(
            st.sampled_from([name for name, _ in STEP]),
            st.integers(0, 60),
            st.integers(0, 30),
        ),
        max_size=30,
    )
)
def test_categories_add_up_to_the_time_in_which_anything_ran(
    spans: list[tuple[str, int, int]],
) -> None:
    found = shares([Span(name, at, at + long) for name, at, long in spans], has_drafts=True)
    busy = {moment for _, at, long in spans for moment in range(at, at + long)}
    assert sum(share.microseconds for share in found.values()) == len(busy)
    assert sum(share.launches for share in found.values()) == len(spans)


# -- rows and goals
def test_rows_are_timed_or_say_why_not() -> None:
    same: dict[str, Any] = {
        "point_id": "p",
        "job": Job.DECODE,
        "arm": SpeedArm.OURS,
        "clock": Clock.ACCELERATOR,
        "batch": 1,
        "prompt_tokens": 1,
    }
    with pytest.raises(ValidationError, match="steps and times"):
        SpeedRow(**same)
    with pytest.raises(ValidationError, match="has no time"):
        SpeedRow(**same, left_out="gone", repeat=0)
    with pytest.raises(ValidationError, match="either a category"):
        DeviceTimeRow(point_id="p", arm=SpeedArm.OURS)


def _frames(
    ours: float, peer: float, forced: float, *, spread: float = 0.0, clock: str = "accelerator"
) -> tuple[pd.DataFrame, pd.DataFrame]:
    rates = {SpeedArm.OURS: ours, SpeedArm.TRANSFORMERS: peer, SpeedArm.FORCED: forced}
    rows = [
        {
            "point_id": "decode-b32-t128",
            "job": "decode",
            "arm": str(arm),
            "clock": clock,
            "batch": 32,
            "repeat": repeat,
            "steps": 10,
            "tokens": 320,
            "tokens_per_s": rate * (1 + spread * (repeat - 2)),
            "step_ms": 32e3 / rate,
            "step_p99_ms": 40e3 / rate,
        }
        for arm, rate in rates.items()
        for repeat in range(5)
    ]
    columns = [name for name in SpeedRow.model_fields if name not in rows[0]]
    samples = pd.DataFrame(rows).assign(**dict.fromkeys(columns))
    floors = pd.DataFrame(
        {
            "point_id": ["decode-b32-t128"],
            "arm": ["ours"],
            "read_bytes": [3_000_000],
            "written_bytes": [1_000_000],
            "copy_bytes_per_s": [4e9],
        }
    )
    return samples, floors


@pytest.mark.parametrize(
    ("rates", "outcomes"),
    [
        # 32 requests, floor 1 ms: 16,000 tokens/s are 2 ms a step
        ((16_000, 500, 27_000), (MET, MET, MET)),
        ((8_000, 500, 12_000), (MISSED, MISSED, MISSED)),
    ],
)
def test_goals_are_met_or_missed(rates: Any, outcomes: Any) -> None:
    samples, floors = _frames(*rates)
    found = goals(summarise(samples, floors), samples)
    assert tuple(goal.outcome for goal in found) == outcomes
    assert found[1].value is not None
    assert found[1].value[0] == pytest.approx(32e3 / rates[0])


def test_a_goal_inside_its_interval_stays_open() -> None:
    samples, floors = _frames(15_000, 500, 27_000, spread=0.05)
    assert goals(summarise(samples, floors), samples)[0].outcome == OPEN
    samples, floors = _frames(16_000, 500, 27_000, clock="simulation")
    assert {goal.outcome for goal in goals(summarise(samples, floors), samples)} == {SIMULATED}


# -- hardware
@pytest.mark.gpu
def test_device_times_and_memory_of_an_accelerator() -> None:
    reason = why_no_accelerator()
    if reason is not None:
        pytest.skip(reason)
    sizes = {**VIRTUAL_SIZES, **SMALL, "device": "accelerator", "profile_steps": 4}
    settings = sized(sizes, quick=False)
    found = {
        point.kind: tables for point, tables in run_points(settings, open_device("accelerator"))
    }
    memory = {row.part: row for row in found[PointKind.MEMORY]["memory"]}  # type: ignore[attr-defined]
    peak = memory["all, at its peak"]
    assert peak.measured_bytes > 0  # type: ignore[attr-defined]
    decode = found[PointKind.DECODE]
    times = [row for row in decode["device_time"] if isinstance(row, DeviceTimeRow)]
    for arm in OUR_DECODE:
        if arm is SpeedArm.NULL:
            continue
        mine = {row.category: row.ms_per_step or 0.0 for row in times if row.arm is arm}
        assert {Category.LINEAR, Category.CONV, Category.RECURRENT, Category.SAMPLER} <= set(mine)
        assert (Category.DRAFTS in mine) == (arm is not SpeedArm.OURS)
        assert mine.get(Category.OTHER, 0.0) <= 0.1 * sum(mine.values())
    for row in decode["samples"]:
        assert isinstance(row, SpeedRow)
        assert row.clock is Clock.ACCELERATOR
        if row.arm is SpeedArm.OURS:
            assert row.device_ms is not None
            assert row.gap_ms is not None
            assert row.device_ms > 0
