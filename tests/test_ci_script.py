"""The step of ``.ci/run`` that fetches a browser, with a package manager that only takes notes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(_BASH is None, reason="needs bash")


def block() -> str:
    """The step's lines."""
    lines = (_ROOT / ".ci" / "run").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("if [") and "apt-get" in line)
    last = next(n for n in range(first, len(lines)) if lines[n] == "fi")
    return "\n".join(["set -uo pipefail", *lines[first : last + 1]])


def run(tmp_path: Path, *, user: int, code: int, present: bool) -> tuple[list[str], str]:
    """Calls of the package manager, and what the step said."""
    calls = tmp_path / "calls"
    scripts = {
        "id": f"echo {user}",
        "apt-get": f'echo "$@" >> "{calls}"; cat; echo noise; exit {code}',
        # the real one would need its time
        "timeout": 'shift; exec "$@"',
    }
    if present:
        scripts["chromium"] = "exit 0"
    for name, body in scripts.items():
        script = tmp_path / name
        script.write_text(f"#!{_BASH}\n{body}\n")
        script.chmod(0o755)
    os.symlink(shutil.which("cat") or "", tmp_path / "cat")
    done = subprocess.run(
        [str(_BASH), "-c", block()],
        env={"PATH": str(tmp_path)},
        input="never read\n",
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return calls.read_text().splitlines() if calls.exists() else [], done.stdout + done.stderr


def test_a_missing_browser_is_fetched_without_questions(tmp_path: Path) -> None:
    calls, said = run(tmp_path, user=0, code=0, present=False)
    assert calls == ["update", "install -y --no-install-recommends chromium"]
    assert said == ""


def test_one_that_is_there_stays(tmp_path: Path) -> None:
    assert run(tmp_path, user=0, code=0, present=True) == ([], "")


def test_an_ordinary_user_fetches_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, user=1000, code=0, present=False) == ([], "")


def test_a_failure_is_named_and_ends_nothing(tmp_path: Path) -> None:
    calls, said = run(tmp_path, user=0, code=100, present=False)
    assert calls == ["update"]
    assert said == "chromium could not be installed: the browser tests will be skipped\n"
