"""Every Triton kernel compiles for each GPU that the project names, on a machine without any."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from compile_case import CompileCase

triton = pytest.importorskip("triton", reason="Triton is not installed here")

import atom.model_ops  # noqa: E402

#: target name -> Triton's target, the binary that has to come out, words of its assembly
TARGETS: dict[str, tuple[tuple[str, Any, int], str, tuple[str, str]]] = {
    "gfx942": (("hip", "gfx942", 64), "hsaco", ("amdgcn", "gfx942")),
    "gfx950": (("hip", "gfx950", 64), "hsaco", ("amdgcn", "gfx950")),
    "sm_90": (("cuda", 90, 32), "cubin", ("ptx", ".target sm_90")),
}


def _load(file: Path) -> list[CompileCase]:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases: list[CompileCase] = module.CASES
    return cases


CASES = [
    case
    for file in sorted(Path(__file__).parent.glob("compile_cases_*.py"))
    for case in _load(file)
]


def compile_for(target: tuple[str, Any, int], kernel: Any, case: CompileCase) -> Any:
    """Compile one case, from the source to the binary."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    kinds = {name: case.signature.get(name, "constexpr") for name in names}
    unknown = (case.signature.keys() | case.constexprs.keys()) - set(names)
    assert not unknown, f"{case.kernel} has no argument {unknown}"
    constants = {(names.index(name),): value for name, value in case.constexprs.items()}
    missing = {name for name, kind in kinds.items() if kind == "constexpr"} - set(case.constexprs)
    assert not missing, f"{case.name}: no value for {missing}"
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=hints)
    return triton.compile(source, target=GPUTarget(*target), options=dict(case.options))


def stack_bytes(cubin: Path) -> int:
    """Bytes of stack a thread has, which for our kernels are spilled registers."""
    told = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.search(r"STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1])


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a kernel that compiled once would be taken from the cache
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_kernel_compiles(case: CompileCase, target: str, tmp_path: Path) -> None:
    kernel = getattr(importlib.import_module(case.module), case.kernel)
    arguments, binary, (assembly, words) = TARGETS[target]
    compiled = compile_for(arguments, kernel, case)
    assert len(compiled.asm[binary]) > 1000
    assert words in compiled.asm[assembly]
    if case.most_stack is not None and target == "sm_90":
        file = tmp_path / "kernel.cubin"
        file.write_bytes(compiled.asm[binary])
        assert stack_bytes(file) <= case.most_stack


def test_every_kernel_has_a_case() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    covered = {(case.module, case.kernel) for case in CASES}
    found = set()
    for info in pkgutil.iter_modules(atom.model_ops.__path__, "atom.model_ops."):
        if not info.name.endswith("_triton"):
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            ours = isinstance(value, triton.runtime.JITFunction) and value.module == info.name
            if ours and name.endswith("_kernel"):
                found.add((info.name, name))
    assert found
    assert found <= covered, "add a case to tests/model_ops/compile_cases_<name>.py"


BROKEN = """
import triton
import triton.language as tl

@triton.jit
def broken_kernel(out, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out + places, tl.arange(0, 2 * BLOCK))
"""


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_that_does_not_compile_fails(target: str, tmp_path: Path) -> None:
    file = tmp_path / "broken_kernel.py"
    file.write_text(BROKEN)
    spec = importlib.util.spec_from_file_location("broken_kernel", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    case = CompileCase("broken", "", "broken_kernel", {"out": "*i32"}, {"BLOCK": 64})
    with pytest.raises(triton.CompilationError):
        compile_for(TARGETS[target][0], module.broken_kernel, case)
