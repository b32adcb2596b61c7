"""Makes ``.venv``: a plain one from the pinned versions, or one over a machine's own packages.

``make`` runs this file with the interpreter that the environment shall have, so it needs nothing
but Python. ``own`` installs every pin of ``environment.yml``. ``system`` is for a GPU container: it
takes what its interpreter has, adds only what is missing, and writes into ``.venv`` alone. torch,
triton and NumPy stay the container's in any case, since its torch build is compiled against them;
where their versions do not fit, it stops and says so.

Either way this checkout is what ``import atom`` finds there, ahead of the working directory,
``PYTHONPATH`` and any other package of that name. Outside ``.venv`` nothing changes.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP = ".installed"
MODE_FILE = ".mode"
#: compiled against each other: never put over those of the machine
GUARDED = frozenset(
    {"torch", "triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "numpy"}
)

#: extras for an environment of their own, which no pin knows
APART = frozenset({"accuracy", "lmcache"})
#: look for their templates and pages beside the running interpreter, so they must be in .venv
BESIDE = ("jupyterlab", "nbconvert")

_LINE_SECONDS = 5.0
#: pip's settings of a container that would send packages elsewhere or hold versions
_FOREIGN_PIP = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_CONSTRAINT")

FINDER = '''\
"""Lets `import atom` mean the workbook that this environment was made for."""

import sys
from importlib.machinery import PathFinder

ROOT = {root!r}


class WorkbookFirst:
    """Finds the one package `atom`; its modules follow from its place."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [ROOT]) if name == "atom" else None


