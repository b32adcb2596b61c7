"""Arguments that no device can use are refused by name, before anything happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from atom.device.accelerator import Accelerator
from atom.device.interface import Kernel
from atom.device.profiles import PROFILES
from atom.device.virtual import VirtualDevice
from atom.errors import BadInput

NAN, INFINITE = float("nan"), float("inf")


def _fill(reads: Any, writes: Any) -> None:
    for tensor in writes:
        tensor.fill_(1)


FILL = Kernel("fill", _fill)
Call = Callable[[Any], Any]


def _block(device: Any) -> torch.Tensor:
    return device.empty((4,), torch.int32)


#: name in the message, the values that are refused, the call
SHARED: list[tuple[str, tuple[Any, ...], Callable[[Any, Any], Any]]] = [
    ("spin: seconds", (-1.0, NAN, INFINITE, "x", None, True), lambda d, v: d.spin(v)),
    ("matmul: size", (0, -1, 2.5, NAN, "x", None, True), lambda d, v: d.matmul(v)),
    ("traffic: nbytes", (0, NAN, 2.5, INFINITE, "x", None), lambda d, v: d.traffic(v, "d2h")),
    ("traffic: direction", ("d2d", None, 1), lambda d, v: d.traffic(1, v)),
    ("path", ("engin", None, 1), lambda d, v: d.traffic(1, "d2h", path=v)),
    (r"shape\[0\]", (2.5, "x", None, -1), lambda d, v: d.empty((v,), torch.int32)),
    (r"shape\[0\]", (2.5, "x", None, -1), lambda d, v: d.pinned((v,), torch.int32)),
    ("shape", (3, None), lambda d, v: d.empty(v, torch.int32)),
    ("dtype", ("int32", np.int32), lambda d, v: d.empty((1,), v)),
]
VIRTUAL: list[tuple[str, tuple[Any, ...], Callable[[Any, Any], Any]]] = [
    ("dtype", (int, None), lambda d, v: d.empty((1,), v)),
    ("host_work: seconds", (-1, NAN, INFINITE, "x", None), lambda d, v: d.host_work(v)),
    ("flops", (-1, NAN, INFINITE, "x", None), lambda d, v: d.launch(FILL, (), (), flops=v)),
    ("kernel", (None, _fill), lambda d, v: d.launch(v, (), ())),
    ("reads", (None, 3, torch.zeros(2)), lambda d, v: d.launch(FILL, v, ())),
    ("writes", (None, 3, torch.zeros(2)), lambda d, v: d.launch(FILL, (), v)),
    (r"writes\[0\]", (None, 3), lambda d, v: d.launch(FILL, (), (v,))),
    ("scalars", (None, 3), lambda d, v: d.launch(FILL, (), (), scalars=v)),
    ("copy's target", (None, 3), lambda d, v: d.copy(v, _block(d))),
    ("copy's source", (None, 3), lambda d, v: d.copy(_block(d), v)),
    ("path", ("engin", None), lambda d, v: d.copy(_block(d), _block(d), path=v)),
    ("priority", ("x", None, 0.5), lambda d, v: d.new_stream(v)),
    ("the tensor", (None, 3), lambda d, v: d.mapped(v)),
    ("the tensor", (None, 3), lambda d, v: d.label(v, "x")),
    ("the tensor", (None, 3), lambda d, v: d.record_stream(v, d.default_stream)),
    ("seed", ("x", None, 0.5), lambda d, v: VirtualDevice(seed=v)),
    ("memory_bytes", (0, "x", 2.5, NAN), lambda d, v: VirtualDevice(memory_bytes=v)),
    ("pinned_bytes", (0, "x", 2.5, NAN), lambda d, v: VirtualDevice(pinned_bytes=v)),
    ("hardware_queues", (0, 2.5, "x", True), lambda d, v: VirtualDevice(hardware_queues=v)),
    ("mode", ("both", None, 1), lambda d, v: VirtualDevice(mode=v)),
    ("copy_engines", (0, 1.5, None), lambda d, v: replace(PROFILES["H200"], copy_engines=v)),
    ("jitter", (2, NAN, "x", None), lambda d, v: replace(PROFILES["H200"], jitter=v)),
    ("matmul_occupancy", (5, NAN), lambda d, v: replace(PROFILES["H200"], matmul_occupancy=v)),
    ("occupancy", (-1, 5, NAN, INFINITE, "x", None), lambda d, v: Kernel("k", _fill, v)),
    ("name", (None, 3), lambda d, v: Kernel(v, _fill)),
    ("body", (None, 3), lambda d, v: Kernel("k", v)),
]


@pytest.mark.parametrize(("name", "values", "call"), [*SHARED, *VIRTUAL])
def test_the_virtual_device_names_the_argument(
    name: str, values: tuple[Any, ...], call: Callable[[Any, Any], Any]
) -> None:
    device = VirtualDevice()
    for value in values:
        with pytest.raises(BadInput, match=name):
            call(device, value)
    # nothing was queued that could break the clock later
    device.synchronize()
    assert 0 <= device.host_seconds() < 1e-2


@pytest.mark.parametrize(("name", "values", "call"), SHARED)
def test_the_accelerator_names_it_too(
    name: str, values: tuple[Any, ...], call: Callable[[Any, Any], Any]
) -> None:
    # made without a GPU: a check that let a value pass would fail with another error
    device = Accelerator.__new__(Accelerator)
    device._torch_device = torch.device("cpu")
    for value in values:
        with pytest.raises(BadInput, match=name):
            call(device, value)


def test_whole_numbers_of_other_libraries_are_fine() -> None:
    device = VirtualDevice(seed=np.int64(3), hardware_queues=2)  # type: ignore[arg-type]
    tensor = device.empty([np.int64(2), 3], torch.int32)  # type: ignore[list-item]
    assert tensor.shape == (2, 3)
    assert device.empty(torch.Size([2, 3]), torch.int32).shape == (2, 3)
    device.matmul(np.int32(16))  # type: ignore[arg-type]
    device.host_work(0)
    device.spin(np.float64(1e-6))
    device.synchronize()


@pytest.mark.parametrize(
    ("view", "name"),
    [(lambda z: z.conj(), "conjugate"), (lambda z: z.conj().imag, "negative")],
    ids=["conjugate", "negative"],
)
def test_a_view_whose_values_are_not_its_bytes(view: Call, name: str) -> None:
    device = VirtualDevice()
    lazy = view(device.empty((4,), torch.complex64))
    host = device.pinned((4,), torch.complex64)
    calls: list[Callable[[], Any]] = [
        lambda: device.launch(FILL, (lazy,), ()),
        lambda: device.launch(FILL, (), (lazy,)),
        lambda: device.copy(device.pinned((4,), lazy.dtype), lazy),
        lambda: device.copy(lazy, device.pinned((4,), lazy.dtype)),
        lambda: device.mapped(view(host)),
    ]
    for call in calls:
        with pytest.raises(BadInput, match=f"lazy {name} view"):
            call()
    # the bytes themselves are fine
    device.launch(FILL, (lazy.conj() if name == "conjugate" else -lazy.detach()[:0],), ())


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(BadInput, match="layout"):
        VirtualDevice().launch(FILL, (torch.zeros(4).to_sparse(),), ())
