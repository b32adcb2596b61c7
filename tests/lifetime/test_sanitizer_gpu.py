"""The sanitizer on plain torch programs on a GPU: ``python -m pytest -m gpu tests/lifetime``."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from atom.lifetime.findings import Kind, Report
from atom.lifetime.sanitizer import sanitizer

pytestmark = pytest.mark.gpu

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
PARKED_CYCLES = 10_000_000
FREED, NOTHING = {Kind.FREED_IN_USE}, set[Kind]()

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def copy_kernel(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        offsets = tl.arange(0, BLOCK)
        tl.store(target + offsets, tl.load(source + offsets))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.cuda.synchronize()


def watched(program: Callable[[], None]) -> Report:
    with sanitizer() as report:
        program()
        torch.cuda.synchronize()
    return report


def places(*folders: Path) -> str:
    """The search path of a child: these first, then what this process was given."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([given] if given else [])])


def sent(source: Tensor, side: torch.cuda.Stream) -> Tensor:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(PARKED_CYCLES)
        return source.to("cpu", non_blocking=True)


def dropped() -> None:
    side = torch.cuda.Stream()
    source = torch.ones(64, dtype=torch.int32, device="cuda")
    host = sent(source, side)
    del source
    torch.full((64,), 16384, dtype=torch.int32, device="cuda")
    side.synchronize()
    host.tolist()


def held() -> None:
    side = torch.cuda.Stream()
    source = torch.ones(64, dtype=torch.int32, device="cuda")
    host = sent(source, side)
    torch.full((64,), 16384, dtype=torch.int32, device="cuda")
    side.synchronize()
    del source
    assert host.tolist() == [1] * 64


def held_until_query() -> None:
    side = torch.cuda.Stream()
    source = torch.ones(64, dtype=torch.int32, device="cuda")
    sent(source, side)
    done = side.record_event()
    while not done.query():
        pass
    del source


def recorded() -> None:
    side = torch.cuda.Stream()
    source = torch.ones(64, dtype=torch.int32, device="cuda")
    sent(source, side)
    source.record_stream(side)
    del source


def recorded_elsewhere() -> None:
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    source = torch.ones(64, dtype=torch.int32, device="cuda")
    sent(source, side)
    source.record_stream(other)
    del source


def joined() -> None:
    side = torch.cuda.Stream()
    source = torch.ones(64, dtype=torch.int32, device="cuda")
    sent(source, side)
    torch.cuda.current_stream().wait_stream(side)
    del source


def read_at_once() -> None:
    source = torch.ones(64, dtype=torch.int32, device="cuda")
    torch.cuda._sleep(PARKED_CYCLES)
    source.to("cpu", non_blocking=True).numpy().sum()


def read_by_item() -> None:
    source = torch.ones(64, dtype=torch.int32, device="cuda")
    torch.cuda._sleep(PARKED_CYCLES)
    host = source.to("cpu", non_blocking=True)
    host[3].item()


