"""The guard against queued work that owns memory: what it refuses at a launch, and at its end."""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.dlpack
from torch import Tensor

from atom.device import capture_guard
from atom.device.interface import Kernel
from atom.device.virtual import VirtualDevice
from atom.errors import BadInput, TensorCaptured

Body = Callable[..., None]


def _module_body(reads: Any, writes: Any, *scalars: Any) -> None:
    for tensor in writes:
        tensor.fill_(7)


def _over(hidden: Any) -> Body:
    def body(reads: Any, writes: Any, *scalars: Any) -> None:
        _ = hidden

    return body


def _callable_instance(tensor: Tensor) -> Body:
    class Callable_:
        source = tensor

        def __call__(self, reads: Any, writes: Any, *scalars: Any) -> None: ...

    return Callable_()


def _class_as_body(tensor: Tensor) -> Any:
    class Made:
        source = tensor

        def __init__(self, reads: Any, writes: Any, *scalars: Any) -> None: ...

    return Made


def _class_in_closure(tensor: Tensor) -> Body:
    class Holder:
        source = tensor

    return _over(Holder)


def _base_class_in_closure(tensor: Tensor) -> Body:
    class Base:
        source = tensor

    class Holder(Base): ...

    return _over(Holder)


def _slotted(tensor: Tensor) -> Body:
    class Slotted:
        __slots__ = ("place",)

        def __init__(self) -> None:
            self.place = tensor

    return _over(Slotted())


def _nested(tensor: Tensor) -> Body:
    nest: Any = tensor
    for _ in range(500):
        nest = [nest]
    return _over(nest)


def _running_generator(tensor: Tensor) -> Body:
    def generate() -> Iterator[int]:
        inside = tensor
        yield 1
        yield len(inside)

    generator = generate()
    next(generator)
    return _over(generator)


def _own_globals(tensor: Tensor) -> Body:
    names = {"hidden": tensor, "__name__": __name__, "__builtins__": __builtins__}
    return types.FunctionType(_module_body.__code__, names)


def _unregistered_module(tensor: Tensor) -> Body:
    module = types.ModuleType("never imported")
    module.__dict__["hidden"] = tensor
    return _over(module)


def _attribute(tensor: Tensor) -> Body:
    body = _over(1)
    body.__dict__["hidden"] = tensor
    return body


def _annotation(tensor: Tensor) -> Body:
    body = _over(1)
    body.__annotations__["hidden"] = tensor
    return body


def _constant(tensor: Tensor) -> Body:
    code = _module_body.__code__
    return types.FunctionType(code.replace(co_consts=(*code.co_consts, tensor)), globals())


def _wrapped(tensor: Tensor) -> Body:
    @functools.lru_cache
    def get() -> Tensor:
        return tensor

    return _over(get)


CAPTURES: dict[str, Callable[[Tensor], Body]] = {
    "callable instance": _callable_instance,
    "class as body": _class_as_body,
    "class in closure": _class_in_closure,
    "base class": _base_class_in_closure,
    "slots": _slotted,
    "nested": _nested,
    "running generator": _running_generator,
    "own globals": _own_globals,
    "unregistered module": _unregistered_module,
    "attribute": _attribute,
    "annotation": _annotation,
    "constant": _constant,
    "lru_cache": _wrapped,
    "deque": lambda tensor: _over(collections.deque([tensor])),
    "iterator": lambda tensor: _over(iter([tensor])),
    "generator": lambda tensor: _over(x for x in [tensor]),
    "map": lambda tensor: _over(map(id, [tensor])),
    "dict view": lambda tensor: _over({1: tensor}.values()),
    "dict key": lambda tensor: _over({tensor: 1}),
    "proxy": lambda tensor: _over(types.MappingProxyType({1: tensor})),
    "namespace": lambda tensor: _over(types.SimpleNamespace(a=tensor)),
    "bound builtin": lambda tensor: _over(tensor.zero_),
    "method wrapper": lambda tensor: _over(tensor.numpy().__add__),
    "storage": lambda tensor: _over(tensor.untyped_storage()),
    "memoryview": lambda tensor: _over(memoryview(tensor.numpy())),
    "flat": lambda tensor: _over(tensor.numpy().flat),
    "ctypes": lambda tensor: _over((ctypes.c_char * 8).from_buffer(tensor.numpy())),
    "structured scalar": lambda tensor: _over(tensor.numpy().view("i4,i4")[0]),
    "capsule": lambda tensor: _over(torch.utils.dlpack.to_dlpack(tensor)),
    "partial": lambda tensor: functools.partial(_module_body, tensor),
    "weak callback": lambda tensor: _over(weakref.ref(_module_body, _over(tensor))),
}


@pytest.mark.parametrize("make", CAPTURES.values(), ids=CAPTURES.keys())
def test_every_way_to_hold_a_tensor_is_refused_at_the_launch(
    make: Callable[[Tensor], Body],
) -> None:
    device = VirtualDevice()
    tensor = device.empty((64,), torch.int32)
    with pytest.raises(TensorCaptured, match=r"kernel 'bad' captures a tensor: .*body"):
        device.launch(Kernel("bad", make(tensor)), (), ())


@pytest.mark.parametrize(
    "hidden",
    [
        5,
        "text",
        [1, (2, {"a": 3.0})],
        collections.deque([1]),
        torch.int32,
        torch.nn.Module,
        collections.OrderedDict,
        torch,
        _module_body,
        Kernel("plain", _module_body),
        VirtualDevice,
        len,
    ],
    # the text of a function holds its address, and test names must not change
    ids=lambda hidden: type(hidden).__name__,
)
def test_what_holds_no_tensor_is_let_through(hidden: Any) -> None:
    VirtualDevice().launch(Kernel("fine", _over(hidden)), (), ())