# ahead of the working directory, PYTHONPATH and other packages
sys.meta_path.insert(0, WorkbookFirst)
'''

#: run by the new environment's interpreter: what it sees, as JSON
_SURVEY = """\
import json, sys
from importlib.metadata import distributions
seen = {}
for one in distributions():
    name = (one.metadata["Name"] or "").lower().replace("_", "-").replace(".", "-")
    if name in sys.argv[1:] and not str(one.locate_file("")).startswith(sys.prefix):
        continue
    seen.setdefault(name, [one.version, list(one.requires or [])])
print(json.dumps(seen))
"""


class SetupError(Exception):
    """The environment cannot be made; the message says what to do."""


def pinned(text: str) -> dict[str, str]:
    """Name to exact version in the ``pip:`` list of an ``environment.yml``."""
    pins: dict[str, str] = {}
    inside = False
    for line in text.splitlines():
        if re.fullmatch(r"\s*- pip:\s*", line):
            inside = True
        elif inside and (found := re.fullmatch(r"\s+- ([\w.-]+)==(\S+)\s*", line)):
            pins[re.sub(r"[-_.]+", "-", found[1]).lower()] = found[2]
    return pins


def required(text: str) -> list[str]:
    """Direct requirements of a ``pyproject.toml``, those of its extras but :data:`APART` too."""
    import tomllib

    project = tomllib.loads(text)["project"]
    extras = project.get("optional-dependencies", {}).items()
    more = [line for name, lines in extras if name not in APART for line in lines]
    return [*project["dependencies"], *more]


Seen = dict[str, tuple[str, list[str]]]


@dataclass(frozen=True)
class Fault:
    """A requirement that an environment does not meet.

    Attributes:
        name: of the package that is missing or of a wrong version.
        parent: name of the package that needs it; empty for the workbook.
        text: both, in words.
    """

    name: str
    parent: str
    text: str


def unmet(seen: Seen, roots: Sequence[str]) -> list[Fault]:
    """What is missing or of a wrong version below ``roots``.

    What torch, triton and NumPy need themselves is the machine's own affair.

    Args:
        seen: name to version and requirements of what an environment has.
        roots: requirements to start from.
    """
    try:
        from packaging.requirements import Requirement
        from packaging.utils import canonicalize_name
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]
        from pip._vendor.packaging.utils import canonicalize_name  # type: ignore[assignment]

    faults: list[Fault] = []
    done: set[tuple[str, str]] = set()
    rest = [(Requirement(text), "", "") for text in roots]
    while rest:
        requirement, parent, extra = rest.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = str(canonicalize_name(requirement.name))
        text = f"{parent or 'the workbook'} needs {requirement}"
        if name not in seen:
            faults.append(Fault(name, parent, f"{text}, which is missing"))
            continue
        version, requires = seen[name]
        # a local build such as 2.12.0+rocm7 counts as its release, and a preview may be tried
        if not requirement.specifier.contains(version, prereleases=True):
            faults.append(Fault(name, parent, f"{text}, and {version} is there"))
        if name in GUARDED:
            continue
        for inner in {"", *requirement.extras}:
            if (name, inner) not in done:
                done.add((name, inner))
                rest += [(Requirement(text), name, inner) for text in requires]
    return faults


def missing_pins(
    seen: Seen, roots: Sequence[str], pins: dict[str, str], added: set[str]
) -> list[str]:
    """Pins to install now so that ``roots`` are met; empty when they are.

    A package that does not fit is put into ``.venv`` in its pinned version. Where it is guarded or
    has no pin, the one that asks for it is.

    Args:
        seen: what the environment has.
        roots: requirements of the workbook.
        pins: versions to take.
        added: names that were installed before.

    Raises:
        SetupError: a guarded package does not fit, or a fault that no pin mends.
    """
    chosen = set()
    for fault in unmet(seen, roots):
        guarded = fault.name in GUARDED and (fault.name in seen or fault.name == "torch")
        if guarded and not fault.parent:
            raise SetupError(
                f"{fault.text}. {fault.name} of this machine is never replaced, because its torch "
                "build and it belong together: use another container, or leave out ENV=system"
            )
        name = fault.parent if guarded or fault.name not in pins else fault.name
        if name not in pins or name in added:
            raise SetupError(f"{fault.text}; no pinned version mends that")
        chosen.add(name)
    return sorted(f"{name}=={pins[name]}" for name in chosen)


def install_finder(venv: Path, root: Path) -> None:
    """Make ``root`` the place of ``atom`` in that environment, whatever else is called so."""
    (packages,) = (venv / "lib").glob("python3.*/site-packages")
    (packages / "_atom_workbook_first.py").write_text(FINDER.format(root=str(root)))
    (packages / "atom_workbook_first.pth").write_text("import _atom_workbook_first\n")


def install_kernel(venv: Path) -> None:
    """Give the environment a ``python3`` kernel that names its own interpreter."""
    folder = venv / "share" / "jupyter" / "kernels" / "python3"
    folder.mkdir(parents=True, exist_ok=True)
    python = str(venv / "bin" / "python")
    launch = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": launch, "display_name": "Python 3", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec, indent=1) + "\n")


def create(venv: Path, mode: str) -> None:
    """Make the environment of the running interpreter; an existing one of the mode is kept."""
    if (venv / "bin" / "python").exists():
        recorded = (venv / MODE_FILE).read_text().strip() if (venv / MODE_FILE).exists() else "own"
        if recorded != mode:
            raise SetupError(
                f"{venv.name} was made with ENV={recorded}; remove it first: rm -rf {venv.name}"
            )
        return
    over_venv = mode == "system" and sys.prefix != sys.base_prefix
    command = [sys.executable, "-m", "venv", str(venv)]
    if mode == "system" and not over_venv:
        command.append("--system-site-packages")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SetupError(
            f"{sys.executable} cannot make a venv (on Debian, install python3-venv):\n"
            f"{done.stdout}{done.stderr}"
        )
    (venv / MODE_FILE).write_text(mode + "\n")
    if over_venv:
        # a venv's option means its base's packages, so those of this one are named
        import site

        (packages,) = (venv / "lib").glob("python3.*/site-packages")
        lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
        (packages / "atom_workbook_system.pth").write_text("\n".join(lines) + "\n")


def pip_install(venv: Path, arguments: Sequence[str], total: int) -> None:
    """Install into ``venv`` alone, and tell on standard error how far it is.

    Raises:
        SetupError: pip failed; its last lines.
    """
    environment = {name: v for name, v in os.environ.items() if name not in _FOREIGN_PIP}
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    lines: list[str] = []
    with subprocess.Popen(
        [*command, "--progress-bar", "off", "--no-input", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        reader = threading.Thread(target=_keep, args=(process.stdout, lines))
        reader.start()
        progress = _PipProgress(venv, total)
        while reader.is_alive():
            reader.join(_LINE_SECONDS)
            if reader.is_alive():
                _say(progress.text(lines))
    if process.returncode:
        raise SetupError("pip failed:\n" + "\n".join(f"  {line}" for line in lines[-12:]))


def _keep(stream: Iterable[str], lines: list[str]) -> None:
    lines.extend(line.rstrip() for line in stream)


class _PipProgress:
    """How far pip is: it names each package that it collects, but unpacks them without a word."""

    def __init__(self, venv: Path, total: int) -> None:
        self._venv, self._total = venv, total
        self._began = self._unpacks = time.time()

    def text(self, lines: Sequence[str]) -> str:
        """A line for people, from pip's lines so far."""
        now = time.time()
        if not any(line.startswith("Installing collected packages") for line in lines):
            starts = ("Collecting ", "Requirement already satisfied: ")
            done = sum(line.startswith(starts) for line in lines)
            self._unpacks, since, verb = now, now - self._began, " collected"
        else:
            folders = self._venv.glob("lib/python3.*/site-packages/*.dist-info")
            done = sum(folder.stat().st_mtime >= self._began for folder in folders)
            since, verb = now - self._unpacks, " unpacked"
        done = min(done, self._total)
        if not done:
            return f"0 of {self._total} packages{verb}"
        left = since * (self._total - done) / done
        return f"{done} of {self._total} packages{verb}, about {left:.0f} s left"


def set_up(venv: Path, mode: str, torch_index: str = "") -> None:
    """Install what the environment lacks. Its own interpreter runs this.

    Args:
        venv: an environment that :func:`create` made.
        mode: ``own`` or ``system``.
        torch_index: package index to take torch from; ``own`` only.

    Raises:
        SetupError: says what to do.
    """
    pins = pinned((ROOT / "environment.yml").read_text())
    roots = required((ROOT / "pyproject.toml").read_text())
    if mode == "own":
        _say(f"installing {len(pins)} pinned packages into {venv.name}")
        if torch_index:
            torch = f"torch=={pins['torch']}"
            pip_install(venv, ["--no-deps", "--index-url", torch_index, torch], 1)
        pip_install(venv, [f"{name}=={version}" for name, version in pins.items()], len(pins))
    else:
        if torch_index:
            raise SetupError("TORCH_INDEX does not go with ENV=system: this machine's torch stays")
        added: set[str] = set()
        while wanted := missing_pins(survey(venv), roots, pins, added):
            then = "" if added else "; what they need in turn comes next"
            _say(f"installing {len(wanted)} missing packages into {venv.name}{then}")
            # without dependencies: each is looked at again before anything comes along; a version
            # outside .venv neither counts nor is touched
            pip_install(venv, ["--no-deps", "--force-reinstall", *wanted], len(wanted))
            added |= {text.split("==")[0] for text in wanted}
        seen = survey(venv)
        own = "lib/python3.*/site-packages/{}-*.dist-info"
        kept = ", ".join(
            f"{name} {seen[name][0]}"
            for name in sorted(GUARDED & seen.keys())
            if not any(venv.glob(own.format(name.replace("-", "_"))))
        )
        _say(f"kept from this machine: {kept}")
    install_finder(venv, ROOT)
    install_kernel(venv)
    (venv / STAMP).touch()


def survey(venv: Path) -> Seen:
    """Name to version and requirements of all that ``venv`` sees; the first of a name counts.

    Those of :data:`BESIDE` count only if they are installed in ``venv`` itself.
    """
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-P", "-c", _SURVEY, *BESIDE],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    return {name: (version, requires) for name, (version, requires) in found.items()}


def _is_fresh(venv: Path) -> bool:
    sources = [ROOT / "environment.yml", ROOT / "pyproject.toml", Path(__file__)]
    try:
        made = (venv / STAMP).stat().st_mtime_ns
    except OSError:
        return False
    return all(path.stat().st_mtime_ns <= made for path in sources)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 for what the user can mend."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mode", default="own", help="own or system")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--torch-index", default="")
    options = parser.parse_args(arguments)
    if options.mode not in ("own", "system"):
        _say(f"error: ENV={options.mode}: own (default) or system")
        return 2
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        _say(f"error: Python 3.11 or 3.12 is needed, this is {sys.version.split()[0]} (PYTHON=...)")
        return 2
    if shutil.disk_usage(ROOT).free < 2**30:
        _say("error: less than 1 GiB free for .venv")
        return 2
    # two makes in one checkout: the second waits and finds it done
    with open(ROOT / "environment.yml") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            create(options.venv, options.mode)
            if not _is_fresh(options.venv):
                if Path(sys.prefix).resolve() != options.venv.resolve():
                    # the interpreter that was asked may lack pip; the environment has its own
                    words = [*sys.orig_argv[1:]]
                    python = str(options.venv / "bin" / "python")
                    os.execv(python, [python, *words])
                set_up(options.venv, options.mode, options.torch_index)
        except SetupError as error:
            _say(f"error: {error}")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
