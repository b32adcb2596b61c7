"""What an accelerator is: its name, its driver, and the variable that sets its hardware queues."""

from __future__ import annotations

import os
import shutil
import subprocess

import torch

from atom.device.interface import DeviceKind, DeviceProperties
from atom.evidence import Evidence
from atom.machines import machine_slug

#: queue variable and its default, by kind
QUEUE_VARIABLES = {
    DeviceKind.CUDA: ("CUDA_DEVICE_MAX_CONNECTIONS", 8),
    DeviceKind.HIP: ("GPU_MAX_HW_QUEUES", 4),
}


def why_no_accelerator() -> str | None:
    """Why no accelerator can be used, or ``None`` if one can."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU build"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
    return f"torch {torch.__version__} was built for {build}, but sees no device or no driver"


def accelerator_properties(index: int = 0) -> DeviceProperties:
    """Properties of one visible device."""
    kind = DeviceKind.HIP if torch.version.hip else DeviceKind.CUDA
    runtime = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    raw = torch.cuda.get_device_properties(index)
    variable, default = QUEUE_VARIABLES[kind]
    setting = os.environ.get(variable, "")
    return DeviceProperties(
        name=raw.name,
        kind=kind,
        evidence=Evidence.MEASURED,
        machine=machine_slug(raw.name),
        memory_bytes=int(raw.total_memory),
        hardware_queues=int(setting) if setting.isdigit() else default,
        queue_variable=variable,
        driver=driver_version(kind),
        runtime=runtime,
    )


def driver_version(kind: DeviceKind) -> str | None:
    """Version of the kernel driver, or ``None`` if it cannot be read."""
    if kind is DeviceKind.HIP:
        try:
            with open("/sys/module/amdgpu/version", encoding="ascii") as file:
                return file.read().strip()
        except OSError:
            return None
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = subprocess.run(
        [tool, "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    lines = asked.stdout.split()
    return lines[0] if asked.returncode == 0 and lines else None
