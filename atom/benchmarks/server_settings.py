"""Which server a load runs against, in place of this package's engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from atom.benchmarks.load_exchange import VOCAB_SIZE
from atom.benchmarks.server_template import ServerTemplate
from atom.config import Settings
from atom.errors import BadInput

#: fields that no record has: a command line and an address may hold keys, users and hosts
UNRECORDED = ("server_command", "base_url")


class ServerSettings(Settings):
    """A server that a command starts for each point, or one that runs already; by default none."""

    server_command: str | None = Field(None, min_length=1, exclude=True)
    """Starts a server for each point: a command line with {port}, {pool_gib} and, if wanted,
    {concurrency}. Not recorded."""

    base_url: str | None = Field(None, min_length=1, exclude=True)
    """A server that runs already, e.g. http://HOST:PORT. Not recorded."""

    server_label: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9 .,_+-]{0,63}$")
    """What serves, in words for the record, e.g. vllm 0.12; goes with the two above."""

    server_model: str = Field("default", min_length=1, max_length=256)
    """Name of the model at the server."""

    server_vocab_size: int = Field(VOCAB_SIZE, ge=2, le=2**24)
    """Token ids of prompts are below it."""

    server_start_seconds: float = Field(600.0, gt=0, le=86400)
    """Longest time until a started server answers."""

    client: Literal["http", "agentx"] = "http"
    """Who puts the load on a server: this package's client, or the AgentX harness itself."""

    server_tokenizer: str | None = Field(None, min_length=1)
    """agentx: folder of the tokenizer of the server's model."""

    server_silence_seconds: float = Field(60.0, gt=0, le=86400)
    """After so long without an answer to a request for its health a started server hangs."""

    api_key_env: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Variable that holds the server's key; the key itself is never recorded."""

    @property
    def serves(self) -> bool:
        """Whether a server that is not this process's serves the points."""
        return self.server_label is not None

    def unrecorded(self) -> dict[str, Any]:
        """What a point has to be told and no record has."""
        return {name: getattr(self, name) for name in UNRECORDED}

    def refuse_for_server(self, special: bool, pools: int) -> None:
        """Raise for points that no server can have.

        Args:
            special: whether there are arms beside the grid.
            pools: how many sizes of the CPU pool, none included.

        Raises:
            ValueError: says what to leave out.
        """
        if special:
            raise ValueError("special: those arms are of this package's engine, not of a server")
        if self.base_url is not None and pools != 1:
            raise ValueError(
                "pool_gib: a server that runs already has one pool; say which, e.g. "
                "-p pool_gib '[96]' -p no_offload false, or -p pool_gib '[]' for none"
            )

    @model_validator(mode="after")
    def _one_client(self) -> ServerSettings:
        if self.client == "agentx" and not self.serves:
            raise ValueError("client: the AgentX harness puts its load on a server; name one")
        if (self.client == "agentx") != (self.server_tokenizer is not None):
            raise ValueError("server_tokenizer: a folder, for client agentx and for it alone")
        return self

    @model_validator(mode="after")
    def _one_server(self) -> ServerSettings:
        if self.server_command is not None and self.base_url is not None:
            raise ValueError("server_command starts a server, base_url names one: give one of them")
        if self.server_command is not None:
            try:
                ServerTemplate(self.server_command)
            except BadInput as error:
                raise ValueError(str(error)) from None
        if not self.serves and (self.server_command or self.base_url):
            raise ValueError(
                "server_label: say in a few words what serves (its name and version): the record "
                "has neither the command nor the address"
            )
        return self
