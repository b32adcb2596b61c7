"""What surrounds a race sweep: settings that would hide the race, and facts that explain it."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atom.config import AllocatorBackend
from atom.device.host_room import numa_node
from atom.device.interface import DeviceKind
from atom.errors import BadInput

#: variable -> why the race cannot show while it is set
HIDING_VARIABLES: dict[str, str] = {
    "CUDA_LAUNCH_BLOCKING": "every launch waits for its end, so no copy is ever late",
    "HIP_LAUNCH_BLOCKING": "every launch waits for its end, so no copy is ever late",
    "AMD_SERIALIZE_KERNEL": "kernels wait for each other, so no copy is ever late",
    "AMD_SERIALIZE_COPY": "copies wait for each other and for kernels, so no copy is ever late",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "freed blocks go back to the driver and are not reused",
    "PYTORCH_NO_HIP_MEMORY_CACHING": "freed blocks go back to the driver and are not reused",
}

#: read when the context or the allocator starts; the sweep sets them itself, one process a value
OWNED_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GPU_MAX_HW_QUEUES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)

#: recorded when set: they change queues, copy engines, waiting or which device is used
RELEVANT_VARIABLES = (
    *OWNED_VARIABLES,
    *HIDING_VARIABLES,
    "CUDA_DEVICE_MAX_COPY_CONNECTIONS",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_MAX_COMMAND_QUEUES",
    "HSA_ENABLE_SDMA",
    "HSA_ENABLE_SDMA_COPY_SIZE_OVERRIDE",
    "HSA_SDMA_LINEAR_COPY",
    "HIP_FORCE_DEV_KERNARG",
    "ROC_ACTIVE_WAIT_TIMEOUT",
    "ROC_SIGNAL_POOL_SIZE",
    "ROC_SYSTEM_SCOPE_SIGNAL",
    "DEBUG_HIP_7_PREVIEW",
    "CUDA_SCALE_LAUNCH_QUEUES",
)

_OFF = frozenset({"", "0", "false", "off", "no"})

_ALLOCATOR_SETTINGS = {
    AllocatorBackend.NATIVE: None,
    AllocatorBackend.EXPANDABLE_SEGMENTS: "expandable_segments:True",
    AllocatorBackend.CUDA_MALLOC_ASYNC: "backend:cudaMallocAsync",
}


def refuse_hiding_settings(environment: Mapping[str, str]) -> None:
    """Refuse an environment in which the race cannot show.

    Raises:
        BadInput: names each such variable, the reason and what to do.
    """
    faults = [
        f"  {name}={environment[name]}: {reason}"
        for name, reason in HIDING_VARIABLES.items()
        if environment.get(name, "").strip().lower() not in _OFF
    ]
    if faults:
        names = " ".join(line.split("=")[0].strip() for line in faults)
        raise BadInput(
            "these environment variables hide the race, so every arm would read 0 stale:\n"
            + "\n".join(faults)
            + f"\nRun it again after: unset {names}"
        )


def worker_environment(
    base: Mapping[str, str],
    kind: DeviceKind,
    queue_setting: str,
    allocator: AllocatorBackend,
) -> dict[str, str]:
    """Environment of one worker process.

    Args:
        base: the parent's environment; variables that the sweep owns are dropped from it.
        kind: CUDA or HIP, which decides the names.
        queue_setting: ``default`` leaves the queue variable unset.
        allocator: backend of PyTorch's allocator.
    """
    environment = {name: value for name, value in base.items() if name not in OWNED_VARIABLES}
    if queue_setting != "default":
        environment[queue_variable(kind)] = queue_setting
    setting = _ALLOCATOR_SETTINGS[allocator]
    if setting is not None:
        vendor = "PYTORCH_HIP_ALLOC_CONF" if kind is DeviceKind.HIP else "PYTORCH_CUDA_ALLOC_CONF"
        # torch 2.9 renamed the variable and deprecates the vendor's name; both say the same here.
        environment["PYTORCH_ALLOC_CONF"] = setting
        environment[vendor] = setting
    return environment


def queue_variable(kind: DeviceKind) -> str:
    """Variable that sets the number of hardware queues of a process."""
    return "GPU_MAX_HW_QUEUES" if kind is DeviceKind.HIP else "CUDA_DEVICE_MAX_CONNECTIONS"


def relevant_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of :data:`RELEVANT_VARIABLES` that are set."""
    return {name: environment[name] for name in RELEVANT_VARIABLES if name in environment}


