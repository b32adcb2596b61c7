"""What the workers of a cluster are: a run is of one kind of device and of one software."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atom.benchmarks.agentx_client import find_agentx
from atom.benchmarks.load_http import checked_url, key_of
from atom.benchmarks.server_template import ServerTemplate
from atom.benchmarks.throughput_settings import ThroughputSettings
from atom.device.interface import DeviceKind, DeviceProperties
from atom.errors import BadInput, DeviceError
from atom.evidence import Evidence
from atom.workbook.provenance import source_commit
from atom.workbook.throughput_dask import gpu_workers, run_here

if TYPE_CHECKING:
    from distributed import Client

_DESCRIBE_SECONDS = 120.0


@dataclass(frozen=True)
class Elsewhere:
    """A device that other processes open; this one knows its properties alone."""

    properties: DeviceProperties


def server_properties() -> DeviceProperties:
    """The device of a server on no accelerator of this host: nothing is known of it."""
    return DeviceProperties(
        name="server",
        kind=DeviceKind.UNKNOWN,
        evidence=Evidence.MEASURED,
        machine="server",
        memory_bytes=0,
        hardware_queues=None,
        queue_variable=None,
        driver=None,
        runtime="unknown",
    )


def refuse_no_server(settings: ThroughputSettings) -> None:
    """Raise unless the settings say how to reach the server.

    Raises:
        BadInput: a resumed run needs the command or the address again, the address or the key's
            variable is none, or this host has no such program.
    """
    if settings.server_command is None and settings.base_url is None:
        raise BadInput(
            f"server_label {settings.server_label}: give --server-command or --base-url; no record "
            "has them, so a resumed run needs them again"
        )
    if settings.base_url is not None:
        checked_url(settings.base_url)
    if settings.scheduler is not None:
        # what is there, its workers have
        return
    if settings.api_key_env is not None:
        key_of(settings.api_key_env)
    if settings.server_command is not None:
        ServerTemplate(settings.server_command).check_program()
    if settings.server_tokenizer is not None:
        find_agentx()
        if not Path(settings.server_tokenizer).is_dir():
            raise BadInput(f"server_tokenizer: no folder {settings.server_tokenizer}")
        if settings.output_tokens is not None:
            raise BadInput("output_tokens: the harness takes the sessions' own; leave it empty")


def worker_commit() -> str | None:
    """Commit of the code on the worker that this is called on."""
    return source_commit()[0]


def describe_workers(
    client: Client, settings: ThroughputSettings, command: Sequence[str]
) -> DeviceProperties:
    """The device that all workers have.

    Raises:
        BadInput: they differ from each other, or their software from this process's.
        DeviceError: one of them cannot say.
    """
    job = {
        "point_id": "describe",
        "describe": True,
        "settings": settings.model_dump(mode="json") | settings.unrecorded(),
        "limit_seconds": _DESCRIBE_SECONDS,
    }
    addresses = gpu_workers(client)
    futures = [
        client.submit(run_here, job, command, workers=[address], pure=False, resources={"GPU": 1})
        for address in addresses
    ]
    commits = client.run(worker_commit, workers=addresses)
    seen: list[dict[str, Any]] = []
    for end in client.gather(futures):
        if "properties" not in end["told"]:
            raise DeviceError(f"worker {end['worker']} has no device: {end['last_words']}")
        seen.append(end["told"])
    own = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": source_commit()[0],
    }
    for told, address in zip(seen, addresses, strict=True):
        found = {**told, "commit": commits[address]}
        for name, value in own.items():
            if found[name] != value:
                raise BadInput(f"a worker has {name} {found[name]}, this process {value}: use one")
        if told["properties"] != seen[0]["properties"]:
            names = {each["properties"]["name"] for each in seen}
            raise BadInput(
                f"workers have different devices or drivers ({', '.join(sorted(names))}): a run "
                "is of one kind; sweep each kind for itself"
            )
    values = seen[0]["properties"]
    return DeviceProperties(
        **{**values, "kind": DeviceKind(values["kind"]), "evidence": Evidence(values["evidence"])}
    )
