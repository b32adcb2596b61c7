"""Where a recorded run comes from: device, versions, commit, settings, and how it ended.

Nothing that names a person or a host is recorded: environment variables are kept by prefix only,
and values that look like paths are dropped.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import secrets
import socket
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from atom.errors import BadInput
from atom.evidence import Evidence
from atom.machines import DeviceKind
from atom.workbook.tables import DATA

if TYPE_CHECKING:
    from atom.device.interface import DeviceProperties

ExitState = Literal["running", "finished", "interrupted", "failed"]

#: environment variables with these prefixes change how a GPU or torch behaves
ENVIRONMENT_PREFIXES = (
    "CUDA_",
    "HIP_",
    "HSA_",
    "GPU_MAX_HW_QUEUES",
    "PYTORCH_",
    "TORCH_",
    "OMP_NUM_THREADS",
    "TRITON_",
)

#: where a checkout has no git history, these say what was run
COMMIT_VARIABLE = "ATOM_COMMIT"

_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/-])(?:~|[A-Za-z]:)?(?:[/\\][\w.+@-]+){2,}[/\\]?")
#: paths that begin with a folder every machine has, also behind ``host:`` or ``file://``
_ROOTED_PATH = re.compile(
    r"(?<![\w.-])/(?:home|Users|root|tmp|mnt|opt|var|usr|data|scratch|nfs)(?:/[\w.+@-]+)+/?"
)
#: ``~name``, or a home folder without anything below it: the last part would be a user's name
_HOME_FOLDER = re.compile(
    r"(?<![\w.-])(?:[A-Za-z]:)?[/\\](?:home|Users)[/\\][\w.+-]+[/\\]?(?![/\\\w.+@-])"
    r"|(?<![\w.~/-])~[A-Za-z_][\w.-]*"
)
#: ``user@host``; the ``@0`` of a point's name is none
_USER_AT_HOST = re.compile(r"[\w.+-]+@(?:[A-Za-z][\w.-]*|(?:\d{1,3}\.){3}\d{1,3})")
_HOST_NAME = re.compile(
    r"\b[A-Za-z0-9][A-Za-z0-9-]*(?:\.[A-Za-z0-9-]+)*"
    r"\.(?:local|localdomain|lan|internal|intranet|corp|cluster)\b"
)
_IP_ADDRESS = re.compile(r"(?<![\w.])(?!127\.0\.0\.1\b)(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\.\d)")
_UTC = r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z$"


class RecordedFile(BaseModel):
    """A row file of a run, as it was when the run ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    rows: int = Field(ge=0)


class Provenance(BaseModel):
    """What stands in a run's ``run.json``."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    run_id: str = Field(pattern=r"^\d{8}T\d{6}Z-[a-z0-9_]+-[0-9a-f]{6}$")
    """Name of the run's folder: start in UTC, experiment, six hex digits."""

    experiment: str = Field(pattern=r"^[a-z0-9_]+$")
    """Key of ``records.TABLES``."""

    evidence: Evidence
    """measured (hardware) or simulated (virtual device)."""

    machine: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    """Slug of the machine's kind, e.g. ``h200``; never a host name."""

    device: str
    """Marketing name of the device, or the virtual profile's name."""

    profile: str | None
    """Virtual profile; ``None`` on hardware."""

    kind: DeviceKind
    driver: str | None
    runtime: str
    torch: str
    triton: str | None
    python: str
    numpy: str

    commit: str | None
    """Commit of the code that ran; ``None`` if it is not known."""

    dirty: bool | None
    """Whether tracked code differed from the commit; ``None`` if it is not known."""

    settings: dict[str, Any]
    environment: dict[str, str]
    """Variables that change how a GPU or torch behaves."""

    facts: dict[str, Any]
    """Machine facts that matter: power cap in W, clocks, PCIe link, NUMA node, other processes."""

    started: str = Field(pattern=_UTC)
    ended: str | None = Field(default=None, pattern=_UTC)
    exit_state: ExitState = "running"
    error: str | None = None
    files: dict[str, RecordedFile] = {}

    planned_rows: dict[str, int] | None = None
    """Rows that the finished run has, by table; ``None`` where the plan was not recorded. A table
    that the plan does not fix is left out."""

    @field_validator("files")
    @classmethod
    def _plain_names(cls, files: dict[str, RecordedFile]) -> dict[str, RecordedFile]:
        for name in files:
            if not re.fullmatch(r"[a-z0-9_]+\.csv", name):
                raise ValueError(f"{name!r} is not a plain name such as trials.csv")
        return files

    @model_validator(mode="after")
    def _kinds_agree(self) -> Self:
        virtual = self.kind is DeviceKind.VIRTUAL
        expected = Evidence.SIMULATED if virtual else Evidence.MEASURED
        if self.evidence is not expected:
            raise ValueError(f"evidence of a {self.kind} device is {expected}")
        if virtual != (self.profile is not None):
            raise ValueError("profile is set for a virtual device, and only for one")
        if self.experiment != self.run_id.split("-")[1]:
            raise ValueError(f"run_id {self.run_id} is not of experiment {self.experiment}")
        return self

    @model_validator(mode="after")
    def _times_agree(self) -> Self:
        started = _moment("started", self.started)
        if (self.ended is None) is not (self.exit_state == "running"):
            raise ValueError(f"ended is {self.ended}, but exit_state is {self.exit_state}")
        if self.ended is not None and _moment("ended", self.ended) < started:
            raise ValueError(f"ended {self.ended} lies before started {self.started}")
        return self


