"""``ENV=system``: over a machine's packages, with its torch, and beside another ``atom``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from atom import environment
from atom.environment import SetupError, missing_pins, pinned, required, unmet

_ROOT = Path(__file__).resolve().parents[1]
_PINS = pinned((_ROOT / "environment.yml").read_text())

# -- what is installed


def test_pins_and_requirements_are_read() -> None:
    import yaml

    loaded = yaml.safe_load((_ROOT / "environment.yml").read_text())
    (listed,) = (part["pip"] for part in loaded["dependencies"] if isinstance(part, dict))
    assert [f"{name}=={version}" for name, version in _PINS.items()] == listed
    assert "torch>=2.11,<2.15" in required((_ROOT / "pyproject.toml").read_text())


_ROOTS = ["torch>=2.11,<2.15", "numpy>=1.26", "papermill>=2.6", "rich>=13"]


def test_what_fits_stays_and_what_is_missing_comes() -> None:
    seen: environment.Seen = {
        "torch": ("2.12.0+rocm7.1", ["sympy==1.1", "never-heard-of"]),
        "numpy": ("1.26.4", []),
        "papermill": ("2.6.0", ["click>=8", 'tqdm; extra == "bar"']),
        "rich": ("12.0", []),
    }
    pins = {"torch": "2.13.0", "numpy": "2.4.6", "papermill": "2.7", "rich": "15.0", "click": "8.5"}
    assert missing_pins(seen, _ROOTS, pins, set()) == ["click==8.5", "rich==15.0"]
    seen |= {"click": ("8.5", []), "rich": ("15.0", [])}
    assert missing_pins(seen, _ROOTS, pins, {"click", "rich"}) == []


def test_one_that_asks_for_what_has_no_pin_is_replaced_itself() -> None:
    seen: environment.Seen = {"papermill": ("2.6.0", ["nest-asyncio"])}
    assert missing_pins(seen, ["papermill>=2.6"], {"papermill": "2.7"}, set()) == ["papermill==2.7"]
    with pytest.raises(SetupError, match="papermill needs nest-asyncio, which is missing; no pinn"):
        missing_pins(seen, ["papermill>=2.6"], {"papermill": "2.7"}, {"papermill"})


@pytest.mark.parametrize(
    ("name", "version"), [("torch", "2.9.1"), ("numpy", "1.24.0"), ("torch", None)]
)
def test_a_torch_or_numpy_that_does_not_fit_is_never_replaced(
    name: str, version: str | None
) -> None:
    seen: environment.Seen = {"torch": ("2.12.0", []), "numpy": ("2.0.0", [])}
    if version is None:
        del seen[name]
    else:
        seen[name] = (version, [])
    with pytest.raises(SetupError, match=f"needs {name}.*is never replaced"):
        missing_pins(seen, _ROOTS[:2], {"torch": "2.13.0", "numpy": "2.4.6"}, set())


def test_another_packages_wish_does_not_touch_numpy() -> None:
    seen: environment.Seen = {"numpy": ("2.0.0", []), "scipy": ("1.5", ["numpy<2"])}
    assert missing_pins(seen, ["scipy>=1"], {"scipy": "1.17", "numpy": "2.4"}, set()) == [
        "scipy==1.17"
    ]


def test_this_environment_is_complete() -> None:
    seen = environment.survey(Path(sys.prefix))
    assert not unmet(seen, required((_ROOT / "pyproject.toml").read_text()))


def test_pip_is_watched_while_it_collects_and_while_it_unpacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "pip-1.dist-info").mkdir(parents=True)
    os.utime(packages / "pip-1.dist-info", (1, 1))
    now = time.time()
    monkeypatch.setattr(environment.time, "time", lambda: now)
    progress = environment._PipProgress(tmp_path, 4)
    now += 10
    lines = ["Collecting a", "  Using cached a", "Collecting b"]
    assert progress.text(lines) == "2 of 4 packages collected, about 10 s left"
    lines.append("Installing collected packages: a, b, c, d")
    assert progress.text(lines) == "0 of 4 packages unpacked"
    now += 6
    (packages / "a-1.dist-info").mkdir()
    os.utime(packages / "a-1.dist-info", (now, now))
    assert progress.text(lines) == "1 of 4 packages unpacked, about 18 s left"


# -- a container: a venv with its own torch and another package `atom`, and no network


def distribution(packages: Path, name: str, version: str, code: str = "") -> None:
    (packages / name).mkdir()
    (packages / name / "__init__.py").write_text(code or f"__version__ = {version!r}\n")
    metadata = packages / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "RECORD").write_text("")


def wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"__version__ = {version!r}\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


_FOREIGN = "WHOSE = 'theirs'\n"
_WHOSE = "import atom; print(getattr(atom, 'WHOSE', 'ours'), atom.__file__)"


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A container's interpreter, and the checkout with ``make setup ENV=system`` done in it."""
    base = tmp_path_factory.mktemp("container")
    system = base / "opt" / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(system)], check=True)
    (packages,) = (system / "lib").glob("python3.*/site-packages")
    distribution(packages, "torch", "2.12.0")
    distribution(packages, "nbconvert", "7.17.2")
    distribution(packages, "atom", "0.1.0", _FOREIGN)
    (packages / "atom" / "config.py").write_text(_FOREIGN)
    before = sorted(str(path) for path in system.rglob("*") if "__pycache__" not in path.parts)

    checkout = base / "checkout"
    checkout.mkdir()
    for name in ("Makefile", "atom"):
        source = _ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, checkout / name)
    (checkout / "pyproject.toml").write_text(
        '[project]\ndependencies = ["torch>=2.11,<2.15", "smallone>=1", "nbconvert>=7"]\n'
    )
    (checkout / "environment.yml").write_text(
        "dependencies:\n  - pip:\n      - torch==2.13.0\n      - smallone==1.5\n"
        "      - nbconvert==7.17.2\n"
    )
    wheel(base / "wheels", "smallone", "1.5")
    wheel(base / "wheels", "nbconvert", "7.17.2")
    (base / "constraint.txt").write_text("smallone==1.0\n")
    (base / "elsewhere" / "atom").mkdir(parents=True)
    (base / "elsewhere" / "atom" / "__init__.py").write_text(_FOREIGN)
    environ = {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(base / "wheels"),
        "PIP_CONSTRAINT": str(base / "constraint.txt"),
        "PIP_TARGET": str(base / "elsewhere"),
        "ENV": "a shell's start-up file",
        "PYTHONPATH": str(base / "elsewhere"),
    }
    python = system / "bin" / "python"
    done = subprocess.run(
        ["make", "setup", "ENV=system", f"PYTHON={python}"],
        cwd=checkout,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        "base": base,
        "checkout": checkout,
        "environ": environ,
        "log": done.stderr,
        "system": system,
        "before": before,
    }