def test_a_weak_reference_does_not_hold() -> None:
    device = VirtualDevice()
    tensor = device.empty((64,), torch.int32)
    address = device.address(tensor)
    device.spin(1e-3)
    device.launch(Kernel("weak", _over(weakref.ref(tensor))), (), ())
    del tensor
    assert device.address(device.empty((64,), torch.int32)) == address


def test_what_is_put_on_a_module_function_after_its_first_launch_is_noticed() -> None:
    device = VirtualDevice()
    tensor = device.empty((64,), torch.int32)
    kernel = Kernel("late", _module_body)

    def default(value: Any) -> None:
        _module_body.__defaults__ = value

    def keyword(value: Any) -> None:
        _module_body.__kwdefaults__ = value

    def attribute(value: Any) -> None:
        _module_body.__dict__["late"] = value

    for put, bad, good in [
        (default, (tensor,), None),
        (keyword, {"a": tensor}, None),
        (attribute, tensor, 1),
    ]:
        device.launch(kernel, (), ())
        put(bad)
        try:
            with pytest.raises(TensorCaptured, match="'late'"):
                device.launch(kernel, (), ())
        finally:
            put(good)
        device.launch(kernel, (), ())


def test_a_module_function_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = VirtualDevice()
    looks: list[str] = []
    find = capture_guard._find
    monkeypatch.setattr(capture_guard, "_checked", {})

    def look(value: Any, path: str) -> str | None:
        looks.append(path)
        return find(value, path)

    monkeypatch.setattr(capture_guard, "_find", look)
    for _ in range(5):
        device.launch(Kernel("fill", _module_body), (), ())
    assert looks == ["body"]


class _Whole(int):
    """An int that could carry attributes."""


@pytest.mark.parametrize("scalar", [_Whole(3), "text", None, (1,)], ids=repr)
def test_a_scalar_is_exactly_a_number(scalar: Any) -> None:
    device = VirtualDevice()
    with pytest.raises(BadInput, match=r"scalars\[0\] of kernel 'fill'.*allowed: int, float, bool"):
        device.launch(Kernel("fill", _module_body), (), (), scalars=(scalar,))


def test_a_scalar_with_a_tensor_is_a_capture() -> None:
    device = VirtualDevice()
    scalar = _Whole(3)
    scalar.__dict__["hidden"] = device.empty((4,), torch.int32)
    with pytest.raises(TensorCaptured, match=r"scalars\[0\].hidden is a tensor"):
        device.launch(Kernel("fill", _module_body), (), (), scalars=(scalar,))


def test_scalars_cannot_get_a_tensor_later() -> None:
    device = VirtualDevice()
    tensor = device.empty((64,), torch.int32)
    address = device.address(tensor)
    scalars: list[Any] = [1]
    device.spin(1e-3)
    device.launch(Kernel("fill", _module_body), (), (), scalars=scalars)  # type: ignore[arg-type]
    scalars.append(tensor)
    del tensor, scalars
    assert device.address(device.empty((64,), torch.int32)) == address


def test_a_body_that_reaches_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = VirtualDevice()
    table = [[i] for i in range(200)]
    device.launch(Kernel("table", _over(table)), (), ())
    monkeypatch.setattr(capture_guard, "MAXIMUM_OBJECTS", 100)
    with pytest.raises(TensorCaptured, match="more than 100 objects"):
        device.launch(Kernel("table", _over(table)), (), ())


class TestSecondNet:
    """What the first cannot see, because it comes later or lies in compiled code."""

    @pytest.mark.parametrize("mode", ["clock", "schedule"])
    def test_a_block_that_dies_with_the_work_was_captured(self, mode: str) -> None:
        device = VirtualDevice(mode=mode)
        box: list[Tensor] = []
        device.spin(1e-3)
        device.launch(Kernel("boxed", _over(box)), (), ())
        box.append(device.empty((64,), torch.int32))
        del box
        with pytest.raises(TensorCaptured, match=r"'boxed'.*1 block.*test_capture_guard\.py"):
            device.synchronize()
        # said once; the rest of the work goes on
        device.launch(Kernel("fill", _module_body), (), (device.empty((4,), torch.int32),))
        device.synchronize()

    def test_pinned_memory_too(self) -> None:
        device = VirtualDevice()
        box: list[Tensor] = []
        device.spin(1e-3)
        device.launch(Kernel("boxed", _over(box)), (), ())
        box.append(device.pinned((64,), torch.int32))
        del box
        with pytest.raises(TensorCaptured, match="'boxed'"):
            device.synchronize()

    def test_a_block_with_another_owner_is_no_capture(self) -> None:
        device = VirtualDevice()
        box: list[Tensor] = []
        device.spin(1e-3)
        device.launch(Kernel("boxed", _over(box)), (), ())
        tensor = device.empty((64,), torch.int32)
        box.append(tensor)
        del box
        device.synchronize()
        del tensor

    def test_blocks_that_die_while_work_is_queued_are_no_capture(self) -> None:
        device = VirtualDevice()
        device.spin(1e-3)
        for _ in range(10):
            tensor = device.empty((64,), torch.int32)
            device.launch(Kernel("fill", _over(1)), (), (tensor,))
            loop: list[Any] = [tensor]
            loop.append(loop)
            del tensor, loop
        gc.collect()
        device.synchronize()
