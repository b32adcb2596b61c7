"""Every source of the copy stream outlives its copy, and without its protection it does not.

Each trial parks the copy stream on a stream with a hardware queue of its own, queues the copy,
drops the source, and lets the next step allocate and write. With a protocol in force no trial may
be stale; with its protection taken away *every* trial must be, or the test would prove nothing.

The same file runs on the virtual device (CI) and, marked ``gpu``, on an accelerator:
``python -m pytest -m gpu tests/test_side_stream_d2h_source_lifetime.py``
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from atom.benchmarks import source_lifetime
from atom.benchmarks.lifetime_paths import (
    EXPOSURE,
    FILL,
    PATHS,
    LifetimePath,
    TransferPath,
    Window,
    own_queue_stream,
)
from atom.benchmarks.source_lifetime import (
    CONTROL,
    GRAPH_OUTPUT,
    PROTECTED,
    Point,
    build_points,
    run_lifetime,
    run_point,
)
from atom.benchmarks.source_lifetime_rows import LifetimeRow
from atom.config import CopyProtocol, LifetimeSettings
from atom.device import Device, open_device
from atom.device.interface import Stream
from atom.device.virtual import VirtualDevice
from atom.errors import BadInput, DeviceError
from atom.lifetime.explore import no_cycle_collection
from atom.model_engine.output_transfer import TokenIDProcessor
from atom.transfer.payload import Payload
from atom.workbook.lifetime_runs import result_text
from atom.workbook.tables import to_frame

TRIALS = 50
PARK_SECONDS = 0.01
POINTS = build_points(LifetimeSettings.parse({}))

DEVICES = ["virtual", pytest.param("accelerator", marks=pytest.mark.gpu)]


#: by device and point, for the table at the end
ROWS: dict[str, dict[str, LifetimeRow]] = defaultdict(dict)


@pytest.fixture(scope="module", params=DEVICES)
def bench(request: pytest.FixtureRequest) -> Iterator[tuple[Device, Stream]]:
    """A device and a stream that can be parked without parking the default stream.

    Behind the last test the counts of all points are printed.
    """
    device = open_device(request.param)
    try:
        stream = own_queue_stream(device, PARK_SECONDS)
    except DeviceError as error:
        pytest.skip(str(error))
    yield device, stream
    device.synchronize()
    rows = list(ROWS[device.properties.name].values())
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    if rows and capture is not None:
        with capture.global_and_fixture_disabled():
            print(f"\n{device.properties.evidence}, {device.properties.name}:")
            print(result_text(to_frame(rows, LifetimeRow)), flush=True)


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.point_id)
def test_source_lifetime(bench: tuple[Device, Stream], point: Point) -> None:
    device, stream = bench
    row = run_point(device, stream, point, TRIALS, PARK_SECONDS)
    ROWS[device.properties.name][point.point_id] = row
    zero_copy = point.protocol is CopyProtocol.ZERO_COPY
    if point.arm == CONTROL:
        assert row.stale == TRIALS, "the control has to race every time"
        if point.path != GRAPH_OUTPUT:
            assert row.tag_caught == TRIALS
        if not (zero_copy and point.path == LifetimePath.CLEAN):
            assert row.address_reused == TRIALS
        return
    assert row.stale == 0
    # a wait in the send, in clean() or before a replay leaves nothing parked and the block free
    if point.stays_parked:
        assert row.address_reused == 0
        assert row.parked == TRIALS, "the GPU is too busy with other work to show anything"
    elif zero_copy and point.path != LifetimePath.CLEAN:
        assert row.parked == 0
        # a zero-copy ell that has landed is picked up before its slot serves the next step
        assert row.address_reused == 0 or point.path == LifetimePath.ELL_SLOT


def test_a_trial_whose_park_ended_early_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = VirtualDevice("MI355X")
    stream = own_queue_stream(device)
    honest, calls = source_lifetime._Trials.wait_default, [0]

    def late(self: source_lifetime._Trials) -> bool:
        # every third trial is held up until the copy has run
        calls[0] += 1
        if calls[0] % 3 == 0:
            self.device.synchronize()
        return honest(self)

    monkeypatch.setattr(source_lifetime._Trials, "wait_default", late)
    row = run_point(device, stream, Point("sampled_ids", CopyProtocol.HOLD, PROTECTED), 8, 0.01)
    assert (row.trials, row.stale, row.parked) == (8, 0, 8)
    assert calls[0] > 8 + source_lifetime._WARM_TRIALS
    # a stale one counts, parked or not
    row = run_point(device, stream, Point("sampled_ids", CopyProtocol.HOLD, CONTROL), 8, 0.01)
    assert (row.trials, row.stale) == (8, 8)
    assert row.parked < 8
    # repetitions have an end
    monkeypatch.setattr(source_lifetime._Trials, "wait_default", lambda self: False)
    row = run_point(device, stream, Point("sampled_ids", CopyProtocol.HOLD, PROTECTED), 8, 0.01)
    assert (row.trials, row.stale, row.parked) == (8, 0, 0)


def test_every_path_has_both_arms_under_every_protocol() -> None:
    seen = {(point.path, point.protocol, point.arm) for point in POINTS}
    for path in LifetimePath:
        for protocol in CopyProtocol:
            assert (path.value, protocol, CONTROL) in seen
            protects = protocol is not CopyProtocol.UNPATCHED
            assert ((path.value, protocol, PROTECTED) in seen) is protects
    assert (GRAPH_OUTPUT, CopyProtocol.HOLD, CONTROL) in seen
    assert len(POINTS) == 7 * 9 + 2


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(BadInput, match="no path 'spec'"):
        build_points(LifetimeSettings.parse({"paths": ["spec"]}))


def test_one_hardware_queue_offers_no_stream_to_park() -> None:
    with pytest.raises(DeviceError, match="shares the default stream's hardware queue"):
        own_queue_stream(VirtualDevice("MI355X", hardware_queues=1))


def test_rows_of_the_experiment() -> None:
    settings = LifetimeSettings.parse({"trials": 4, "paths": ["ell_slot"], "protocols": ["hold"]})
    protected, control = run_lifetime(settings)
    assert (protected.stale, control.stale) == (0, 4)
    # every other following step is a prefill: only its values are outside 0..3
    assert (control.tag_caught, control.guard_caught) == (4, 2)
    assert control.window is Window.EVERY_STEP
    assert control.engine_drops


# -- which sources the engine before the fix itself drops


def test_windows_and_accidents_are_named() -> None:
    assert set(EXPOSURE) == set(LifetimePath)
    dropped = {path for path, exposure in EXPOSURE.items() if exposure.engine_drops}
    assert set(LifetimePath) - dropped == {LifetimePath.DRAFT_IDS}
    windows = {path: exposure.window for path, exposure in EXPOSURE.items()}
    assert windows[LifetimePath.SPEC_STATUS] is Window.MIDDLE_PREFILL
    assert windows[LifetimePath.SAMPLED_IDS] is windows[LifetimePath.LOGPROBS] is Window.EVERY_STEP


def parked_step(kept: bool) -> list[int]:
    """Ids of a step that the unpatched engine sends; ``kept`` keeps them for one more launch."""
    device = VirtualDevice("MI355X")
    stream = own_queue_stream(device)
    with pytest.warns(UserWarning, match="unpatched"):
        processor = TokenIDProcessor(
            device, CopyProtocol.UNPATCHED, copy_stream=stream, epoch_tag=False
        )
    device.spin(0.01, stream=stream)
    ids: Payload = processor.new_token_ids(1, (8,))
    device.launch(FILL, (), (ids.data,), scalars=(1,))
    processor.send_to_cpu_async(ids)
    previous: list[Payload] = []
    if kept:
        previous.append(ids)
    del ids
    following = processor.new_token_ids(2, (8,))
    device.launch(FILL, (), (following.data,), scalars=(2,))
    values, _ = processor.recv_async_output()
    return list(values.tolist())


def test_ids_without_a_drafter_are_kept_by_accident() -> None:
    """``prev_token_ids`` holds them for the next step's launch; with a drafter nothing does."""
    assert parked_step(kept=True) == [1] * 8
    assert parked_step(kept=False) == [2] * 8