def output(container: dict[str, Any], python: Path, code: str, cwd: Path) -> str:
    done = subprocess.run(
        [str(python), "-c", code],
        cwd=cwd,
        env=container["environ"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_only_what_is_missing_is_installed_and_only_here(container: dict[str, Any]) -> None:
    assert "installing 2 missing packages into .venv" in container["log"]
    assert "kept from this machine: torch 2.12.0" in container["log"]
    system = container["system"]
    after = sorted(str(path) for path in system.rglob("*") if "__pycache__" not in path.parts)
    assert after == container["before"]
    assert not (container["base"] / "elsewhere" / "smallone").exists()
    python = container["checkout"] / ".venv" / "bin" / "python"
    code = "import torch, smallone; print(torch.__version__, torch.__file__, smallone.__version__)"
    version, place, small = output(container, python, code, container["base"]).split()
    # its templates lie beside the interpreter that it is installed for
    code = "import nbconvert; print(nbconvert.__file__)"
    assert output(container, python, code, container["base"]).startswith(str(python.parents[1]))
    assert (version, small) == ("2.12.0", "1.5")
    assert place.startswith(str(system))


def test_atom_is_ours_inside_and_theirs_outside(container: dict[str, Any]) -> None:
    base, checkout = container["base"], container["checkout"]
    for cwd in (base, base / "elsewhere", checkout):
        found = output(container, checkout / ".venv" / "bin" / "python", _WHOSE, cwd)
        assert found == f"ours {checkout / 'atom' / '__init__.py'}"
    # PYTHONPATH and the working directory hold theirs as well
    found = output(container, container["system"] / "bin" / "python", _WHOSE, base)
    assert found == f"theirs {base / 'elsewhere' / 'atom' / '__init__.py'}"


def test_commands_and_kernels_are_ours_too(container: dict[str, Any]) -> None:
    checkout = container["checkout"]
    kernel = json.loads((checkout / ".venv/share/jupyter/kernels/python3/kernel.json").read_text())
    python = Path(kernel["argv"][0])
    assert python == checkout / ".venv" / "bin" / "python"
    done = subprocess.run(
        [str(python), "-m", "atom.entrypoints.openai_server", "--model", "x"],
        cwd=container["base"] / "elsewhere",
        env=container["environ"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "python -m atom serve" in done.stderr


def test_a_second_make_does_nothing_and_another_mode_is_refused(container: dict[str, Any]) -> None:
    def make(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", "setup", *words],
            cwd=container["checkout"],
            env=container["environ"],
            capture_output=True,
            text=True,
        )

    again = make()
    assert (again.returncode, again.stderr) == (0, "")
    refused = make("ENV=own")
    assert refused.returncode == 2
    assert "was made with ENV=system" in refused.stderr
    assert "ENV=sistem: own (default) or system" in make("ENV=sistem").stderr


def test_no_interpreter_with_torch_is_named(container: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(_ROOT / "Makefile", tmp_path)
    found = {name: shutil.which(name) or "" for name in ("make", "sh", "cat")}
    folders = os.pathsep.join({str(Path(path).parent) for path in found.values()})
    # stand-ins ahead of the real ones, none of which has torch
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in ("python3", "python", "python3.11", "python3.12"):
        (bare / name).write_text("#!/bin/sh\nexit 1\n")
        (bare / name).chmod(0o755)
    done = subprocess.run(
        ["make", "setup", "ENV=system"],
        cwd=tmp_path,
        env={"PATH": f"{bare}{os.pathsep}{folders}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "no Python 3.11 or 3.12 with torch found" in done.stderr


def test_a_cpu_machine_may_choose_its_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(environment, "install_finder", lambda venv, root: None)
    monkeypatch.setattr(environment, "install_kernel", lambda venv: None)
    monkeypatch.setattr(
        environment, "pip_install", lambda venv, words, total: calls.append(list(words))
    )
    environment.set_up(tmp_path, "own", "https://example.invalid/cpu")
    assert calls[0] == [
        "--no-deps",
        "--index-url",
        "https://example.invalid/cpu",
        f"torch=={_PINS['torch']}",
    ]
    assert f"torch=={_PINS['torch']}" in calls[1]
    with pytest.raises(SetupError, match="TORCH_INDEX does not go with ENV=system"):
        environment.set_up(tmp_path, "system", "https://example.invalid/cpu")
    written = subprocess.run(
        ["make", "-n", "setup", "TORCH_INDEX=https://example.invalid/cpu"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "--torch-index 'https://example.invalid/cpu'" in written
    assert "TORCH_INDEX=" in (_ROOT / "README.md").read_text()


@pytest.mark.parametrize("mode", [(), ("ENV=system",)])
def test_an_interpreter_is_found_by_asking(tmp_path: Path, mode: tuple[str, ...]) -> None:
    shutil.copy(_ROOT / "Makefile", tmp_path)
    asked = tmp_path / "python3"
    asked.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    asked.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    written = subprocess.run(
        ["make", "-n", "setup", *mode],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "chosen='python3" in written


def test_lab_takes_our_kernel_whatever_kernels_there_are() -> None:
    written = subprocess.run(
        ["make", "-n", "lab"], cwd=_ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert f"JUPYTER_PATH={_ROOT}/.venv/share/jupyter" in written
    assert "--LabApp.default_url=/lab/tree/notebooks" in written
    # Jupyter refuses root unless told, and containers run as root
    assert ("--allow-root" in written) == (os.getuid() == 0)
