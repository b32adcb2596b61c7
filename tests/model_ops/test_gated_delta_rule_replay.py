"""One state and a ring against a state for each draft: the same numbers, bit for bit, on a CPU."""

from __future__ import annotations

import pytest
import torch
from gdn_batches import WIDTH, batch, draw, naive
from replay_steps import BothWays, new_pools
from replay_steps import draw as draw_step

from atom.config import GuardMode
from atom.errors import BadInput, DeviceError
from atom.model_ops import gated_delta_rule as ops
from atom.model_ops import gated_delta_rule_replay as replay
from atom.model_ops.gated_delta_rule import gated_delta_rule_prefill
from atom.model_ops.guard import GuardCode, IllegalAccess, new_record, parse_record
from atom.model_ops.prefill_plan import PrefillPlan
from atom.model_ops.replay_ring import ReplayRing, clear_rings, ring_places


def both(dtype: torch.dtype = torch.float32) -> BothWays:
    return BothWays(
        replay.gated_delta_rule_replay_from_gates,
        ops.gated_delta_rule_update_from_gates,
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_give_the_same_bits_as_a_state_for_each_draft(dtype: torch.dtype) -> None:
    run = both(dtype)
    for number in range(12):
        kept, again, _ = run.step(number)
        assert torch.equal(kept, again), number
        assert torch.equal(*run.settled()), number
    # groups of no request hold what they held
    assert run.state[[1, 2]].isnan().all()
    assert run.ring.gates[[1, 2]].isnan().all()


def test_a_count_off_by_one_is_seen() -> None:
    """The control: were the accepted tokens not what decides, the test above could not tell."""
    run = both()
    run.step(0)
    run.counts = [count % WIDTH + 1 for count in run.counts]
    kept, again, _ = run.step(1)
    assert not torch.equal(kept, again)


def test_a_prompt_chunk_leaves_the_state_and_an_empty_ring() -> None:
    inputs = draw(12, padding=2)
    state, ring = new_pools(4)
    meta = batch([9, 3], [2, 0], padding_rows=2, padding_tokens=2)
    clear_rings(ring, meta)
    output = gated_delta_rule_prefill(
        *inputs, state, meta, plan=PrefillPlan(meta, meta.state_slots)
    )
    for begin, end, group in ((0, 9, 2), (9, 12, 0)):
        part = tuple(x[begin:end] for x in inputs)
        expected, behind = naive(part, torch.zeros_like(state[group]))
        torch.testing.assert_close(output[begin:end], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state[group], behind[-1], atol=1e-5, rtol=1e-5)
        assert not ring.keys_values[group].any()
        assert not ring.gates[group].any()
    assert state[[1, 3]].isnan().all()
    assert ring.keys_values[[1, 3]].isnan().all()

    # whatever count follows, the first decode step starts from that state
    before = state.clone()
    for count in (1, WIDTH):
        step = batch([1, 1], [2, 0], contexts=[9, 3], counts=[count, 1])
        replay.gated_delta_rule_replay_from_gates(
            *(*draw_step(2), state, ring, step),
            guard=GuardMode.REPORT,
            record=new_record(),
            layer=0,
        )
        assert torch.equal(state[[0, 2]], before[[0, 2]])
        clear_rings(ring, meta)


def test_a_prefill_without_any_real_row_touches_nothing() -> None:
    _, ring = new_pools(3)
    clear_rings(ring, batch([4], [-1]))
    assert ring.keys_values.isnan().all()
    assert ring.gates.isnan().all()


def test_rings_of_all_layers_are_cleared_at_once() -> None:
    _, one = new_pools(4)
    layers = ReplayRing(torch.stack((one.keys_values,) * 3), torch.stack((one.gates,) * 3))
    clear_rings(layers, batch([2, 1], [3, 1], padding_rows=1))
    for part in (layers.keys_values, layers.gates):
        assert not part[:, [1, 3]].any()
        assert part[:, [0, 2]].isnan().all()


@pytest.mark.parametrize(
    ("count", "group", "code"),
    [
        (0, 1, GuardCode.RECURRENT_COUNT),
        (WIDTH + 1, 1, GuardCode.RECURRENT_COUNT),
        (16385, 1, GuardCode.RECURRENT_COUNT),
        (1, 5, GuardCode.RECURRENT_SLOT),
        (1, -1, GuardCode.RECURRENT_SLOT),
    ],
)
def test_the_guard_reports_and_touches_no_state(count: int, group: int, code: GuardCode) -> None:
    state, ring = new_pools(5)
    for tensor in (state, ring.keys_values, ring.gates):
        tensor[:] = torch.randn_like(tensor)
    before = state.clone(), ring.keys_values.clone(), ring.gates.clone()
    meta = batch([2, 2], [0, group], contexts=[8, 8], counts=[2, count])
    record = new_record()
    inputs = (*draw_step(4), state, ring, meta)
    output = replay.gated_delta_rule_replay_from_gates(
        *inputs, guard=GuardMode.REPORT, record=record, layer=3
    )
    fault = parse_record(record)
    assert fault is not None
    assert (fault.code, fault.row, fault.layer) == (code, 1, 3)
    assert output[:2].any()
    assert not output[2:].any()
    for then, now in zip(before, (state, ring.keys_values, ring.gates), strict=True):
        assert torch.equal(then[1:], now[1:])
        assert not torch.equal(then[0], now[0])
    with pytest.raises(DeviceError, match="device assert"):
        replay.gated_delta_rule_replay_from_gates(
            *inputs, guard=GuardMode.TRAP, record=record, layer=3
        )


def test_without_a_guard_a_count_is_cut_and_a_group_leads_anywhere() -> None:
    def run(count: int, group: int, pool: torch.Tensor, ring: ReplayRing) -> torch.Tensor:
        meta = batch([1], [group], contexts=[20], counts=[count])
        return replay.gated_delta_rule_replay_from_gates(
            *(*draw_step(1), pool, ring, meta),
            guard=GuardMode.NONE,
            record=new_record(),
            layer=0,
        )

    state, ring = new_pools(5)
    for tensor in (state, ring.keys_values, ring.gates):
        tensor[:] = torch.rand_like(tensor) - 0.5
    # far more tokens than there can be: as many as there can be
    rings = [ReplayRing(ring.keys_values.clone(), ring.gates.clone()) for _ in range(3)]
    stale, most, right = (run(count, 1, state.clone(), rings.pop()) for count in (16385, WIDTH, 2))
    assert torch.equal(stale, most)
    assert not torch.equal(stale, right)
    # a layer's view: the next layer's states lie behind it
    whole = torch.stack((state, state + 1))
    layers = ReplayRing(*(torch.stack((part,) * 2) for part in (ring.keys_values, ring.gates)))
    run(1, 6, whole[0], layers.layer(0))
    assert not torch.equal(whole[1, 1], state[1] + 1)
    with pytest.raises(IllegalAccess):
        run(1, 5, state, ring)
    with pytest.raises(IllegalAccess):
        run(1, -1, state, ring)


def test_what_does_not_fit_is_refused() -> None:
    state, ring = new_pools(2)
    arguments = {"guard": GuardMode.REPORT, "record": new_record(), "layer": 0}
    meta = batch([WIDTH + 1], [0], counts=[1])
    with pytest.raises(BadInput, match=f"room for {WIDTH}; verify fewer"):
        replay.gated_delta_rule_replay_from_gates(
            *(*draw_step(WIDTH + 1), state, ring, meta),
            **arguments,
        )
    short = ReplayRing(ring.keys_values[..., 1:], ring.gates)
    with pytest.raises(BadInput, match="expected"):
        replay.gated_delta_rule_replay_from_gates(
            *(*draw_step(1), state, short, batch([1], [0], counts=[1])),
            **arguments,
        )
    assert ring_places(3) == ring.places == 2 * ring.most_tokens
