"""Points of the throughput sweep on the workers of a Dask cluster: this host's GPUs, or others.

A worker takes one point at a time, because it announces one ``GPU`` and a point asks for one. A
worker that dies costs nothing: its point runs again on another. Workers need no more than this
package and ``distributed``.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atom.benchmarks.throughput_process import COMMAND, end_all, run_point
from atom.errors import BadInput, DeviceError

if TYPE_CHECKING:
    from distributed import Client

RESOURCE = "GPU"
#: how long a cluster may take until its first worker is there
_WORKER_SECONDS = 60.0
_CONNECT_SECONDS = 20.0
#: workers that may die of one point before it is given up
_MOST_DEATHS = 3


@dataclass(frozen=True)
class Lost:
    """A point that no worker brought to its end."""

    reason: str


def refuse_no_dask() -> None:
    """Raise unless ``distributed`` is installed.

    Raises:
        BadInput: says how to install it.
    """
    try:
        import distributed  # noqa: F401
    except ImportError:
        raise BadInput(
            "several GPUs and --scheduler need Dask: pip install '.[cluster]' in the checkout, or "
            "pip install distributed"
        ) from None


@contextmanager
def local_cluster(environments: Sequence[Mapping[str, str]]) -> Iterator[Client]:
    """A worker process an environment, on this host and for it alone.

    Args:
        environments: variables of each worker, e.g. the GPU that it sees.
    """
    refuse_no_dask()
    import dask
    from distributed import Client, Nanny, Scheduler, SpecCluster

    with (
        tempfile.TemporaryDirectory(prefix="atom-dask-") as folder,
        dask.config.set({"distributed.scheduler.allowed-failures": _MOST_DEATHS}),
    ):
        options = {
            "nthreads": 1,
            "resources": {RESOURCE: 1},
            "memory_limit": 0,
            "dashboard": False,
            "local_directory": folder,
            "silence_logs": logging.CRITICAL,
        }
        workers = {
            number: {"cls": Nanny, "options": {**options, "env": dict(variables)}}
            for number, variables in enumerate(environments)
        }
        # nobody else on the network may hand work to it
        scheduler = {
            "cls": Scheduler,
            "options": {"host": "127.0.0.1", "port": 0, "dashboard": False},
        }
        with (
            SpecCluster(
                scheduler=scheduler, workers=workers, silence_logs=logging.CRITICAL
            ) as cluster,
            Client(cluster) as client,
        ):
            yield client


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """A client of a running cluster, which it leaves running.

    Raises:
        DeviceError: no scheduler answers, or none of its workers announces a GPU.
    """
    refuse_no_dask()
    from distributed import Client

    try:
        client = Client(address, timeout=_CONNECT_SECONDS)
    except (OSError, TimeoutError, ValueError) as error:
        raise DeviceError(
            f"no Dask scheduler answers at {address}: {error}; start one with: dask scheduler"
        ) from None
    with client:
        if not slots(client):
            raise DeviceError(
                f"no worker of {address} announces a GPU; start one for each GPU with: "
                f"CUDA_VISIBLE_DEVICES=0 dask worker {address} --nthreads 1 --resources GPU=1"
            )
        yield client


def slots(client: Client) -> int:
    """Points that can run at once now."""
    return len(gpu_workers(client))


def gpu_workers(client: Client) -> list[str]:
    """Addresses of the workers that announce a GPU."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return [address for address, info in workers.items() if info["resources"].get(RESOURCE)]


def run_here(job: dict[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """Run one point on the worker that this is called on."""
    from distributed import get_worker

    return {**run_point(job, command), "worker": str(get_worker().name)}


def run_on_host(
    environments: Sequence[Mapping[str, str]],
    next_job: Callable[[], dict[str, Any] | None],
    sweep: str,
    command: Sequence[str] = COMMAND,
) -> Iterator[tuple[dict[str, Any], dict[str, Any] | Lost]]:
    """Run jobs on this host: one a GPU side by side, or one after the other.

    Args:
        environments: variables of each GPU's processes; a single one needs no cluster.
        next_job: see :func:`run_jobs`, as is what else there is.
        sweep: identity of this sweep.
        command: starts a point's process.
    """
    if len(environments) > 1:
        with local_cluster(environments) as client:
            yield from run_jobs(client, next_job, sweep, command)
        return
    (environment,) = environments
    while (job := next_job()) is not None:
        yield job, run_point({**job, "environment": environment}, command)


def run_jobs(
    client: Client,
    next_job: Callable[[], dict[str, Any] | None],
    sweep: str,
    command: Sequence[str] = COMMAND,
) -> Iterator[tuple[dict[str, Any], dict[str, Any] | Lost]]:
    """Run jobs side by side, one a worker, and yield each with its end as it comes.

    Args:
        client: of the cluster.
        next_job: the job to start next, asked when a worker is free; ``None``: no more.
        sweep: identity of this sweep: its points end when this iteration is left early.
        command: starts a point's process.
    """
    from distributed import as_completed

    client.wait_for_workers(1, timeout=_WORKER_SECONDS)
    running: dict[str, dict[str, Any]] = {}
    ends = as_completed()

    def fill() -> None:
        while len(running) < max(1, slots(client)):
            job = next_job()
            if job is None:
                return
            future = client.submit(
                run_here,
                job,
                command,
                key=f"{sweep}/{job.get('key', job['point_id'])}",
                resources={RESOURCE: 1},
                pure=False,
            )
            running[str(future.key)] = job
            ends.add(future)

    try:
        fill()
        for future in ends:
            job = running.pop(str(future.key))
            if future.status == "finished":
                yield job, future.result()
            else:
                error = future.exception()
                yield job, Lost(f"{type(error).__name__}: {error}")
            future.release()
            fill()
    finally:
        if running:
            # whoever ended this process may have ended the cluster too: its points end with it
            with suppress(OSError):
                client.run(end_all, sweep)


def visible(gpu: int, variable: str) -> dict[str, str]:
    """The variable that shows a process one GPU, of those that this process may see."""
    shown = [name for name in os.environ.get(variable, "").split(",") if name.strip()]
    if shown and gpu >= len(shown):
        raise BadInput(f"--gpus: {gpu} is none of the {len(shown)} that {variable} shows")
    return {variable: shown[gpu] if shown else str(gpu)}
