"""When the host may read what a kernel wrote into pinned memory: the ground of ``zero_copy``.

Under ``zero_copy`` a kernel writes a pinned slot over the host link, an event is recorded behind
it, and the host reads the slot once that event has completed. Two things must hold. The kernel's
writes must reach the host's memory, not just a cache of the GPU (*visibility at system scope*); and
they must have done so before the event counts as completed (*order*).

CUDA. Pinned memory is mapped and coherent with the host on every system with unified addressing.
The end of a kernel orders its writes at system scope, so no fence is needed inside it, and both a
wait for the event and a query that says yes stand behind that (CUDA C++ Programming Guide, mapped
memory; runtime API, ``cudaEventQuery``). No flag of the event changes this.

HIP. Host memory comes in two kinds. *Coherent* (fine-grained) memory is not cached by the GPU:
visible at every synchronisation. *Non-coherent* (coarse-grained) memory may stay in the GPU's
caches until a release at system scope. ``hipHostMalloc`` without flags, which is what PyTorch
calls, gives the second kind unless ``HIP_HOST_COHERENT=1`` was set when the process began; an event
releases at device scope unless it was made with ``hipEventReleaseToSystem``, which
``torch.cuda.Event`` cannot ask for. A stream or device wait would release at system scope, but
waits for far more than one transfer. So without coherent memory ``zero_copy`` is refused on HIP.
(HIP programming manual: coherency controls, visibility of zero-copy host memory.)

In both worlds the slot must outlive the kernel: PyTorch's pinned allocator records events for
copies, not for kernels. So slots belong to a ring that lives as long as what sends, a payload keeps
its slot, and a slot is handed out again only after its event.
"""

from __future__ import annotations

from collections.abc import Mapping

from atom.device.interface import DeviceKind

#: makes memory of ``hipHostMalloc`` without flags coherent
COHERENT_VARIABLE = "HIP_HOST_COHERENT"
#: PyTorch's settings of its allocators, under their names
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_REGISTERED = "pinned_use_cuda_host_register:true"


def why_no_host_writes(kind: DeviceKind, environment: Mapping[str, str]) -> str | None:
    """Why the host may not trust kernel writes into pinned memory once their event has completed.

    Args:
        kind: what stands behind the device.
        environment: the process's variables, as they were when the runtime began.

    Returns:
        The reason with a remedy, or ``None`` where it may. See the module's text.
    """
    if kind is not DeviceKind.HIP:
        return None
    for name in _ALLOCATOR_VARIABLES:
        if _REGISTERED in environment.get(name, "").replace(" ", "").lower():
            return (
                f"{name} makes PyTorch register its pinned memory instead of allocating it, so "
                f"{COHERENT_VARIABLE} says nothing of its coherence: leave "
                "pinned_use_cuda_host_register out"
            )
    if environment.get(COHERENT_VARIABLE, "").strip() == "1":
        return None
    return (
        "HIP's pinned memory may stay in the GPU's caches, and an event of PyTorch releases them "
        f"at device scope: the host could wait and still read old bytes. Set {COHERENT_VARIABLE}=1 "
        "before the process starts, which makes pinned memory coherent"
    )
