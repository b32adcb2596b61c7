"""House rules that no linter knows: where raw stream calls live, who imports whom, file sizes."""

from __future__ import annotations

import ast
import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_MOST_LINES = 450

#: a room may import itself and the rooms named here
_BASE = {"errors", "evidence", "machines", "config", "options"}
_MODEL_OPS = {"device"} | _BASE
_TRANSFER = {"device"} | _BASE
_SPEC_DECODE = {"model_ops", "transfer"} | _MODEL_OPS
_MODELS = {"model_ops"} | _MODEL_OPS
_SPEC_DECODE |= {"models"} | _MODELS
_KV_TRANSFER = {"transfer", "models"} | _MODELS
_MODEL_ENGINE = {"spec_decode", "kv_transfer"} | _SPEC_DECODE
_ENTRYPOINTS = {"model_engine"} | _MODEL_ENGINE
_BENCHMARKS = {"lifetime", "entrypoints"} | _ENTRYPOINTS
_WORKBOOK = {"benchmarks"} | _BENCHMARKS
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "evidence": set(),
    "machines": set(),
    "config": {"errors"},
    "environment": set(),
    "options": {"errors"},
    "entrypoints": _ENTRYPOINTS,
    "device": _BASE,
    "lifetime": {"device"} | _BASE,
    "model_ops": _MODEL_OPS,
    "models": _MODELS,
    "transfer": _TRANSFER,
    "spec_decode": _SPEC_DECODE,
    "kv_transfer": _KV_TRANSFER,
    "model_engine": _MODEL_ENGINE,
    "benchmarks": _BENCHMARKS,
    "workbook": _WORKBOOK,
    "__main__": {"workbook"} | _WORKBOOK,
}


def package_files() -> list[Path]:
    return sorted((_ROOT / "atom").rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(_ROOT / "atom").parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Rooms of ``atom`` that a module imports, with line numbers."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide their arrow"
            module = node.module or ""
            whole = module == "atom"
            names = [f"atom.{alias.name}" for alias in node.names] if whole else [module]
        for name in names:
            parts = name.split(".")
            if parts[0] == "atom" and len(parts) > 1:
                yield parts[1], getattr(node, "lineno", 0)


def raw_stream_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Streams and asynchronous copies made past the device interface."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(
            r"torch\..*(Stream|ExternalStream)", ast.unparse(node)
        ):
            yield node.lineno, ast.unparse(node)
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = node.func.attr
        # a tensor's takes the stream alone; the device interface's takes tensor and stream
        if name == "record_stream" and len(node.args) + len(node.keywords) == 1:
            yield node.lineno, "Tensor.record_stream"
        if name in ("to", "copy_") and any(k.arg == "non_blocking" for k in node.keywords):
            yield node.lineno, f".{name}(non_blocking=...)"


def test_raw_stream_calls_stay_in_the_seam() -> None:
    rooms = ("device", "lifetime")
    # holds programs as users of plain torch write them, for the sanitizer to watch
    watched = _ROOT / "atom" / "benchmarks" / "foreign_programs.py"
    found = [
        f"{path.relative_to(_ROOT)}:{line}: {what}"
        for path in package_files()
        if room(path) not in rooms and path != watched
        for line, what in raw_stream_calls(ast.parse(path.read_text()))
    ]
    for path in sorted((_ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"])
                found += [f"{path.name}: {what}" for _, what in raw_stream_calls(ast.parse(source))]
    assert not found, "go through atom.device"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("stream = torch.cuda.Stream()", 1),
        ("tensor.record_stream(stream)", 1),
        ('tensor.to("cpu", non_blocking=True)', 1),
        ("host.copy_(tensor, non_blocking=True)", 1),
        ("device.record_stream(tensor, stream)", 0),
        ('tensor.to("cpu")', 0),
        ("stream: interface.Stream", 0),
    ],
)
def test_the_rule_on_raw_stream_calls_can_fail(source: str, count: int) -> None:
    assert len(list(raw_stream_calls(ast.parse(source)))) == count


def test_arrows_run_one_way() -> None:
    found = []
    for path in package_files():
        here = room(path)
        if here == "__init__":
            continue
        assert here in ALLOWED, f"add the room {here} to the table of arrows"
        for there, line in imported_rooms(ast.parse(path.read_text())):
            if there != here and there not in ALLOWED[here]:
                found.append(f"{path.relative_to(_ROOT)}:{line}: {here} imports {there}")
    assert not found


def test_the_table_of_arrows_has_no_circle() -> None:
    for here, others in ALLOWED.items():
        assert here not in others
        for there in others:
            assert ALLOWED[there] <= others, f"{here} -> {there} is not transitive"


def test_files_are_small_and_named_for_what_they_hold() -> None:
    long = {
        str(path.relative_to(_ROOT)): lines
        for path in package_files()
        if (lines := len(path.read_text().splitlines())) > _MOST_LINES
    }
    assert not long, "a file this long holds two rooms"
    assert not [p for p in package_files() if "util" in p.stem or "helper" in p.stem]


def tracked_files() -> list[Path]:
    done = subprocess.run(
        ["git", "-C", str(_ROOT), "ls-files", "-z"], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip("not a git checkout, so nothing is tracked")
    return [_ROOT / name for name in done.stdout.split("\0") if name]


def test_no_machine_is_named_in_tracked_files() -> None:
    # written in parts so that this file does not find itself
    places = "|".join(("root", "tmp", "work", r"home/(?!someone)\w+", r"Users/\w+"))
    path = re.compile(rf"(?<![\w.~:/-])/(?:{places})/\w")
    host = socket.gethostname()
    found = []
    for file in tracked_files():
        if not file.is_file() or file.suffix in (".png", ".ico"):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        found += [f"{file.relative_to(_ROOT)}: {hit[0]}" for hit in path.finditer(text)]
        if len(host) > 6 and host in text:
            found.append(f"{file.relative_to(_ROOT)}: host name")
    assert not found
