"""The torch front end, without a GPU: real torch operations, a fake device layer."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.cuda._gpu_trace as gpu_trace
from fake_cuda import BLOCK, FakeCuda, FakeEvent, FakeGraph, FakeStream
from torch import Tensor
from torch.utils import _pytree as pytree

from atom.errors import DeviceError
from atom.lifetime.findings import Kind, LifetimeFindings, Report, Suppression
from atom.lifetime.sanitizer import Sanitizer, sanitizer
from atom.lifetime.torch_layer import REGISTRIES
from atom.lifetime.torch_plans import plan_of

SIDE = 77


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    yield FakeCuda()
    gc.collect()


def kinds(report: Report) -> set[Kind]:
    return {finding.kind for finding in report.findings}


def copied(cuda: FakeCuda, source: Tensor, host: Tensor) -> FakeEvent:
    """Edge (a), then a copy on the side stream and its event."""
    cuda.join(SIDE, 0)
    with cuda.on(SIDE):
        host.copy_(source, non_blocking=True)
    done = FakeEvent(cuda)
    done.record(SIDE)
    return done


def drop_at_once(cuda: FakeCuda) -> None:
    host, source = cuda.pinned(32), cuda.empty(32)
    source.fill_(1)
    copied(cuda, source, host)
    del source
    cuda.empty(64).fill_(2)


def hold(cuda: FakeCuda) -> None:
    host, source = cuda.pinned(32), cuda.empty(32)
    source.fill_(1)
    copied(cuda, source, host).synchronize()
    del source
    cuda.empty(64).fill_(2)
    host.tolist()


def hold_until_query(cuda: FakeCuda) -> None:
    host, source = cuda.pinned(32), cuda.empty(32)
    source.fill_(1)
    done = copied(cuda, source, host)
    assert not done.query()
    done.done = True
    assert done.query()
    del source
    host.clone()


def query_that_fails(cuda: FakeCuda) -> None:
    host, source = cuda.pinned(32), cuda.empty(32)
    source.fill_(1)
    assert not copied(cuda, source, host).query()
    del source


def stream_query(cuda: FakeCuda) -> None:
    host, source = cuda.pinned(32), cuda.empty(32)
    source.fill_(1)
    copied(cuda, source, host)
    assert FakeStream(SIDE).query()
    del source


def elapsed_time(cuda: FakeCuda) -> None:
    host, source = cuda.pinned(32), cuda.empty(32)
    source.fill_(1)
    done = copied(cuda, source, host)
    assert FakeEvent(cuda).elapsed_time(done) == 1.0
    del source


def joined(cuda: FakeCuda) -> None:
    host, source = cuda.pinned(32), cuda.empty(32)
    source.fill_(1)
    copied(cuda, source, host)
    cuda.join(0, SIDE)
    del source


def read_early(cuda: FakeCuda) -> None:
    host, source = cuda.pinned(32), cuda.empty(32)
    source.fill_(1)
    copied(cuda, source, host)
    host.sum()
    cuda.synchronize()


def item_early(cuda: FakeCuda) -> None:
    host, source = cuda.pinned(32), cuda.empty(32)
    source.fill_(1)
    copied(cuda, source, host)
    host[3].item()
    cuda.synchronize()


def tolist_early(cuda: FakeCuda) -> None:
    host, source = cuda.pinned(32), cuda.empty(32)
    source.fill_(1)
    copied(cuda, source, host)
    host.tolist()
    cuda.synchronize()


def blocking_copy(cuda: FakeCuda) -> None:
    host, source = cuda.pinned(32), cuda.empty(32)
    source.fill_(1)
    cuda.join(SIDE, 0)
    with cuda.on(SIDE):
        host.copy_(source)
    del source
    host.tolist()


def item_on_the_side(cuda: FakeCuda) -> None:
    source = cuda.empty(1)
    source.fill_(1)
    cuda.join(SIDE, 0)
    with cuda.on(SIDE):
        source.item()
    del source


def producer_not_waited_for(cuda: FakeCuda) -> None:
    host, source = cuda.pinned(32), cuda.empty(32)
    source.fill_(1)
    with cuda.on(SIDE):
        host.copy_(source, non_blocking=True)
    cuda.synchronize()


def staging_again(cuda: FakeCuda) -> None:
    staging, batch = cuda.pinned(32), cuda.empty(32)
    batch.copy_(staging, non_blocking=True)
    staging.zero_()
    cuda.synchronize()


def pageable_staging_again(cuda: FakeCuda) -> None:
    staging, batch = torch.zeros(32, dtype=torch.int32), cuda.empty(32)
    batch.copy_(staging, non_blocking=True)
    staging.zero_()
    cuda.synchronize()


def views_read_nothing(cuda: FakeCuda) -> None:
    source = cuda.empty(4, 8)
    source.fill_(1)
    with cuda.on(SIDE):
        rows = source.view(32)[4:8].unsqueeze(0).transpose(0, 1)
        parts = source.split(2)
    del rows, parts
    source.add_(1)


def columns_do_not_meet(cuda: FakeCuda) -> None:
    table = cuda.empty(16, 4)
    with cuda.on(SIDE):
        table[:, 1].fill_(1)
    table[:, 0].fill_(2)
    table[:, 2:].fill_(2)
    cuda.synchronize()


def columns_meet(cuda: FakeCuda) -> None:
    table = cuda.empty(16, 4)
    with cuda.on(SIDE):
        table[:, 1].fill_(1)
    table[:, :2].fill_(2)
    cuda.synchronize()


def graph_overwrites(cuda: FakeCuda) -> None:
    graph, output, host = FakeGraph(), cuda.empty(32), cuda.pinned(32)
    graph.capture_begin()
    output.fill_(3)
    graph.capture_end()
    graph.replay()
    copied(cuda, output, host)
    graph.replay()
    cuda.synchronize()


def graph_waits(cuda: FakeCuda) -> None:
    graph, output, host = FakeGraph(), cuda.empty(32), cuda.pinned(32)
    graph.capture_begin()
    output.fill_(3)
    graph.capture_end()
    graph.replay()
    copied(cuda, output, host).wait(0)
    graph.replay()
    cuda.synchronize()


def capture_runs_nothing(cuda: FakeCuda) -> None:
    graph, output = FakeGraph(), cuda.empty(32)
    with cuda.on(SIDE):
        graph.capture_begin()
        output.fill_(3)
        graph.capture_end()
    output.fill_(1)
    cuda.synchronize()


def in_a_thread(cuda: FakeCuda) -> None:
    thread = threading.Thread(target=drop_at_once, args=(cuda,))
    thread.start()
    thread.join()


def backward(cuda: FakeCuda) -> None:
    weight = cuda.empty(4, 4, dtype=torch.float32)
    weight.fill_(1.0)
    weight.requires_grad_()
    (weight * 2).sum().backward()
    assert weight.grad is not None
    cuda.synchronize()


FREED, NOTHING = {Kind.FREED_IN_USE}, set[Kind]()
PROGRAMS: list[tuple[Callable[[FakeCuda], None], set[Kind]]] = [
    (drop_at_once, FREED),
    (hold, NOTHING),
    (hold_until_query, NOTHING),
    (query_that_fails, FREED),
    (stream_query, NOTHING),
    (elapsed_time, NOTHING),
    (joined, NOTHING),
    (read_early, {Kind.HOST_READ_TOO_EARLY}),
    (item_early, {Kind.HOST_READ_TOO_EARLY}),
    (tolist_early, {Kind.HOST_READ_TOO_EARLY}),
    (blocking_copy, NOTHING),
    (item_on_the_side, NOTHING),
    (producer_not_waited_for, {Kind.READ_TOO_EARLY}),
    (staging_again, {Kind.HOST_WRITE_TOO_EARLY}),
    (pageable_staging_again, NOTHING),
    (views_read_nothing, NOTHING),
    (columns_do_not_meet, NOTHING),
    (columns_meet, {Kind.UNORDERED_WRITES}),
    (graph_overwrites, {Kind.LIVE_OVERWRITE}),
    (graph_waits, NOTHING),
    (capture_runs_nothing, NOTHING),
    (in_a_thread, FREED),
    (backward, NOTHING),
]


@pytest.mark.parametrize(
    ("program", "expected"), PROGRAMS, ids=lambda p: getattr(p, "__name__", "")
)
def test_program(cuda: FakeCuda, program: Callable[[FakeCuda], None], expected: set[Kind]) -> None:
    with sanitizer(layer=cuda) as report:
        program(cuda)
    assert kinds(report) == expected, report.text()


def test_lines_of_the_copy_the_free_and_the_reuse(cuda: FakeCuda) -> None:
    with sanitizer(layer=cuda) as report:
        drop_at_once(cuda)
    (finding,) = report.findings
    first = drop_at_once.__code__.co_firstlineno
    assert finding.first.operation == "copy_"
    assert finding.first.tensor == "int32[32]"
    assert (__file__, first + 3) in finding.first.site.lines()
    assert finding.freed is not None
    assert (__file__, first + 4) in finding.freed.lines()
    assert finding.second is not None
    assert finding.second.operation == "fill_"
    assert finding.second.site.line == first + 5


def test_a_tensor_that_was_there_before_has_an_owner(cuda: FakeCuda) -> None:
    source, host = cuda.empty(32), cuda.pinned(32)
    with sanitizer(layer=cuda) as report:
        copied(cuda, source, host)
        del source
    assert kinds(report) == FREED
    assert report.findings[0].block_bytes == BLOCK


class ByType(FakeCuda):
    """Takes float64 tensors for device tensors, so that a conversion is a copy to the device."""

    def is_device(self, tensor: Tensor) -> bool:
        return super().is_device(tensor) or tensor.dtype is torch.float64


@pytest.mark.parametrize(
    ("stream", "joins", "expected"),
    [(0, False, NOTHING), (SIDE, True, NOTHING), (SIDE, False, {Kind.READ_TOO_EARLY})],
    ids=["same stream", "joined", "not joined"],
)
def test_a_copy_from_pinned_memory_is_device_work(
    stream: int, joins: bool, expected: set[Kind]
) -> None:
    cuda = ByType()
    with sanitizer(layer=cuda) as report:
        host, source = cuda.pinned(32), cuda.empty(32)
        source.fill_(1)
        host.copy_(source, non_blocking=True)
        if joins:
            cuda.join(stream, 0)
        with cuda.on(stream):
            host.to(torch.float64, non_blocking=True)
        cuda.synchronize()
    # the host itself has read nothing
    assert kinds(report) == expected


def test_a_conversion_on_the_host_reads_there(cuda: FakeCuda) -> None:
    with sanitizer(layer=cuda) as report:
        host, source = cuda.pinned(32), cuda.empty(32)
        source.fill_(1)
        host.copy_(source, non_blocking=True)
        host.to(torch.float64)
        cuda.synchronize()
    assert kinds(report) == {Kind.HOST_READ_TOO_EARLY}


def test_record_stream_lets_the_block_go(cuda: FakeCuda) -> None:
    class Recorded:
        stream_id = SIDE

    with sanitizer(layer=cuda) as report:
        host, source = cuda.pinned(32), cuda.empty(32)
        source.fill_(1)
        copied(cuda, source, host)
        # the operator itself needs a device: what the mode does with it is what counts
        from atom.lifetime.watch_mode import WatchMode

        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        assert isinstance(mode, WatchMode)
        front = mode._front
        front.do(front.monitor.record_stream, source.data_ptr(), front.layer.stream_key(Recorded()))
        del source
    assert kinds(report) == NOTHING


def test_a_wrapper_tensor_is_taken_apart(cuda: FakeCuda) -> None:
    class Wrapper(Tensor):
        inner: Tensor

        @staticmethod
        def __new__(cls, inner: Tensor) -> Wrapper:
            made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
            made.inner = inner
            return made

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            args = pytree.tree_map_only(Wrapper, lambda tensor: tensor.inner, args)
            return func(*args, **(kwargs or {}))

    with sanitizer(layer=cuda) as report:
        inner = cuda.empty(32)
        inner.fill_(1)
        with cuda.on(SIDE):
            Wrapper(inner).add_(1)
        cuda.synchronize()
    assert kinds(report) == {Kind.UNORDERED_WRITES}


def test_nothing_remains_when_it_is_off(cuda: FakeCuda) -> None:
    def state() -> list[object]:
        return [
            Tensor.numpy,
            Tensor.tolist,
            threading.Thread.start,
            FakeEvent.query,
            FakeGraph.replay,
            [len(getattr(gpu_trace, name).callback_list) for name in REGISTRIES],
            torch.utils._python_dispatch._get_current_dispatch_mode(),
        ]

    before = state()
    with sanitizer(layer=cuda) as report:
        assert state() != before
    assert state() == before
    drop_at_once(cuda)
    assert report.operations == 0
    assert not report.findings


def test_sizes_of_blocks_are_rounded(cuda: FakeCuda) -> None:
    with sanitizer(layer=cuda) as report:
        host, source = cuda.pinned(200), cuda.empty(200)
        source.fill_(1)
        copied(cuda, source, host)
        del source
    assert report.findings[0].block_bytes == 1024


def test_a_numpy_view_that_is_kept_is_a_blind_spot_and_no_finding(cuda: FakeCuda) -> None:
    with sanitizer(layer=cuda) as report:
        host, source = cuda.pinned(32), cuda.empty(32)
        source.fill_(1)
        done = copied(cuda, source, host)
        view = host.numpy()
        done.synchronize()
        view.sum()
    assert not report.findings
    assert any("NumPy view" in text for text in report.cannot_see)


def test_a_numpy_view_that_dies_early_was_read_early(cuda: FakeCuda) -> None:
    with sanitizer(layer=cuda) as report:
        host, source = cuda.pinned(32), cuda.empty(32)
        source.fill_(1)
        done = copied(cuda, source, host)
        host.numpy().sum()
        done.synchronize()
    assert kinds(report) == {Kind.HOST_READ_TOO_EARLY}


def test_an_allocator_that_hides_itself_is_refused() -> None:
    layer = FakeCuda(refusal="the cudaMallocAsync allocator calls no allocation callbacks")
    with pytest.raises(DeviceError, match="cudaMallocAsync"), sanitizer(layer=layer):
        pass


def test_a_suppressed_line_does_not_count_and_keeps_its_reason(cuda: FakeCuda) -> None:
    line = drop_at_once.__code__.co_firstlineno + 4
    reason = Suppression("test_sanitizer_torch.py", line, "shows the fault on purpose")
    other = Suppression("test_sanitizer_torch.py", line + 1000, "another line")
    with sanitizer([other, reason], layer=cuda) as report:
        drop_at_once(cuda)
    assert report.exit_code == 0
    assert [finding.suppressed for finding in report.suppressed] == ["shows the fault on purpose"]
    with sanitizer([other], layer=cuda) as report:
        drop_at_once(cuda)
    assert report.exit_code == 1
    with pytest.raises(LifetimeFindings, match="freed-in-use"):
        report.raise_if_found()


def test_seen_often_is_one_finding(cuda: FakeCuda) -> None:
    with sanitizer(layer=cuda) as report:
        for _ in range(5):
            drop_at_once(cuda)
    (finding,) = report.findings
    assert finding.count == 5


def test_what_operators_touch() -> None:
    aten = torch.ops.aten

    def touched(operation: object) -> list[tuple[str, bool]]:
        plan = plan_of(operation)
        assert plan is not None
        return [(name, write) for _, name, write in plan.arguments]

    assert touched(aten.mm.out) == [("self", False), ("mat2", False), ("out", True)]
    assert touched(aten.copy_.default) == [("self", True), ("src", False)]
    assert touched(aten.cat.default) == [("tensors", False)]
    assert touched(aten.zeros_like.default) == []
    for view in (aten.view.default, aten.split.Tensor, aten._unsafe_view.default, aten.t.default):
        plan = plan_of(view)
        assert plan is not None
        assert plan.nothing
    for operation, waits in (
        (aten._local_scalar_dense.default, True),
        (aten.equal.default, True),
        (aten.nonzero.default, False),
        (aten.add_.Tensor, False),
    ):
        plan = plan_of(operation)
        assert plan is not None
        assert plan.synchronous is waits
    assert plan_of(aten.empty_like.default).writes_output is False  # type: ignore[union-attr]
    assert plan_of(aten.zeros_like.default).writes_output is True  # type: ignore[union-attr]
    assert plan_of(object()) is None


def test_tensors_without_a_storage_do_not_stop_the_program(cuda: FakeCuda) -> None:
    with sanitizer(layer=cuda) as report:
        host, source = cuda.pinned(32), cuda.empty(32)
        copied(cuda, source, host).synchronize()
        sparse = torch.eye(3).to_sparse()
        assert (sparse @ torch.ones(3, 1)).sum() == 3
        del source
    assert not report.findings


def test_what_cannot_be_read_holds_up_nothing_behind_it() -> None:
    watch = Sanitizer(layer=FakeCuda())
    seen: list[int] = []

    def fails() -> None:
        raise RuntimeError("no storage")

    def work() -> None:
        # a tensor dies in the middle of our own work
        watch.front.do(fails)
        watch.front.do(seen.append, 1)
        assert not seen

    watch.front.do(work)
    assert seen == [1]
    assert watch.report.cannot_see == ["some work could not be read: no storage"]


def test_a_watched_thread_does_not_hold_itself() -> None:
    import weakref

    class Worker(threading.Thread):
        def run(self) -> None:
            return None

    with sanitizer(layer=FakeCuda()):
        worker = Worker()
        gone = weakref.ref(worker)
        gc.disable()
        try:
            worker.start()
            worker.join()
            del worker
            assert gone() is None
        finally:
            gc.enable()
