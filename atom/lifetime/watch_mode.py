"""The dispatch mode that sees the operations of a thread, and what each one touches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from atom.lifetime.sites import CALLERS, RawSite, here
from atom.lifetime.torch_plans import Plan, plan_of

if TYPE_CHECKING:
    from atom.lifetime.torch_front import TorchFront


class WatchMode(TorchDispatchMode):
    """Sees every operation of the threads that enter it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap each call at several microseconds; skip_compiler does it once
        return False

    def __init__(self, front: TorchFront) -> None:
        super().__init__()
        self._front = front

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        front = self._front
        if types and any(map(front.dispatches_itself, types)):
            # a wrapper takes its operation apart; its parts come here
            return NotImplemented
        try:
            plan = front.plans[id(func)][1]
        except KeyError:
            plan = plan_of(func)
            front.plans[id(func)] = (func, plan)
        if plan is None:
            front.monitor.report.note(f"operator {func} has no schema: its work is not seen")
            return func(*args, **kwargs)
        call = plan.call
        if plan.nothing:
            if func is torch.ops.aten.record_stream.default:
                front.do(
                    front.monitor.record_stream,
                    args[0].untyped_storage().data_ptr(),
                    front.layer.stream_key(args[1]),
                )
            return call(*args, **kwargs)
        tensors, first = front.tensors_of(plan, args, kwargs)
        if first is None:
            if plan.copy and plan.has_output:
                return self._copied_from_host(plan, tensors, args, kwargs)
            if front.monitor.pinned:
                for tensor, write in tensors:
                    front.host.touched(tensor, write, plan.name)
            out = call(*args, **kwargs)
            if plan.has_output:
                self._made(plan, out)
            return out
        out = call(*args, **kwargs)
        # numbered behind the call: an operator may queue more work behind a wait of its own
        stream, number = front.begin(first)
        site = here(1 if stream <= 0 else CALLERS)
        if plan.copy and (plan.has_output or not all(front.is_device(t) for t, _ in tensors)):
            front.do(self._copied, plan, tensors, args, kwargs, out, stream, number, site)
        else:
            front.do(self._happened, plan, tensors, out, stream, number, site)
        return out

    def _copied_from_host(
        self,
        plan: Plan,
        tensors: list[tuple[Tensor, bool]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A host tensor is copied into a fresh one, which may lie on a device."""
        front = self._front
        out = plan.call(*args, **kwargs)
        made = _outputs(out)
        if made and front.is_device(made[0]):
            # the copy engine reads the host tensor, maybe later
            stream, number = front.begin(made[0])
            site = here(1 if stream <= 0 else CALLERS)
            front.do(self._copied, plan, tensors, args, kwargs, out, stream, number, site)
        elif front.monitor.pinned:
            for tensor, write in tensors:
                front.host.touched(tensor, write, plan.name)
        return out

    def _made(self, plan: Plan, out: Any) -> None:
        """A fresh tensor without device inputs: a factory's."""
        front = self._front
        for tensor in _outputs(out):
            if front.is_device(tensor) and tensor.numel():
                if plan.writes_output:
                    stream, number = front.begin(tensor)
                    front.do(front.touch, tensor, True, stream, number, plan.name, here())
                else:
                    front.do(front.adopt, tensor)

    def _happened(
        self,
        plan: Plan,
        tensors: list[tuple[Tensor, bool]],
        out: Any,
        stream: int,
        number: int,
        site: RawSite,
        copy: bool = False,
    ) -> None:
        front = self._front
        touch, is_device, name = front.touch, front.is_device, plan.name
        starts = []
        for tensor, write in tensors:
            if is_device(tensor):
                starts.append(tensor.data_ptr())
                touch(tensor, write, stream, number, name, site, copy)
            elif front.monitor.pinned:
                # the host reads it while it launches
                front.host.touched(tensor, write, name)
        if plan.has_output:
            for tensor in (out,) if isinstance(out, Tensor) else _outputs(out):
                # some operators return a view and do not say so
                if tensor.data_ptr() in starts or not is_device(tensor):
                    continue
                if plan.writes_output:
                    touch(tensor, True, stream, number, name, site, copy)
                elif tensor.numel():
                    front.adopt(tensor)
        if plan.synchronous and front.captured is None:
            front.observe_stream(stream)

    def _copied(
        self,
        plan: Plan,
        tensors: list[tuple[Tensor, bool]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        stream: int,
        number: int,
        site: RawSite,
    ) -> None:
        front = self._front
        outputs = _outputs(out) if plan.has_output else []
        everything = [*tensors, *((tensor, True) for tensor in outputs)]
        if all(front.is_device(tensor) for tensor, _ in everything):
            self._happened(plan, tensors, out, stream, number, site)
            return
        asynchronous = bool(kwargs.get("non_blocking", False))
        if 0 <= plan.non_blocking < len(args):
            asynchronous = bool(args[plan.non_blocking])
        target = outputs[0] if outputs else tensors[0][0]
        # a copy into pageable memory has ended when the call returns
        if front.is_device(target) or front.layer.is_pinned(target):
            waits = not asynchronous
        else:
            waits = True
        for tensor, write in everything:
            if front.is_device(tensor) or not waits:
                front.touch(tensor, write, stream, number, plan.name, site, True)
            else:
                front.host.touched(tensor, write, plan.name)
        if waits and front.captured is None:
            front.observe_stream(stream)


def _outputs(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, (list, tuple)):
        return [item for item in out if isinstance(item, Tensor)]
    return []