def test_draft_ids_are_safe_only_while_the_next_launch_holds_them() -> None:
    """The verification reads them on the device, so they die after the next step's allocations.

    A refactor that lets go of them before those exposes the path: that is what its control shows.
    """
    device = VirtualDevice("MI355X")
    stream = own_queue_stream(device)
    for let_go_first, expected in ((False, 1), (True, 2)):
        with pytest.warns(UserWarning, match="unpatched"):
            processor = TokenIDProcessor(
                device, CopyProtocol.UNPATCHED, copy_stream=stream, epoch_tag=False
            )
        queue = processor.draft_ids
        device.spin(0.01, stream=stream)
        drafts: Payload | None = queue.new_payload(1, (8, 3), torch.int64)
        assert drafts is not None
        device.launch(FILL, (), (drafts.data,), scalars=(1,))
        queue.send(drafts)
        if let_go_first:
            drafts = None
        following = queue.new_payload(2, (8, 3), torch.int64)
        device.launch(FILL, (), (following.data,), scalars=(2,))
        drafts = None
        assert set(queue.receive().flatten().tolist()) == {expected}
        device.synchronize()


def test_the_status_is_open_across_a_middle_prefill_chunk_only() -> None:
    """A step that produces output drains the status first; a middle chunk allocates before that."""
    device = VirtualDevice("MI355X")
    stream = own_queue_stream(device)
    for middle_chunk, expected in ((True, 2), (False, 1)):
        with pytest.warns(UserWarning, match="unpatched"):
            processor = TokenIDProcessor(
                device, CopyProtocol.UNPATCHED, copy_stream=stream, epoch_tag=False
            )
        device.spin(0.01, stream=stream)
        verdict: Payload | None = processor.spec_status.new_verdict(1, 8)
        assert verdict is not None
        device.launch(FILL, (), (verdict.data,), scalars=(1,))
        processor.spec_status.send(verdict)
        verdict = None
        received = None if middle_chunk else processor.spec_status.receive_status()
        following = processor.spec_status.new_verdict(2, 8)
        device.launch(FILL, (), (following.data,), scalars=(2,))
        device.synchronize()
        rejected, bonus = received or processor.spec_status.receive_status()
        assert set(rejected.tolist()) == set(bonus.tolist()) == {expected}


def test_paths_send_from_fresh_blocks(bench: tuple[Device, Stream]) -> None:
    """Nothing above holds if a path's payload were a buffer that lives on."""
    device, stream = bench
    for kind in PATHS:
        path: TransferPath = kind(device, CopyProtocol.HOLD, stream=stream)
        one, other = path.step(1), path.step(2)
        assert device.address(one.raw) != device.address(other.raw)
    device.synchronize()


@pytest.mark.parametrize("arm", [PROTECTED, CONTROL])
def test_a_trial_leaves_no_tensor_to_the_cyclic_collector(arm: str) -> None:
    """Freed in the middle of a later trial, it would take the place of that trial's source."""
    device = VirtualDevice("MI355X")
    stream = own_queue_stream(device)
    with no_cycle_collection():
        run_point(device, stream, Point("sampled_ids", CopyProtocol.HOLD, arm), 3, PARK_SECONDS)
        assert device.memory_stats()["allocation.all.current"] == 0
