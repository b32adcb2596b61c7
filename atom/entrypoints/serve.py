"""``python -m atom serve``: options, and the way from them to a server that runs."""

from __future__ import annotations

import argparse
import ipaddress
import json
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.entrypoints.terminal import say, tell
from atom.errors import BadInput
from atom.models.config_checks import refuse_unrunnable
from atom.options import add_setting, read_value, refuse_named_twice

if TYPE_CHECKING:
    from atom.model_engine.engine_settings import EngineSettings

# nothing heavy is imported here: a wrong option is answered at once

KEY_VARIABLE = "ATOM_API_KEY"
PRESET = "preset:"
#: names of ``atom.models.presets``, which needs torch
PRESETS = ("tiny", "m395")
EPILOG = """\
examples
  python -m atom serve --model preset:tiny --device virtual
  python -m atom serve --model my_checkpoint --max-num-seqs 64 --port 8001
  python -m atom serve --model my_checkpoint --draft-tokens 0 --no-prefix-caching
  python -m atom serve --model preset:tiny --device virtual --protocol unpatched -p epoch_tag false

The first needs no files and no GPU: random weights, a token a byte. When it says `ready`, ask it:

  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "tiny", "prompt": "hello", "max_tokens": 16, "stream": true}'

or, with OpenAI's client,

  client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="any")
  client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])

paths: /v1/completions /v1/chat/completions /v1/models /health /metrics
beside OpenAI's fields: top_k, ignore_eos, stop_token_ids, chat_template_kwargs
A key, if set, is wanted on every path but /health and /metrics. SIGINT or SIGTERM lets requests
finish for --shutdown-seconds and ends the others with an error; a second one ends at once.

exit codes: 0 ended by a signal, 2 bad input, 3 the device failed, 130 ended at once
"""
_MOST_GIB = 8192
#: options whose engine setting has another name
_RENAMED = {"protocol": "copy_protocol", "gpu_memory_utilization": "memory_utilization"}
_ENGINE_OPTIONS = (
    ("--protocol", str, "NAME", "what protects the sources of host-bound copies: hold (default), "
     "record_stream, blocking, zero_copy, or unpatched, which has the fault"),
    ("--guard", str, "MODE", "what the state kernels do about a bad count or slot: report "
     "(default), none, or trap, which ends the process and needs TRITON_DEBUG=1 on a GPU"),
    ("--max-num-seqs", int, "N", "requests that run at once"),
    ("--max-num-batched-tokens", int, "N", "token budget of a prefill step"),
    ("--max-model-len", int, "N", "longest request, prompt and output together (default: the "
     "model's own, at most 32768)"),
    ("--draft-tokens", int, "N", "draft tokens a step, 0 to 7 (default: 3); 0 switches "
     "speculation off"),
    ("--forced-acceptance-length", float, "MEAN", "force the mean tokens a decode step instead of "
     "verifying: outputs are wrong, times are right"),
    ("--gpu-memory-utilization", float, "SHARE", "share of the device's memory to fill"),
    ("--num-kv-blocks", int, "N", "KV blocks (default: what free memory holds)"),
    ("--cpu-pool-gib", float, "GIB", "pinned host memory for prefixes that leave the device "
     "(default: 0, none)"),
    ("--seed", int, "N", "of a preset's weights, and of requests that bring none"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``serve``."""
    parser.epilog = EPILOG
    model = parser.add_argument_group("model and device")
    model.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help=f"a checkpoint folder, or preset:NAME ({', '.join(PRESETS)})",
    )
    model.add_argument(
        "--device",
        choices=("auto", "virtual", "accelerator"),
        default="auto",
        help="auto (default) takes the accelerator if there is one",
    )
    model.add_argument("--served-model-name", metavar="NAME", help="default: the folder's name")
    engine = parser.add_argument_group("engine")
    for flag, kind, shown, about in _ENGINE_OPTIONS:
        engine.add_argument(flag, type=kind, metavar=shown, help=about)
    engine.add_argument(
        "--dspark", action="store_true", help="let the drafts' confidence size each verification"
    )
    engine.add_argument(
        "--no-prefix-caching", action="store_true", help="compute every prompt from its start"
    )
    engine.add_argument(
        "--no-logprobs",
        action="store_true",
        help="spare the logprobs, and refuse requests for them",
    )
    add_setting(engine, "any other engine setting, e.g. -p block_size 64; may be repeated")
    web = parser.add_argument_group("server")
    web.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1)")
    web.add_argument("--port", type=int, default=8000, help="0 picks a free one (default: 8000)")
    web.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key that requests must bring; better in {KEY_VARIABLE}, where no process list "
        "shows it",
    )
    web.add_argument(
        "--max-body-mib",
        type=float,
        default=32,
        metavar="N",
        help="largest request body (default: 32)",
    )
    web.add_argument(
        "--shutdown-seconds",
        type=float,
        default=30,
        metavar="S",
        help="patience with requests in flight when a signal comes (default: 30)",
    )
    web.add_argument("--json", action="store_true", help="say `ready` as a line of JSON")


def engine_values(options: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, as fields of ``EngineSettings``."""
    values: dict[str, Any] = {"logprobs": not options.no_logprobs, "dspark": options.dspark}
    flags = {"no_logprobs": "logprobs", "dspark": "dspark", "no_prefix_caching": "prefix_caching"}
    given = {
        field: f"--{name.replace('_', '-')}"
        for name, field in flags.items()
        if getattr(options, name)
    }
    if options.no_prefix_caching:
        values["prefix_caching"] = False
    for flag, *_ in _ENGINE_OPTIONS:
        name = flag.removeprefix("--").replace("-", "_")
        if (value := getattr(options, name)) is not None:
            field = _RENAMED.get(name, name)
            values[field] = value
            given["cpu_pool_bytes" if field == "cpu_pool_gib" else field] = flag
    if (gibibytes := values.pop("cpu_pool_gib", None)) is not None:
        if not 0 <= gibibytes <= _MOST_GIB:
            raise BadInput(f"--cpu-pool-gib {gibibytes:g}: expected 0 to {_MOST_GIB}")
        values["cpu_pool_bytes"] = int(gibibytes * 2**30) or None
    refuse_named_twice(given, options.parameters)
    for name, text in options.parameters:
        values[name] = read_value(name, text)
    return values


def run(options: argparse.Namespace) -> int:
    """Load the model and serve it until a signal comes.

    Raises:
        BadInput: an option, the model folder or the address cannot be used.
        DeviceError: there is no such device, or it failed.
    """
    _check(options)
    key = api_key(options)
    name = served_name(options)
    values = engine_values(options)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("atom").setLevel(logging.INFO)
    # the port first: to load a model and then find it taken would be a pity
    with bind(options.host, options.port) as listener:
        check_model(options.model)
        from atom.model_engine.engine_settings import EngineSettings

        # so far without torch, which takes seconds to load
        EngineSettings.parse(values, where="serve")
        return _serve(options, values, name, key, listener)


def api_key(options: argparse.Namespace) -> str | None:
    """The key that requests must bring, without blanks around it: no header keeps those.

    Raises:
        BadInput: it is empty, or no client could send it.
    """
    given = options.api_key if options.api_key is not None else os.environ.get(KEY_VARIABLE)
    if given is None:
        return None
    key: str = given.strip(" \t\r\n")
    where = f"(--api-key or {KEY_VARIABLE})"
    if not key:
        raise BadInput(f"the API key is empty {where}: set one, or unset it")
    if not key.isprintable():
        raise BadInput(f"the API key has a character that does not print {where}: set another one")
    return key


def served_name(options: argparse.Namespace) -> str:
    """What clients call the model.

    Raises:
        BadInput: no client could.
    """
    name: str = options.served_model_name or Path(options.model.removeprefix(PRESET)).resolve().name
    if not name.isprintable():
        raise BadInput(f"--served-model-name {name!a} has a character that does not print")
    return name


def check_model(model: str) -> None:
    """Find what is wrong with ``--model``, as far as that is quick to tell.

    Args:
        model: a checkpoint folder, or ``preset:NAME``.

    Raises:
        BadInput: there is no such preset, or the folder cannot be a checkpoint of this engine.
    """
    if model.startswith(PRESET):
        if (name := model.removeprefix(PRESET)) not in PRESETS:
            raise BadInput(f"--model: no preset is named {name!r}; known: {', '.join(PRESETS)}")
        return
    folder = Path(model)
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = "no such folder" if not folder.exists() else f"{path.name}: {error.strerror}"
        raise BadInput(
            f"--model {model}: {why}; expected a checkpoint folder, or {PRESET}NAME "
            f"({', '.join(PRESETS)})"
        ) from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadInput(f"{path}: expected a JSON object, found {type(values).__name__}")
    refuse_unrunnable(values, str(path))
    files = ("model.safetensors", "model.safetensors.index.json")
    if not any((folder / name).is_file() for name in files):
        raise BadInput(f"{folder}: no weights; expected {files[0]}, or {files[1]} and its files")


def _check(options: argparse.Namespace) -> None:
    if not 0 <= options.port <= 65535:
        raise BadInput(f"--port {options.port}: expected 0 to 65535")
    if not 0 <= options.shutdown_seconds <= 86400:
        raise BadInput(f"--shutdown-seconds {options.shutdown_seconds}: expected 0 to 86400")
    if not 0 < options.max_body_mib <= 4096:
        raise BadInput(f"--max-body-mib {options.max_body_mib}: expected more than 0, to 4096")


def bind(host: str, port: int) -> socket.socket:
    """Take an address; nothing listens there yet.

    Raises:
        BadInput: it is in use, or not of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise BadInput(
            f"cannot bind {host} port {port}: {error.strerror}; set --host and --port"
        ) from None
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _serve(
    options: argparse.Namespace,
    values: dict[str, Any],
    name: str,
    key: str | None,
    listener: socket.socket,
) -> int:
    from atom.config import CopyProtocol
    from atom.entrypoints.api import ServedModel, Server, ServerLimits
    from atom.entrypoints.graceful import GracefulServer
    from atom.entrypoints.loading import load
    from atom.entrypoints.tokenizer import open_tokenizer

    loaded = load(options.model, options.device, values)
    settings = loaded.settings
    model = ServedModel(
        name=name,
        tokenizer=open_tokenizer(options.model, loaded.vocab_size, settings.max_model_len),
        vocab_size=loaded.vocab_size,
        max_model_len=settings.max_model_len,
        logprobs=settings.logprobs,
        simulated=loaded.simulated,
    )
    limits = ServerLimits(body_bytes=int(options.max_body_mib * 2**20))
    server = Server(loaded.engine, model, limits, key)
    address = _url(listener)

    def ready() -> None:
        if not is_loopback(options.host) and key is None:
            _warn(f"{address} is open to the network and no API key is set ({KEY_VARIABLE})")
        if settings.copy_protocol is CopyProtocol.UNPATCHED:
            _warn("--protocol unpatched has the fault: statuses and tokens may be another step's")
        if settings.forced_acceptance_length is not None:
            _warn("acceptance is forced: outputs are not the model's")
        line = ready_line(f"{address}/v1", name, loaded.device_name, settings, options.json)
        say(line)

    # the engine's thread and the event loop share one interpreter: hand over more often
    sys.setswitchinterval(0.0005)
    web = GracefulServer(server, options.shutdown_seconds, ready)
    web.run(sockets=[listener])
    if web.force_exit:
        # the engine's thread may be in a step still
        os._exit(130)
    return 0


def ready_line(
    url: str, name: str, device: str, settings: EngineSettings, as_json: bool = False
) -> str:
    """What a server says once, when it takes requests.

    Args:
        url: clients' base address.
        name: of the model.
        device: what it runs on.
        settings: of the engine.
        as_json: one line of JSON with all settings, for a script.
    """
    if as_json:
        values = {
            "format": 1,
            "url": url,
            "model": name,
            "device": device,
            "settings": settings.model_dump(mode="json"),
        }
        return json.dumps(values)
    return (
        f"ready: {url} serves {name} on {device} ({settings.copy_protocol.value}, guard "
        f"{settings.guard.value}, {settings.draft_tokens} draft tokens)"
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _warn(text: str) -> None:
    tell(f"warning: {text}")
