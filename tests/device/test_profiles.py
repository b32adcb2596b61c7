"""Profiles: documented, validated, found by name."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from atom.device.profiles import PROFILES, DeviceProfile, QueueMapping, find_profile
from atom.errors import BadInput


def test_every_field_says_what_it_is_and_where_it_comes_from() -> None:
    text = DeviceProfile.__doc__ or ""
    sources = ("measured", "datasheet", "published", "assumed", "first look", "document", "as for")
    for field in fields(DeviceProfile):
        found = re.search(rf"^        {field.name}: (.+?)(?=^        \w+: |\Z)", text, re.M | re.S)
        assert found, f"{field.name} is not documented"
        if field.name != "machine":
            assert any(s in found[1].lower() for s in sources), f"{field.name} names no source"


def test_the_published_and_measured_values() -> None:
    assert PROFILES["MI355X"].hardware_queues == 4
    assert PROFILES["MI355X"].queue_variable == "GPU_MAX_HW_QUEUES"
    assert PROFILES["H200"].queue_variable == "CUDA_DEVICE_MAX_CONNECTIONS"
    assert PROFILES["H200"].d2h_bytes_per_second == 54.9e9
    assert PROFILES["H200"].device_bytes_per_second == 4.18e12
    assert all(profile.machine.startswith("virtual-") for profile in PROFILES.values())


def test_profiles_are_found_by_name_in_any_case() -> None:
    assert find_profile("mi355x") is PROFILES["MI355X"]
    changed = replace(PROFILES["H200"], wait_seconds=5e-6)
    assert find_profile(changed) is changed


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(BadInput, match=r"'H20'; known: MI355X, H200; did you mean H200\?"):
        find_profile("H20")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hardware_queues", 0, "at least 1"),
        ("copy_engines", 0, "at least 1"),
        ("wait_seconds", -1e-6, "at least 0"),
        ("wait_seconds", float("nan"), "finite"),
        ("kernel_seconds", float("inf"), "finite"),
        ("d2h_bytes_per_second", 0.0, "above 0"),
        ("jitter", 1.5, "0 to 1"),
        ("mapping", "round robin", "allowed: modulo, least_load, own_default, random"),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(BadInput, match=rf"{name}=.*{message}"):
        replace(PROFILES["MI355X"], **{name: value})


def test_choices_may_be_given_as_text() -> None:
    changed = replace(PROFILES["MI355X"], mapping="own_default")  # type: ignore[arg-type]
    assert changed.mapping is QueueMapping.OWN_DEFAULT
