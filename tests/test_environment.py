"""environment.yml, pyproject.toml and what is installed say the same."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from atom.environment import APART

_ROOT = Path(__file__).resolve().parents[1]

#: not pinned: the installers, this package, and what a GPU build of torch brings along
_UNPINNED = re.compile(
    r"pip|setuptools|wheel|atom-workbook|nvidia-.*|triton|pytorch-triton.*|amd-.*|rocm.*|cuda-.*"
)


def pins_of(environment: dict[str, Any]) -> dict[str, tuple[Version, Marker | None]]:
    """Name to exact version; fails for a pin that is not exact or stands twice."""
    (listed,) = (part["pip"] for part in environment["dependencies"] if isinstance(part, dict))
    pins: dict[str, tuple[Version, Marker | None]] = {}
    for line in listed:
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        assert "*" not in specifier.version, line
        name = canonicalize_name(requirement.name)
        assert name not in pins, f"{name} is pinned twice"
        pins[name] = (Version(specifier.version), requirement.marker)
    return pins


@pytest.fixture(scope="module")
def environment() -> dict[str, Any]:
    return dict(yaml.safe_load((_ROOT / "environment.yml").read_text()))


@pytest.fixture(scope="module")
def pins(environment: dict[str, Any]) -> dict[str, tuple[Version, Marker | None]]:
    return pins_of(environment)


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return dict(tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"])


@pytest.fixture(scope="module")
def installed() -> dict[str, Version]:
    """Versions without their local part: 2.13.0+cpu is 2.13.0."""
    return {
        canonicalize_name(one.metadata["Name"]): Version(Version(one.version).public)
        for one in distributions()
    }


def requirements(project: dict[str, Any]) -> list[Requirement]:
    extras = [
        every for name, every in project["optional-dependencies"].items() if name not in APART
    ]
    return [
        Requirement(text) for text in (*project["dependencies"], *(t for e in extras for t in e))
    ]


def test_every_dependency_is_pinned_within_its_range(
    pins: dict[str, tuple[Version, Marker | None]], project: dict[str, Any]
) -> None:
    for requirement in requirements(project):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} of pyproject.toml is not pinned in environment.yml"
        assert pins[name][0] in requirement.specifier, f"{requirement} excludes {pins[name][0]}"


def own_packages_only() -> None:
    mode = Path(sys.prefix) / ".mode"
    if mode.is_file() and mode.read_text().strip() == "system":
        pytest.skip("made with ENV=system: the packages are this machine's, within their ranges")


def test_what_is_installed_is_what_is_pinned(
    pins: dict[str, tuple[Version, Marker | None]], installed: dict[str, Version]
) -> None:
    own_packages_only()
    wanted = {n: v for n, (v, marker) in pins.items() if marker is None or marker.evaluate()}
    # a newer torch may be tried on purpose: pyproject.toml's range is tested above
    differing = {
        name: f"pinned {version}, installed {installed.get(name)}"
        for name, version in wanted.items()
        if installed.get(name) != version
    }
    assert not differing, "run make setup"


def test_nothing_else_is_installed(
    pins: dict[str, tuple[Version, Marker | None]], installed: dict[str, Version]
) -> None:
    own_packages_only()
    rest = [name for name in installed if name not in pins and not _UNPINNED.fullmatch(name)]
    assert not rest, "pin them in environment.yml, or remove them from the environment"


def test_every_pin_is_needed(
    pins: dict[str, tuple[Version, Marker | None]], project: dict[str, Any]
) -> None:
    own_packages_only()
    needs = {
        canonicalize_name(one.metadata["Name"]): [Requirement(text) for text in one.requires or ()]
        for one in distributions()
    }
    reached: set[tuple[str, str]] = set()
    rest = [
        (canonicalize_name(r.name), extra)
        for r in requirements(project)
        for extra in ("", *r.extras)
    ]
    while rest:
        name, extra = rest.pop()
        if (name, extra) in reached:
            continue
        reached.add((name, extra))
        for requirement in needs.get(name, ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                child = canonicalize_name(requirement.name)
                rest += [(child, inner) for inner in ("", *requirement.extras)]
    unneeded = set(pins) - {name for name, _ in reached}
    assert not unneeded, "no dependency of pyproject.toml brings them"


def test_pythons_agree(environment: dict[str, Any], project: dict[str, Any]) -> None:
    (python,) = (
        part
        for part in environment["dependencies"]
        if isinstance(part, str) and part.startswith("python")
    )
    minor = re.fullmatch(r"python=(3\.\d+)\.\*", python)
    assert minor is not None
    supported = SpecifierSet(project["requires-python"])
    assert minor[1] in supported
    workflow = (_ROOT / ".github" / "workflows" / "workbook.yml").read_text()
    tested = re.findall(r'"(3\.\d+)"', workflow)
    assert tested == [f"3.{n}" for n in range(8, 20) if f"3.{n}" in supported]


@pytest.mark.parametrize("line", ["numpy>=2", "numpy==2.*", "numpy==2.0,<3"])
def test_a_loose_pin_is_noticed(line: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        pins_of({"dependencies": ["python=3.11.*", {"pip": [line]}]})
