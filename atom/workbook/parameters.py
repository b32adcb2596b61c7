"""Parameters of notebooks as a command line gives them, checked before anything starts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom.errors import BadInput
from atom.options import read_value
from atom.workbook.notebooks import NotebookSpec


@dataclass(frozen=True)
class ReportTarget:
    """Where a run belongs.

    Attributes:
        option: what was asked for: ``ci``, ``gpu``, or a machine whose records are analysed again.
        profile: report and accepted-verdict set: ``ci`` or a machine's slug.
        folder: report folder.
    """

    option: str
    profile: str
    folder: Path


def read_given(pairs: Iterable[Sequence[str]], file: str | None) -> dict[str, Any]:
    """Values of ``-f FILE`` and, over them, of ``-p NAME VALUE``.

    Args:
        pairs: name and value text. A value is read as YAML: ``3``, ``0.5``, ``true``, ``[1, 2]``.
        file: YAML file with one mapping, or ``None``.

    Raises:
        BadInput: unreadable file or value.
    """
    import yaml

    given: dict[str, Any] = {}
    if file is not None:
        try:
            loaded = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise BadInput(f"-f {file}: cannot be read: {error}") from None
        if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
            raise BadInput(f"-f {file}: needs one mapping of parameter names to values")
        given.update(loaded)
    for name, text in pairs:
        given[name] = read_value(name, text)
    return given


def assign(
    specs: Sequence[NotebookSpec], given: Mapping[str, Any], target: ReportTarget
) -> dict[str, dict[str, Any]]:
    """Parameters of each notebook: the profile's, then the user's where the notebook has them.

    Args:
        specs: selected notebooks.
        given: the user's values.
        target: profile and report folder.

    Returns:
        Stem to parameters; every set has passed the notebook's settings class.

    Raises:
        BadInput: a name that no selected notebook has, or a value of a wrong type or range.
    """
    if "profile" in given:
        raise BadInput("parameter profile: use --profile")
    known = sorted({name for spec in specs for name in spec.settings.model_fields})
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "known: " + ", ".join(known)
            if ":" in name:
                hint = f"YAML wants a blank after the colon; {hint}"
            chosen = ", ".join(spec.stem for spec in specs)
            raise BadInput(f"{name}: no selected notebook ({chosen}) has this parameter; {hint}")
    if target.option not in ("ci", "gpu") and not given.get("records"):
        raise BadInput(
            f"--profile {target.option}: only recorded runs can be analysed under another "
            "machine's name; give them with -p records '[data/runs/...]', or use ci or gpu"
        )
    assigned: dict[str, dict[str, Any]] = {}
    faults = []
    for spec in specs:
        values: dict[str, Any] = dict(spec.profiles.get(target.option, {}))
        values.update((n, v) for n, v in given.items() if n in spec.settings.model_fields)
        values["profile"] = target.profile
        try:
            spec.settings.parse(values, where=f"notebook {spec.stem}")
        except BadInput as error:
            faults.append(str(error))
        assigned[spec.stem] = values
    if faults:
        raise BadInput("\n".join(faults))
    return assigned


def resolve_target(option: str, out: str | None, root: Path) -> ReportTarget:
    """The report that ``--profile`` and ``--out`` mean.

    Raises:
        DeviceError: ``gpu`` without an accelerator.
        BadInput: a name that cannot be a profile.
    """
    profile = option
    if option == "gpu":
        from atom.device.accelerator import accelerator_properties, why_no_accelerator
        from atom.errors import DeviceError

        reason = why_no_accelerator()
        if reason is not None:
            raise DeviceError(f"--profile gpu needs an accelerator: {reason}")
        profile = accelerator_properties().machine
    elif not option.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise BadInput(f"--profile {option}: ci, gpu, or the name of a machine with records")
    folder = Path(out) if out is not None else root / "reports" / profile
    return ReportTarget(option=option, profile=profile, folder=folder.resolve())