def _moment(name: str, text: str) -> datetime:
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        raise ValueError(f"{name} {text} is no date and time") from None


def utc_now() -> str:
    """The time as ``2030-01-31T12:00:00Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def redact(value: Any) -> Any:
    """``value`` (JSON types) without users and hosts, and with absolute paths' last part alone."""
    if isinstance(value, Mapping):
        return {str(redact(str(key))): redact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if not isinstance(value, str):
        return value
    host = socket.gethostname()
    if len(host) > 3:
        value = value.replace(host, "(host)")
    value = _HOME_FOLDER.sub("(home)", value)
    for pattern in (_ABSOLUTE_PATH, _ROOTED_PATH):
        value = pattern.sub(_last_part, value)
    value = _USER_AT_HOST.sub("(user)", value)
    value = _HOST_NAME.sub("(host)", value)
    return _IP_ADDRESS.sub("(address)", value)


def _last_part(found: re.Match[str]) -> str:
    return re.split(r"[/\\]", found[0].rstrip("/\\"))[-1]


def relevant_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that change how a GPU or torch behaves, without values that look like paths."""
    source = os.environ if environment is None else environment
    return {
        name: value
        for name, value in sorted(source.items())
        if name.startswith(ENVIRONMENT_PREFIXES) and not re.search(r"[/\\~@]", value)
    }


def collect_provenance(
    device_properties: DeviceProperties,
    experiment: str,
    settings: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    planned_rows: Mapping[str, int] | None = None,
) -> Provenance:
    """Provenance of a run that starts now.

    Args:
        device_properties: the device that will run it.
        experiment: key of ``records.TABLES``.
        settings: JSON-typed experiment settings (``model_dump(mode="json")``).
        facts: machine facts, see :class:`Provenance`.
        planned_rows: rows that the finished run will have, by table.
    """
    import torch

    commit, dirty = source_commit()
    virtual = device_properties.kind is DeviceKind.VIRTUAL
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Provenance(
        run_id=f"{stamp}-{experiment}-{secrets.token_hex(3)}",
        experiment=experiment,
        evidence=device_properties.evidence,
        machine=device_properties.machine,
        device=device_properties.name,
        profile=device_properties.name if virtual else None,
        kind=device_properties.kind,
        driver=device_properties.driver,
        runtime=device_properties.runtime,
        torch=torch.__version__,
        triton=package_version("triton"),
        python=platform.python_version(),
        numpy=package_version("numpy") or "unknown",
        commit=commit,
        dirty=dirty,
        settings=redact(dict(settings)),
        environment=relevant_environment(),
        facts=redact(dict(facts or {})),
        started=utc_now(),
        planned_rows=None if planned_rows is None else dict(planned_rows),
    )


def changed_software(recorded: Provenance) -> list[str]:
    """What differs between the software of this process and that of a recorded run."""
    import torch

    now = {
        "commit": source_commit()[0],
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "numpy": package_version("numpy"),
        "python": platform.python_version(),
        "environment": relevant_environment(),
    }
    return [
        f"{name}: recorded {getattr(recorded, name)!r}, now {value!r}"
        for name, value in now.items()
        if getattr(recorded, name) != value
    ]


def package_version(package: str) -> str | None:
    """Version of an installed package, or ``None``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def source_commit() -> tuple[str | None, bool | None]:
    """Commit of this checkout and whether its code has local changes; ``None`` where not known.

    Raises:
        BadInput: the environment variable that replaces git's word is malformed.
    """
    head = _git("rev-parse", "HEAD")
    if head is not None:
        # recorded runs and rendered reports are results of the code, not part of it
        changed = _git("status", "--porcelain", "--", ".", ":!data/runs", ":!reports")
        return head, None if changed is None else bool(changed)
    given = os.environ.get(COMMIT_VARIABLE)
    if given is None:
        return None, None
    found = re.fullmatch(r"([0-9a-f]{7,64})(-dirty)?", given)
    if not found:
        raise BadInput(f"{COMMIT_VARIABLE}: expected a commit hash or HASH-dirty, got {given!r}")
    return found[1], found[2] is not None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=DATA.parent, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
