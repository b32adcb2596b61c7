"""The accelerator: what needs no GPU, then (marked ``gpu``) what hardware must do."""

from __future__ import annotations

import pytest
import torch

from atom.config import DeviceChoice
from atom.device import CopyPath, Kernel, open_device
from atom.device.accelerator import Accelerator, machine_slug, why_no_accelerator
from atom.device.virtual import VirtualDevice
from atom.errors import BadInput, DeviceError, DeviceOutOfMemory, WrongDevice


def _fill(reads: tuple[torch.Tensor, ...], writes: tuple[torch.Tensor, ...], value: int) -> None:
    writes[0].fill_(value)


def _add_one(reads: tuple[torch.Tensor, ...], writes: tuple[torch.Tensor, ...]) -> None:
    torch.add(reads[0], 1, out=writes[0])


FILL = Kernel("fill", _fill)
ADD_ONE = Kernel("add one", _add_one)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("AMD Instinct MI355X", "mi355x"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA", "accelerator"),
    ],
)
def test_machine_slug(name: str, slug: str) -> None:
    assert machine_slug(name) == slug


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_no_accelerator_says_why() -> None:
    with pytest.raises(DeviceError, match=r"no accelerator: torch .+"):
        open_device(DeviceChoice.ACCELERATOR)
    assert why_no_accelerator()


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator()


@pytest.mark.gpu
class TestOnHardware:
    def test_a_kernel_writes_mapped_host_memory(self, accelerator: Accelerator) -> None:
        host = accelerator.pinned((64,), torch.int32).zero_()
        accelerator.launch(FILL, [], [accelerator.mapped(host)], scalars=(7,))
        accelerator.synchronize()
        assert host.tolist() == [7] * 64

    def test_a_host_tensor_is_no_kernel_operand(self, accelerator: Accelerator) -> None:
        with pytest.raises(DeviceError, match="mapped"):
            accelerator.launch(FILL, [], [accelerator.pinned((4,), torch.int32)], scalars=(7,))

    @pytest.mark.parametrize("path", list(CopyPath))
    @pytest.mark.parametrize("elements", [1, 3, 64, 1000])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32, torch.int64])
    def test_copies_both_ways(
        self, accelerator: Accelerator, path: CopyPath, elements: int, dtype: torch.dtype
    ) -> None:
        sent = accelerator.pinned((elements,), dtype)
        sent.copy_(torch.arange(elements).to(dtype))
        back = accelerator.pinned((elements,), dtype).zero_()
        on_device = accelerator.empty((elements,), dtype)
        side = accelerator.new_stream()
        accelerator.copy(on_device, sent, path=path)
        side.wait_stream(accelerator.default_stream)
        accelerator.copy(back, on_device, stream=side, path=path)
        accelerator.synchronize()
        assert torch.equal(back, sent)

    @pytest.mark.parametrize("path", list(CopyPath))
    def test_a_kernel_copy_of_an_odd_slice(self, accelerator: Accelerator, path: CopyPath) -> None:
        source = accelerator.empty((64,), torch.int32)
        accelerator.launch(FILL, [], [source], scalars=(3,))
        back = accelerator.pinned((64,), torch.int32).zero_()
        accelerator.copy(back[1:4], source[5:8], path=path)
        accelerator.synchronize()
        assert back[:5].tolist() == [0, 3, 3, 3, 0]

    def test_pageable_memory_is_refused(self, accelerator: Accelerator) -> None:
        with pytest.raises(DeviceError, match="pageable"):
            accelerator.copy(torch.zeros(4), accelerator.empty((4,), torch.float32))

    def test_a_spin_parks_its_own_stream_only(self, accelerator: Accelerator) -> None:
        side = accelerator.new_stream()
        begin, end = accelerator.new_event(timing=True), accelerator.new_event(timing=True)
        # calibrates
        accelerator.spin(0.001, stream=side)
        accelerator.synchronize()
        begin.record(side)
        accelerator.spin(0.02, stream=side)
        end.record(side)
        assert accelerator.default_stream.query()
        assert not end.query()
        end.synchronize()
        assert 15 < begin.elapsed_time(end) < 30

    def test_the_current_stream_stays_home(self, accelerator: Accelerator) -> None:
        side = accelerator.new_stream()
        tensor = accelerator.empty((4,), torch.int32, stream=side)
        accelerator.launch(FILL, [], [tensor], scalars=(1,), stream=side)
        accelerator.matmul(64, stream=side)
        accelerator.traffic(4096, "d2h", stream=side)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()

    def test_a_graph_replays_on_the_same_addresses(self, accelerator: Accelerator) -> None:
        given = accelerator.empty((64,), torch.int32)
        accelerator.launch(FILL, [], [given], scalars=(1,))
        with accelerator.capture() as graph:
            output = accelerator.empty((64,), torch.int32)
            accelerator.launch(ADD_ONE, [given], [output])
        host = accelerator.pinned((64,), torch.int32)
        for value in (41, 99):
            accelerator.launch(FILL, [], [given], scalars=(value,))
            graph.replay()
            accelerator.copy(host, output)
            accelerator.synchronize()
            assert host.tolist() == [value + 1] * 64

    def test_events_that_were_never_recorded(self, accelerator: Accelerator) -> None:
        event = accelerator.new_event()
        assert event.query()
        event.synchronize()
        event.wait(accelerator.new_stream())
        accelerator.synchronize()

    def test_out_of_memory_names_the_sizes(self, accelerator: Accelerator) -> None:
        with pytest.raises(DeviceOutOfMemory, match=r"bytes free on the device.*reserved"):
            accelerator.empty((accelerator.properties.memory_bytes * 2,), torch.uint8)

    def test_streams_of_another_device(self, accelerator: Accelerator) -> None:
        foreign = VirtualDevice("MI355X").new_stream()
        with pytest.raises(WrongDevice):
            accelerator.spin(0.001, stream=foreign)

    def test_the_thirty_third_stream_is_the_first(self, accelerator: Accelerator) -> None:
        streams = [accelerator.new_stream() for _ in range(33)]
        assert streams[32].stream_id == streams[0].stream_id
        assert len({stream.stream_id for stream in streams}) == 32

    def test_bad_traffic(self, accelerator: Accelerator) -> None:
        with pytest.raises(BadInput, match="d2h"):
            accelerator.traffic(4096, "sideways")
