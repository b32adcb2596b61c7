"""Runs a test file's checks of Triton kernels in Triton's interpreter.

Triton decides at import whether kernels are compiled or interpreted, so the checks run in a process
of their own. A test file defines functions without arguments whose names start with ``check_``, and
one test::

    @pytest.mark.parametrize("name", check_names(__file__))
    def test_in_the_interpreter(name: str) -> None:
        assert_check_passes(__file__, name)

All checks of a file run in one process, in which ``TRITON_INTERPRET`` is set and tensors are on the
CPU: call the Triton launcher itself there, since the public operator would take the reference.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_MARK = "interpreted checks: "


def check_names(file: str) -> list[str]:
    """Names of the checks of a test file, in order, without importing it."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    ]


@functools.cache
def run_checks(file: str, seconds: float = 120) -> dict[str, str]:
    """Run all checks of ``file``. Returns check name to traceback, blank if it passed."""
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    known = [str(_ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in known if path)
    done = subprocess.run(
        [sys.executable, __file__, file],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            results: dict[str, str] = json.loads(line.removeprefix(_MARK))
            return results
    raise AssertionError(f"the interpreter's process ended early:\n{done.stdout}\n{done.stderr}")


def assert_check_passes(file: str, name: str) -> None:
    """Fail with the check's traceback; skip where Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    trace = run_checks(file)[name]
    if trace:
        pytest.fail(f"{name} in Triton's interpreter:\n{trace}", pytrace=False)


def _main(file: str) -> None:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    results = {}
    for name in check_names(file):
        try:
            getattr(module, name)()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
    print(_MARK + json.dumps(results), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])
