"""What all routes share: kept in ``app.state.jackfield``."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI, Request

from jackfield import __version__
from jackfield.config import EngineConfig, ServerSection
from jackfield.errors import ConfigError, RequestError, did_you_mean
from jackfield.server.engine_view import Engine


@dataclass(slots=True, kw_only=True)
class ServerState:
    """Set when the server is built; only ``draining`` changes afterwards.

    Args:
        engine: what runs the model. config: as it was loaded. names: under which the model is served; the first is
            the one that answers show. fingerprint: changes with the configuration and the version. chat_template: text
            of the template that replaces the model's own, or None. started: Unix time in seconds.
        draining: the server was told to stop and takes no new requests.
    """

    engine: Engine
    config: EngineConfig
    names: tuple[str, ...]
    fingerprint: str
    chat_template: str | None = None
    started: float = field(default_factory=time.time)
    draining: bool = False

    @property
    def settings(self) -> ServerSection:
        """The server's settings."""
        return self.config.server

    @property
    def model(self) -> str:
        """The name that answers show."""
        return self.names[0]

    def check_model(self, name: str | None) -> str:
        """Return the name that answers show for a request's ``model``.

        Raises:
            ModelNotServedError: the server does not serve it.
        """
        if name is None or name in self.names:
            return name or self.model
        remedy = did_you_mean(name, self.names) or f"served here: {', '.join(self.names)}"
        raise ModelNotServedError(
            f"the model '{name[:200]}' is not served here", field="model", value=name, remedy=remedy
        )


class ModelNotServedError(RequestError):
    """A request names a model that this server does not have."""


def make_state(engine: Engine, config: EngineConfig) -> ServerState:
    """Return the state of a server.

    Raises:
        ConfigError: the file of ``server.chat_template`` cannot be read.
    """
    digest = hashlib.sha256(f"{__version__} {engine.config.digest()}".encode()).hexdigest()
    return ServerState(
        engine=engine,
        config=config,
        names=config.server.served_model_name or (config.model.model,),
        fingerprint=f"jf-{digest[:12]}",
        chat_template=_template(config.server.chat_template),
    )


def state_of(holder: FastAPI | Request) -> ServerState:
    """Return the state of an app, or of the app that a request reached."""
    app = holder if isinstance(holder, FastAPI) else holder.app
    state: ServerState = app.state.jackfield
    return state


def _template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the chat template cannot be read: {error}",
            field="server.chat_template",
            value=path,
            remedy="name a text file that holds a Jinja template",
        ) from error
