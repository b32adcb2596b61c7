"""A step's inputs on their way to the device: a slot is written again only behind its copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atom.device.virtual import VirtualDevice
from atom.model_engine.input_staging import InputStaging
from atom.transfer.pinned_ring import PinnedRing, PinnedSlot

STEPS = 6
WORDS = 32


class OneSlot(InputStaging):
    """Unsafe on purpose: one pinned buffer, written without asking whether its copy ran."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__(device)
        slot = PinnedSlot(device.pinned((4 * WORDS,), torch.uint8), device.new_event())

        class Unguarded(PinnedRing):
            def acquire(self, nbytes: int) -> PinnedSlot:
                return slot

            def release(self, slot: PinnedSlot, *, landed: bool = False) -> None:
                pass

        self._ring = Unguarded(device)


def parked(device: VirtualDevice) -> None:
    """The default stream stands still, so no copy has run when the host goes on."""
    device.spin(0.05)


def send_steps(device: VirtualDevice, staging: InputStaging) -> list[list[int]]:
    """What arrives in a target a step when the host runs ahead."""
    targets = [device.empty((WORDS,), torch.int32) for _ in range(STEPS)]
    parked(device)
    for step, target in enumerate(targets):
        staging.send(target, np.full(WORDS, step, dtype=np.int32))
    device.synchronize()
    host = device.pinned((STEPS, WORDS), torch.int32)
    for step, target in enumerate(targets):
        device.copy(host[step], target)
    device.synchronize()
    return host.tolist()


def test_every_step_gets_its_own_values_though_the_host_runs_ahead() -> None:
    device = VirtualDevice("MI355X")
    expected = [[step] * WORDS for step in range(STEPS)]
    assert send_steps(device, InputStaging(device)) == expected


def test_one_slot_without_its_event_gives_a_later_steps_values() -> None:
    """The control: the same steps through a slot that nobody guards."""
    device = VirtualDevice("MI355X")
    got = send_steps(device, OneSlot(device))
    assert got[-1] == [STEPS - 1] * WORDS
    assert got[0] == [STEPS - 1] * WORDS


def test_a_slot_is_used_again_only_once_its_copy_has_run() -> None:
    device = VirtualDevice("MI355X", mode="schedule")
    staging = InputStaging(device)
    ring = staging._ring
    target = device.empty((WORDS,), torch.int32)
    staging.send(target, np.zeros(WORDS, dtype=np.int32))
    staging.send(target, np.ones(WORDS, dtype=np.int32))
    # nothing has run: the second send could not take the first one's slot
    assert (len(ring), ring.busy) == (2, 0)
    first = device.ready()[0]
    device.step(first)
    # half of a copy is none
    staging.send(target, np.ones(WORDS, dtype=np.int32))
    assert len(ring) == 3
    while ready := device.ready():
        device.step(ready[0])
    staging.send(target, np.ones(WORDS, dtype=np.int32))
    assert len(ring) == 3
    device.synchronize()


def test_a_host_that_runs_too_far_ahead_waits_for_the_oldest_copy() -> None:
    # nothing runs in schedule mode until the host waits: without the wait there is no slot
    device = VirtualDevice("MI355X", mode="schedule")
    staging = InputStaging(device, max_slots=2)
    targets = [device.empty((WORDS,), torch.int32) for _ in range(5)]
    for step, target in enumerate(targets):
        staging.send(target, np.full(WORDS, step, dtype=np.int32))
    assert len(staging._ring) == 2
    device.synchronize()
    back = device.pinned((WORDS,), torch.int32)
    for step, target in enumerate(targets):
        device.copy(back, target)
        device.synchronize()
        assert set(back.tolist()) == {step}


def test_targets_of_many_steps_do_not_keep_slots() -> None:
    device = VirtualDevice("MI355X")
    staging = InputStaging(device)
    target = device.empty((WORDS,), torch.int32)
    for step in range(200):
        staging.send(target, np.full(WORDS, step, dtype=np.int32))
        device.synchronize()
    assert len(staging._ring) == 1


def test_an_opened_slot_is_nobody_elses_and_arrives_as_it_was_filled() -> None:
    device = VirtualDevice("MI355X")
    staging = InputStaging(device)
    targets = [device.empty((WORDS,), torch.int32) for _ in range(2)]
    early = staging.open(targets[0])
    early.values[:] = 1
    staging.send(targets[1], np.full(WORDS, 2, dtype=np.int32))
    early.values[WORDS // 2 :] = 3
    staging.queue(early)
    host = device.pinned((2, WORDS), torch.int32)
    for row, target in zip(host, targets, strict=True):
        device.copy(row, target)
    device.synchronize()
    assert host[0].tolist() == [1] * (WORDS // 2) + [3] * (WORDS // 2)
    assert set(host[1].tolist()) == {2}
    assert staging._ring.busy == 0


def test_an_opened_slot_that_is_taken_back_is_free_at_once_and_sends_nothing() -> None:
    device = VirtualDevice("MI355X", mode="schedule")
    staging = InputStaging(device)
    target = device.empty((WORDS,), torch.int32)
    left = staging.open(target)
    left.values[:] = 1
    staging.take_back(left)
    assert device.ready() == []
    staging.send(target, np.full(WORDS, 2, dtype=np.int32))
    assert (len(staging._ring), staging._ring.busy) == (1, 0)
    # now its copy is under way: nobody gets it
    staging.take_back(staging.open(target))
    assert len(staging._ring) == 2
    with pytest.raises(ValueError, match="released twice"):
        staging.take_back(left)


def test_values_of_another_type_are_refused() -> None:
    device = VirtualDevice("MI355X")
    with pytest.raises(TypeError):
        InputStaging(device).send(
            device.empty((WORDS,), torch.int32), np.zeros(WORDS, dtype=np.float32)
        )


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.zeros(WORDS - 1, dtype=np.int32), "got 124 of int32"),
        (np.zeros(WORDS, dtype=np.int64), "got 256 of int64"),
        (np.zeros(2 * WORDS, dtype=np.int32)[::2], "contiguous bytes are needed"),
        (np.zeros((WORDS, 1), dtype=np.float64), "of float64"),
    ],
    ids=["short", "wide", "with gaps", "other type"],
)
def test_values_of_another_size_are_refused(values: np.ndarray, reason: str) -> None:
    device = VirtualDevice("MI355X")
    staging = InputStaging(device)
    with pytest.raises(ValueError, match=reason):
        staging.send(device.empty((WORDS,), torch.int32), values)
    assert len(staging._ring) == 0


def test_shapes_and_types_arrive_as_they_are() -> None:
    device = VirtualDevice("MI355X")
    staging = InputStaging(device)
    for values in (
        np.arange(24, dtype=np.int64).reshape(2, 3, 4) - 2**40,
        np.linspace(0, 1, 6, dtype=np.float32).reshape(3, 2),
        np.zeros((0, 4), dtype=np.int32),
    ):
        kind = torch.from_numpy(values).dtype
        target = device.empty(values.shape, kind)
        staging.send(target, values)
        host = device.pinned(values.shape, kind)
        if values.size:
            device.copy(host, target)
        device.synchronize()
        assert np.array_equal(host.numpy(), values)
