"""Settings that hide the race are refused; facts are read or missing, never invented."""

from __future__ import annotations

import pytest

from atom.benchmarks import race_environment
from atom.benchmarks.race_environment import (
    FACTS,
    HIDING_VARIABLES,
    look_around,
    parse_rocm_smi,
    parse_smi_line,
    refuse_hiding_settings,
    worker_environment,
)
from atom.config import AllocatorBackend
from atom.device import DeviceKind
from atom.errors import BadInput


@pytest.mark.parametrize("name", list(HIDING_VARIABLES))
def test_a_hiding_variable_is_refused_by_name_with_what_to_do(name: str) -> None:
    with pytest.raises(BadInput, match=f"unset {name}"):
        refuse_hiding_settings({name: "1"})
    for off in ("0", "", "false"):
        refuse_hiding_settings({name: off})


def test_all_hiding_variables_are_named_at_once() -> None:
    with pytest.raises(BadInput, match="unset CUDA_LAUNCH_BLOCKING AMD_SERIALIZE_COPY"):
        refuse_hiding_settings({"CUDA_LAUNCH_BLOCKING": "1", "AMD_SERIALIZE_COPY": "3"})


def test_a_worker_gets_the_vendor_s_variables_and_no_inherited_ones() -> None:
    base = {
        "PATH": "x",
        "CUDA_DEVICE_MAX_CONNECTIONS": "7",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    plain = worker_environment(base, DeviceKind.CUDA, "default", AllocatorBackend.NATIVE)
    assert plain == {"PATH": "x"}
    cuda = worker_environment(base, DeviceKind.CUDA, "4", AllocatorBackend.CUDA_MALLOC_ASYNC)
    assert cuda["CUDA_DEVICE_MAX_CONNECTIONS"] == "4"
    assert cuda["PYTORCH_CUDA_ALLOC_CONF"] == "backend:cudaMallocAsync"
    hip = worker_environment(base, DeviceKind.HIP, "2", AllocatorBackend.EXPANDABLE_SEGMENTS)
    assert hip["GPU_MAX_HW_QUEUES"] == "2"
    assert hip["PYTORCH_HIP_ALLOC_CONF"] == "expandable_segments:True"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in hip


def test_a_missing_fact_is_none() -> None:
    line = "700.00, 700.00, 345, 1980, 3201, 5, 5, 16, [N/A], 00000000:04:00.0\n"
    facts = parse_smi_line(line)
    assert facts["power_cap_w"] == 700.0
    assert facts["pcie_generation"] == 5
    assert facts["pcie_width_max"] is None
    assert facts["pci_address"] == "00000000:04:00.0"


def test_rocm_smi_is_read_by_words() -> None:
    text = (
        '{"card0": {"Max Graphics Package Power (W)": "1400.0", "PCI Bus": "0000:05:00.0", '
        '"sclk clock speed:": "(2400Mhz)", "mclk clock speed:": "(1900Mhz)"}}'
    )
    assert parse_rocm_smi(text) == {
        "power_cap_w": 1400.0,
        "pci_address": "0000:05:00.0",
        "sm_clock_idle_mhz": 2400,
        "memory_clock_mhz": 1900,
    }


def test_nothing_readable_says_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int) -> dict[str, object]:
        raise OSError("no driver")

    for name in ("_from_nvml", "_from_nvidia_smi"):
        monkeypatch.setattr(race_environment, name, broken)
        broken.__name__ = name
    around = look_around(DeviceKind.CUDA)
    assert all(around.facts[name] is None for name in FACTS)
    assert "unknown" in around.warnings[0]


def test_another_process_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(index: int) -> dict[str, object]:
        return {"other_gpu_processes": 2}

    monkeypatch.setattr(race_environment, "_from_nvml", busy)
    around = look_around(DeviceKind.CUDA)
    assert around.facts["other_gpu_processes"] == 2
    assert "2 other process" in around.warnings[0]


def test_a_virtual_device_has_no_surroundings() -> None:
    around = look_around(DeviceKind.VIRTUAL)
    assert around.warnings == []
    assert set(around.facts.values()) == {None}