@dataclass(frozen=True)
class Surroundings:
    """State of the GPU outside this program. Every fact is ``None`` when it cannot be read."""

    facts: dict[str, Any]
    warnings: list[str]


#: names of the facts, all of them present in every record
FACTS = (
    "power_cap_w",
    "power_default_w",
    # read before the sweep: no clock that anything is measured at
    "sm_clock_idle_mhz",
    "sm_clock_max_mhz",
    "application_clock_mhz",
    "application_clock_default_mhz",
    "clock_limits",
    "performance_level",
    "memory_clock_mhz",
    "pcie_generation",
    "pcie_generation_max",
    "pcie_width",
    "pcie_width_max",
    "pci_address",
    "numa_node",
    "persistence_mode",
    "other_gpu_processes",
    "facts_from",
)


def look_around(kind: DeviceKind, index: int = 0) -> Surroundings:
    """Read the facts of one GPU. Call it before this program opens the device.

    Sources by preference: NVML through ``pynvml``, ``nvidia-smi``; ``rocm-smi`` for HIP.
    """
    facts: dict[str, Any] = dict.fromkeys(FACTS)
    if kind in (DeviceKind.VIRTUAL, DeviceKind.UNKNOWN):
        return Surroundings(facts, [])
    readers = (_from_rocm_smi,) if kind is DeviceKind.HIP else (_from_nvml, _from_nvidia_smi)
    for reader in readers:
        try:
            found = reader(index)
        except Exception as error:  # a fact that cannot be read is no reason to stop
            facts[f"{reader.__name__.removeprefix('_from_')}_error"] = str(error)[:200]
            continue
        if found:
            facts.update(found)
            break
    facts["numa_node"] = _numa_node(facts["pci_address"])
    others = facts["other_gpu_processes"]
    warnings = []
    if others is None:
        warnings.append("cannot tell whether other processes use this GPU (unknown)")
    elif others:
        warnings.append(
            f"{others} other process(es) use this GPU: they change what is queued ahead of a copy; "
            "stop them for a figure that you want to compare"
        )
    return Surroundings(facts, [*warnings, *_caps(facts)])


def _caps(facts: Mapping[str, Any]) -> list[str]:
    """Power and clock caps below what the device does by default, in words."""
    found = []
    for name, now, default, unit in (
        ("power cap", facts["power_cap_w"], facts["power_default_w"], "W"),
        (
            "application clock",
            facts["application_clock_mhz"],
            facts["application_clock_default_mhz"],
            "MHz",
        ),
    ):
        if now is not None and default is not None and now < default:
            found.append(f"the {name} is {now:.0f} {unit}, below the default of {default:.0f}")
    if facts["clock_limits"]:
        found.append(f"something holds the clocks down: {', '.join(facts['clock_limits'])}")
    if facts["performance_level"] not in (None, "auto"):
        found.append(f"the performance level is '{facts['performance_level']}', not 'auto'")
    return [f"{text}: times, and what is late, differ from a device left alone" for text in found]


#: bits of NVML's reasons for a lower clock; an idle device has one too, which says nothing
_CLOCK_LIMITS = {
    0x2: "application clock setting",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


def clock_limits(reasons: int | None) -> list[str] | None:
    """Names of the bits in NVML's clock event reasons; ``None`` where they cannot be read."""
    if reasons is None:
        return None
    return [name for bit, name in _CLOCK_LIMITS.items() if reasons & bit]


def _visible_index(index: int, variables: tuple[str, ...]) -> str:
    for variable in variables:
        entries = [part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()]
        if index < len(entries):
            return entries[index]
    return str(index)


def nvml_handle(name: str) -> Any:
    """NVML's handle of a GPU by its number or UUID, as ``CUDA_VISIBLE_DEVICES`` names it."""
    import pynvml

    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name.encode())


