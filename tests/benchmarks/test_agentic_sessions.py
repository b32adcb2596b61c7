"""Sessions as load: ids follow the hashes, traces are read as they stand, drawn ones resemble."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.benchmarks.agentic_sessions import (
    Session,
    Traces,
    Turn,
    generate_sessions,
    load_traces,
    prompt_token_ids,
    working_set_tokens,
    write_traces,
)
from atom.errors import BadInput

_HASHES = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6)


def shared(left: Sequence[object], right: Sequence[object]) -> int:
    """Length of the common prefix."""
    pairs = zip(left, right, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def whole(hashes: Sequence[int]) -> Turn:
    return Turn(64 * len(hashes), 1, tuple(hashes), 0.0)


def request(number: int, ids: Sequence[float], length: int, **more: object) -> dict[str, object]:
    return {"t": 10.0 * number, "in": length, "out": 8, "hash_ids": list(ids), **more}


def trace(*requests: object, **more: object) -> dict[str, Any]:
    return {"id": "one", "block_size": 4, "requests": list(requests), **more}


def write(folder: Path, *traces: object) -> Path:
    for number, values in enumerate(traces):
        (folder / f"trace_{number}.json").write_text(json.dumps(values))
    return folder


# -- token ids
@given(_HASHES, _HASHES, st.integers(0, 6), st.sampled_from([256, 512, 32000]))
def test_prompts_share_tokens_exactly_as_far_as_hashes(
    left: list[int], right: list[int], common: int, vocab_size: int
) -> None:
    right = left[:common] + right
    ids = [prompt_token_ids(whole(hashes), vocab_size=vocab_size) for hashes in (left, right)]
    assert shared(*ids) // 64 == shared(left, right)
    assert all(0 <= token < vocab_size for one in ids for token in one)


@given(_HASHES, st.text(max_size=5), st.text(max_size=5))
def test_another_salt_shares_nothing(hashes: list[int], salt: str, other: str) -> None:
    ids, others = (prompt_token_ids(whole(hashes), vocab_size=256, salt=s) for s in (salt, other))
    assert (ids == others) == (salt == other)
    if salt != other:
        # not even a block of 16 tokens anywhere
        assert all(ids[i : i + 16] != others[i : i + 16] for i in range(0, len(ids), 16))


@given(st.integers(1, 300))
def test_a_prompt_is_cut_at_its_length(length: int) -> None:
    hashes = tuple(range(-(-length // 64)))
    ids = prompt_token_ids(Turn(length, 1, hashes, 0.0), vocab_size=256)
    assert len(ids) == length
    assert ids == prompt_token_ids(whole(hashes), vocab_size=256)[:length]


def test_a_prompt_needs_hashes_for_all_of_it() -> None:
    with pytest.raises(BadInput, match="block_hashes: 1 blocks of 64 tokens for a prompt of 65"):
        prompt_token_ids(Turn(65, 1, (1,), 0.0), vocab_size=256)


def test_tokens_of_a_block_do_not_repeat_or_follow_each_other() -> None:
    ids = prompt_token_ids(whole(range(100)), vocab_size=256)
    counts = statistics.multimode(ids)
    assert len(set(ids)) == 256
    assert ids.count(counts[0]) < 2 * len(ids) / 256


def test_the_working_set_counts_a_block_once_and_the_last_as_far_as_it_goes() -> None:
    turns = (Turn(100, 1, (1, 2), 0.0), Turn(130, 1, (1, 2, 3), 0.0), Turn(70, 1, (1, 9), 0.0))
    # blocks 1 and 2 whole, 2 tokens of block 3, 6 of block 9
    assert working_set_tokens([Session("a", turns)]) == 64 + 64 + 2 + 6


# -- recorded traces
def test_a_trace_is_read_as_it_stands(tmp_path: Path) -> None:
    first = request(0, [1, 2], 9, api_time=3.0)
    second = request(1, [1, 2, 3], 13)
    third = request(2, [1, 5], 8, api_time=20.0)
    fourth = request(3, [1, 5, 6], 12)
    traces = load_traces(write(tmp_path, trace(first, second, third, fourth)))
    (session,) = traces.sessions
    assert (traces.block_tokens, dict(traces.dropped)) == (4, {})
    assert traces.source == f"recorded: {tmp_path.name}"
    assert [turn.input_tokens for turn in session.turns] == [9, 13, 8, 12]
    # from the end of the answer before, where that is known; never below 0
    assert [turn.think_seconds for turn in session.turns] == [0.0, 7.0, 10.0, 0.0]
    ids = [prompt_token_ids(turn, vocab_size=256) for turn in session.turns]
    # the last, open block is the one that the next prompt has there
    assert ids[1][:9] == ids[0]
    assert shared(ids[1], ids[2]) == 4
    assert shared(ids[2], ids[3]) == 8


@pytest.mark.parametrize(("scope", "same"), [({}, False), ({"hash_id_scope": "global"}, True)])
def test_hashes_of_one_session_mean_nothing_in_another(
    tmp_path: Path, scope: dict[str, str], same: bool
) -> None:
    one = trace(request(0, [1], 4), **scope)
    write(tmp_path, one, {**one, "id": "two"})
    left, right = (session.turns[0] for session in load_traces(tmp_path).sessions)
    assert (left.block_hashes == right.block_hashes) is same


def test_lengths_scale_with_the_block(tmp_path: Path) -> None:
    write(tmp_path, trace(request(0, [1, 2], 10), request(1, [1, 2, 3], 14)))
    traces = load_traces(tmp_path, block_tokens=2)
    turns = traces.sessions[0].turns
    assert traces.block_tokens == 2
    assert [(turn.input_tokens, turn.output_tokens) for turn in turns] == [(5, 4), (7, 4)]
    ids = [prompt_token_ids(turn, vocab_size=256) for turn in turns]
    assert shared(*ids) == 5


def test_requests_over_the_context_end_their_session_and_are_counted(tmp_path: Path) -> None:
    short, long = request(0, [1], 4), request(1, [1, 2, 3], 12)
    write(tmp_path, trace(short, long, short), {**trace(long, short), "id": "two"})
    traces = load_traces(tmp_path, max_context_tokens=12)
    assert [len(session.turns) for session in traces.sessions] == [1]
    assert dict(traces.dropped) == {
        "requests from the first over max_context_tokens on": 4,
        "sessions without a request within max_context_tokens": 1,
    }
    assert len(load_traces(tmp_path, max_context_tokens=20).sessions) == 2
    with pytest.raises(BadInput, match="max_context_tokens"):
        load_traces(tmp_path, max_context_tokens=11)


def test_requests_of_sub_agents_are_left_out_and_counted(tmp_path: Path) -> None:
    inner = request(1, [7], 4)
    agent = {"type": "subagent", "t": 1.0, "requests": [inner, inner]}
    traces = load_traces(write(tmp_path, trace(request(0, [1], 4), agent)))
    assert len(traces.sessions[0].turns) == 1
    assert dict(traces.dropped) == {"requests of sub-agents": 2}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([], "expected an object"),
        ({"block_size": 4, "requests": [1]}, "id: expected a text"),
        (trace(request(0, [1], 4), block_size=0), "block_size: expected a whole number"),
        (trace(), "requests: expected a list"),
        (trace(3), r"requests\[0\]: expected an object"),
        (trace(request(0, [1], 4), request(1, [1], "4")), r"requests\[1\]\.in: .*got '4'"),  # type: ignore[arg-type]
        (trace(request(0, [1], 4, out=True)), r"requests\[0\]\.out: .*got True"),
        (trace(request(0, [1], 4, t=None)), r"requests\[0\]\.t: .*got None"),
        (trace(request(0, [1], 4, t=float("nan"))), r"requests\[0\]\.t: .*got nan"),
        (trace(request(0, [1], 4, api_time="x")), r"requests\[0\]\.api_time: .*got 'x'"),
        (trace(request(0, [1.5], 4)), r"requests\[0\]\.hash_ids: expected a list"),
        (trace(request(0, [1], 40)), r"requests\[0\]\.hash_ids: 1 blocks of 4 tokens .* 40"),
    ],
)
def test_a_damaged_trace_is_named_with_its_field(
    tmp_path: Path, values: object, named: str
) -> None:
    write(tmp_path, values)
    with pytest.raises(BadInput, match=rf"trace_0\.json: {named}"):
        load_traces(tmp_path)


def test_folders_without_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no trace there"):
        load_traces(tmp_path)
    (tmp_path / "trace_0.json").write_text("{")
    with pytest.raises(BadInput, match=r"trace_0\.json: not readable as JSON"):
        load_traces(tmp_path)
    write(tmp_path, trace(request(0, [1], 4)), trace(request(0, [1], 9), block_size=8))
    with pytest.raises(BadInput, match=r"4 in trace_0\.json, 8 in trace_1\.json"):
        load_traces(tmp_path)


def test_written_sessions_are_read_back(tmp_path: Path) -> None:
    drawn = generate_sessions(3, 5, block_tokens=4)
    write_traces(drawn, tmp_path)
    read = load_traces(tmp_path)
    assert read.block_tokens == drawn.block_tokens
    for one, two in zip(drawn.sessions, read.sessions, strict=True):
        assert two.session_id == one.session_id
        assert lengths(two) == lengths(one)
        assert [t.think_seconds for t in two.turns] == pytest.approx(
            [t.think_seconds for t in one.turns]
        )
        # open last blocks excepted, what was shared is shared
        assert [b // 4 for b in prefixes(two)] == [b // 4 for b in prefixes(one)]


def lengths(session: Session) -> list[tuple[int, int]]:
    return [(turn.input_tokens, turn.output_tokens) for turn in session.turns]


def prefixes(session: Session) -> list[int]:
    ids = [prompt_token_ids(turn, vocab_size=256) for turn in session.turns]
    return [shared(left, right) for left, right in pairwise(ids)]


# -- generated sessions
def turns_of(traces: Traces) -> list[Turn]:
    return [turn for session in traces.sessions for turn in session.turns]


def follow_ups(traces: Traces) -> list[tuple[Turn, Turn]]:
    return [pair for s in traces.sessions for pair in pairwise(s.turns)]


def reuse(pair: tuple[Turn, Turn]) -> float:
    before, turn = pair
    return min(1.0, shared(before.block_hashes, turn.block_hashes) * 64 / turn.input_tokens)


#: quartiles and the 10th or 90th percentile of the 63 recorded sessions
_RECORDED: dict[str, tuple[Callable[[Traces], list[float]], list[float]]] = {
    "requests a session": (lambda t: [len(s.turns) for s in t.sessions], [8, 15, 26, 42]),
    "tokens in": (lambda t: [x.input_tokens for x in turns_of(t)], [39620, 60872, 87161, 125725]),
    "tokens out": (lambda t: [x.output_tokens for x in turns_of(t)], [142, 250, 461, 868]),
    "tokens of the first prompt": (
        lambda t: [s.turns[0].input_tokens for s in t.sessions],
        [17346, 22945, 75327, 176623],
    ),
    "growth in tokens": (
        lambda t: [b.input_tokens - a.input_tokens for a, b in follow_ups(t)],
        [397, 794, 1860, 5430],
    ),
    "pause in seconds": (
        lambda t: [b.think_seconds for _, b in follow_ups(t)],
        [5.8, 10.0, 24.1, 128.0],
    ),
}


@pytest.fixture(scope="module")
def drawn() -> Traces:
    return generate_sessions(250, 0)


@pytest.mark.parametrize("name", _RECORDED)
def test_generated_sessions_resemble_the_recorded_ones(name: str, drawn: Traces) -> None:
    values_of, recorded = _RECORDED[name]
    cuts = statistics.quantiles(values_of(drawn), n=20)
    found = [cuts[place] for place in (4, 9, 14, 17)]
    # 63 sessions place a median to about a fifth, and a tail to about a third
    for value, expected, share in zip(found, recorded, (0.3, 0.2, 0.3, 0.4), strict=True):
        assert value == pytest.approx(expected, rel=share)


def test_generated_sessions_send_again_what_recorded_ones_do(drawn: Traces) -> None:
    shares = [reuse(pair) for pair in follow_ups(drawn)]
    cuts = statistics.quantiles(shares, n=20)
    # the record: 0.79, 0.89 and 0.987 at 5, 10 and 50%, and a mean of 0.95
    assert cuts[0] == pytest.approx(0.79, abs=0.1)
    assert cuts[1] == pytest.approx(0.89, abs=0.05)
    assert cuts[9] == pytest.approx(0.987, abs=0.01)
    assert statistics.mean(shares) == pytest.approx(0.95, abs=0.02)
    sent = sum(turn.input_tokens for turn in turns_of(drawn))
    assert sent / working_set_tokens(drawn.sessions) == pytest.approx(11, rel=0.35)


def test_a_seed_gives_the_same_sessions_and_more_go_on_from_them() -> None:
    few, many = generate_sessions(3, 7), generate_sessions(5, 7)
    assert many.sessions[:3] == few.sessions
    assert generate_sessions(3, 8).sessions[0].turns != few.sessions[0].turns
    assert few.source == "generated: seed 7"


def test_generated_lengths_scale_with_the_block_and_fit_a_context() -> None:
    whole_size, small = generate_sessions(20, 1), generate_sessions(20, 1, block_tokens=4)
    for one, two in zip(turns_of(whole_size), turns_of(small), strict=True):
        assert two.input_tokens == pytest.approx(one.input_tokens / 16, abs=1)
        assert len(two.block_hashes) == -(-two.input_tokens // 4)
    fits = generate_sessions(20, 1, block_tokens=4, max_context_tokens=4000)
    assert sum(fits.dropped.values()) > 0
    assert all(turn.input_tokens + turn.output_tokens <= 4000 for turn in turns_of(fits))


@pytest.mark.parametrize(
    ("arguments", "shape", "named"),
    [
        ((0, 0), {}, "count"),
        ((1, -1), {}, "seed"),
        ((1, 0), {"output_median": 0}, "output_median"),
        ((1, 0), {"output_medium": 5}, "did you mean 'output_median'"),
    ],
)
def test_wrong_shapes_are_refused_by_name(
    arguments: tuple[int, int], shape: dict[str, object], named: str
) -> None:
    with pytest.raises(BadInput, match=named):
        generate_sessions(*arguments, **shape)  # type: ignore[arg-type]