def blocking_copies() -> None:
    side = torch.cuda.Stream()
    source = torch.ones(64, dtype=torch.int32, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host = source.cpu()
        source.sum().item()
        torch.equal(source, source)
    del source
    host.tolist()


def graph(waits: bool) -> None:
    side = torch.cuda.Stream()
    captured = torch.cuda.CUDAGraph()
    static = torch.ones(64, dtype=torch.int32, device="cuda")
    with torch.cuda.graph(captured):
        output = static + 1
        output = output * 2
    captured.replay()
    host = sent(output, side)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    captured.replay()
    side.synchronize()
    host.tolist()


def loader_loop() -> None:
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    loader: DataLoader[Any] = DataLoader(data, batch_size=8, pin_memory=True, num_workers=1)
    for inputs, targets in loader:
        inputs = inputs.to("cuda", non_blocking=True)
        targets = targets.to("cuda", non_blocking=True)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loss.item()


def round_trip(side: bool) -> None:
    """To the host and back without a wait of the host, on one stream or on two."""
    source = torch.ones(64, device="cuda")
    torch.cuda._sleep(PARKED_CYCLES)
    host = source.to("cpu", non_blocking=True)
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        back = host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert side or back.tolist() == [1] * 64


def prefetcher(records: bool) -> None:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    weight = torch.randn(256, 256, device="cuda")
    batches = [torch.randn(256, 256).pin_memory() for _ in range(4)]

    def preload(batch: Tensor) -> Tensor:
        with torch.cuda.stream(side):
            return batch.to("cuda", non_blocking=True)

    following = preload(batches[0])
    for batch in batches[1:]:
        main.wait_stream(side)
        current = following
        if records:
            current.record_stream(main)
        following = preload(batch)
        torch.mm(current, weight)
        del current


def two_readers_by_triton() -> None:
    side = torch.cuda.Stream()
    weight = torch.ones(64, device="cuda")
    outputs = [torch.empty_like(weight) for _ in range(2)]
    torch.cuda.synchronize()
    copy_kernel[(1,)](weight, outputs[0], BLOCK=64)
    with torch.cuda.stream(side):
        copy_kernel[(1,)](weight, outputs[1], BLOCK=64)
    # the tensors are the other stream's: they must outlive its use of them
    side.synchronize()


def two_writers_by_triton() -> None:
    side = torch.cuda.Stream()
    weight, output = torch.ones(64, device="cuda"), torch.empty(64, device="cuda")
    torch.cuda.synchronize()
    copy_kernel[(1,)](weight, output, BLOCK=64)
    with torch.cuda.stream(side):
        copy_kernel[(1,)](weight, output, BLOCK=64)
    side.synchronize()


def dropped_under_triton() -> None:
    side = torch.cuda.Stream()
    weight, output = torch.ones(64, device="cuda"), torch.empty(64, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(PARKED_CYCLES)
        copy_kernel[(1,)](weight, output, BLOCK=64)
    del weight


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (dropped, FREED),
        (held, NOTHING),
        (held_until_query, NOTHING),
        (recorded, NOTHING),
        (recorded_elsewhere, FREED),
        (joined, NOTHING),
        (read_at_once, {Kind.HOST_READ_TOO_EARLY}),
        (read_by_item, {Kind.HOST_READ_TOO_EARLY}),
        (blocking_copies, NOTHING),
        (lambda: graph(False), {Kind.LIVE_OVERWRITE}),
        (lambda: graph(True), NOTHING),
        (loader_loop, NOTHING),
        (lambda: round_trip(False), NOTHING),
        (lambda: round_trip(True), {Kind.READ_TOO_EARLY}),
        (lambda: prefetcher(True), NOTHING),
        (lambda: prefetcher(False), FREED),
    ],
    ids=[
        "dropped",
        "held",
        "held_until_query",
        "recorded",
        "recorded_elsewhere",
        "joined",
        "read_at_once",
        "read_by_item",
        "blocking_copies",
        "graph",
        "graph_waits",
        "loader_loop",
        "round_trip",
        "round_trip_on_two_streams",
        "prefetcher",
        "prefetcher_without_record",
    ],
)
def test_plain_torch(program: Callable[[], None], expected: set[Kind]) -> None:
    report = watched(program)
    assert {finding.kind for finding in report.findings} == expected, report.text()
    assert report.operations > 0


def test_the_lines_of_plain_torch() -> None:
    (finding,) = watched(dropped).findings
    first = dropped.__code__.co_firstlineno
    assert (__file__, first + 3) in finding.first.site.lines()
    assert finding.first.tensor == "int32[64]"
    assert finding.block_bytes == 512
    assert finding.freed is not None
    assert finding.freed.line == first + 4


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (two_readers_by_triton, NOTHING),
        (two_writers_by_triton, {Kind.UNORDERED_WRITES}),
        (dropped_under_triton, FREED),
    ],
    ids=["readers", "writers", "dropped"],
)
def test_triton_launches(program: Callable[[], None], expected: set[Kind]) -> None:
    report = watched(program)
    assert not any("reads only" in text for text in report.cannot_see), report.cannot_see
    assert {finding.kind for finding in report.findings} == expected, report.text()


@pytest.mark.parametrize(
    ("backend", "code"),
    [("expandable_segments:True", 1), ("backend:cudaMallocAsync", 3)],
    ids=["expandable segments", "cudaMallocAsync"],
)
def test_other_allocators_are_watched_or_refused(backend: str, code: int, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    words = ["run", "--json", "--output", str(out), str(HERE / "scenarios.py"), "status_dropped"]
    done = subprocess.run(
        [sys.executable, "-m", "atom.lifetime.launcher", *words, "--device", "accelerator"],
        capture_output=True,
        text=True,
        timeout=80,
        env={
            **os.environ,
            "PYTHONPATH": places(PROJECT),
            "PYTORCH_CUDA_ALLOC_CONF": backend,
            "PYTORCH_ALLOC_CONF": backend,
        },
    )
    assert done.returncode == code, done.stderr
    if code == 3:
        assert "cudaMallocAsync" in done.stderr
    else:
        (finding,) = json.loads(out.read_text())["findings"]
        assert finding["kind"] == "freed-in-use"


def test_a_spawned_worker_is_followed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing\n"
        "import scenarios\n"
        "if __name__ == '__main__':\n"
        "    words = (['status_dropped', '--device', 'accelerator'],)\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    process = context.Process(target=scenarios.main, args=words)\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "atom.lifetime.launcher", "run", "--json", str(program)],
        capture_output=True,
        text=True,
        timeout=80,
        env={**os.environ, "PYTHONPATH": places(PROJECT, HERE)},
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert [finding["kind"] for finding in report["findings"]] == ["freed-in-use"]
    assert report["processes"] == 2