def _from_nvml(index: int) -> dict[str, Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = nvml_handle(_visible_index(index, ("CUDA_VISIBLE_DEVICES",)))

        def ask(call: str, *arguments: Any) -> Any:
            try:
                return getattr(pynvml, call)(handle, *arguments)
            except (pynvml.NVMLError, AttributeError):
                return None

        def watts(milliwatts: int | None) -> float | None:
            return None if milliwatts is None else milliwatts / 1000

        running = ask("nvmlDeviceGetComputeRunningProcesses")
        pci = ask("nvmlDeviceGetPciInfo")
        address = getattr(pci, "busId", None)
        return {
            "power_cap_w": watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
            "power_default_w": watts(ask("nvmlDeviceGetPowerManagementDefaultLimit")),
            "sm_clock_idle_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
            "sm_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
            "application_clock_mhz": ask("nvmlDeviceGetApplicationsClock", pynvml.NVML_CLOCK_SM),
            "application_clock_default_mhz": ask(
                "nvmlDeviceGetDefaultApplicationsClock", pynvml.NVML_CLOCK_SM
            ),
            "clock_limits": clock_limits(ask("nvmlDeviceGetCurrentClocksThrottleReasons")),
            "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
            "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            "pcie_generation_max": ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
            "pcie_width_max": ask("nvmlDeviceGetMaxPcieLinkWidth"),
            "pci_address": address.decode() if isinstance(address, bytes) else address,
            "persistence_mode": ask("nvmlDeviceGetPersistenceMode"),
            "other_gpu_processes": None if running is None else len(running),
            "facts_from": "nvml",
        }
    finally:
        pynvml.nvmlShutdown()


_SMI_FIELDS = {
    "power.limit": "power_cap_w",
    "power.default_limit": "power_default_w",
    "clocks.sm": "sm_clock_idle_mhz",
    "clocks.max.sm": "sm_clock_max_mhz",
    "clocks.mem": "memory_clock_mhz",
    "pcie.link.gen.current": "pcie_generation",
    "pcie.link.gen.max": "pcie_generation_max",
    "pcie.link.width.current": "pcie_width",
    "pcie.link.width.max": "pcie_width_max",
    "pci.bus_id": "pci_address",
}


def _from_nvidia_smi(index: int) -> dict[str, Any]:
    if shutil.which("nvidia-smi") is None:
        return {}
    name = _visible_index(index, ("CUDA_VISIBLE_DEVICES",))
    one = ["nvidia-smi", "-i", name, "--format=csv,noheader,nounits"]
    answer = _output([*one, f"--query-gpu={','.join(_SMI_FIELDS)}"])
    found = parse_smi_line(answer)
    processes = _output([*one, "--query-compute-apps=pid"])
    found["other_gpu_processes"] = sum(line.strip().isdigit() for line in processes.splitlines())
    found["facts_from"] = "nvidia-smi"
    return found


def parse_smi_line(line: str) -> dict[str, Any]:
    """Values of one CSV line of ``nvidia-smi --query-gpu``; ``[N/A]`` and the like are ``None``."""
    cells = [cell.strip() for cell in next(csv.reader(io.StringIO(line.strip())))]
    found: dict[str, Any] = {}
    for (_, fact), cell in zip(_SMI_FIELDS.items(), cells, strict=True):
        if fact == "pci_address":
            found[fact] = cell
            continue
        try:
            number = float(cell)
        except ValueError:
            found[fact] = None
            continue
        found[fact] = number if fact.endswith("_w") else int(number)
    return found


def _from_rocm_smi(index: int) -> dict[str, Any]:
    if shutil.which("rocm-smi") is None:
        return {}
    name = _visible_index(index, ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))
    answer = _output(
        [
            "rocm-smi",
            "-d",
            name,
            "--showmaxpower",
            "--showclocks",
            "--showbus",
            "--showperflevel",
            "--json",
        ]
    )
    found = parse_rocm_smi(answer)
    processes = json.loads(_output(["rocm-smi", "--showpids", "--json"]) or "{}")
    found["other_gpu_processes"] = sum(
        key.upper().startswith("PID") for key in processes.get("system", {})
    )
    found["facts_from"] = "rocm-smi"
    return found


def parse_rocm_smi(text: str) -> dict[str, Any]:
    """Facts in the JSON of ``rocm-smi``. Labels vary by version: matched by their words."""
    cards = [values for key, values in json.loads(text).items() if key.startswith("card")]
    found: dict[str, Any] = {}
    for label, value in (cards[0] if cards else {}).items():
        words = label.lower()
        number = "".join(
            character for character in str(value) if character.isdigit() or character == "."
        )
        if "max" in words and "power" in words and number:
            found["power_cap_w"] = float(number)
        elif "sclk" in words and "speed" in words and number:
            found["sm_clock_idle_mhz"] = int(float(number))
        elif "mclk" in words and "speed" in words and number:
            found["memory_clock_mhz"] = int(float(number))
        elif "performance level" in words:
            found["performance_level"] = str(value).strip().lower()
        elif "pci bus" in words:
            found["pci_address"] = str(value)
    return found


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout


def _numa_node(address: str | None) -> int | None:
    return numa_node(sysfs_address(address)) if address else None


def sysfs_address(address: str) -> str:
    """A PCI address as sysfs writes it: NVML has eight digits of a domain, sysfs four."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
