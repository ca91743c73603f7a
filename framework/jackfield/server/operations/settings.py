"""What is wrong with the server's settings, found before the model is loaded."""

from __future__ import annotations

import importlib.util
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from jackfield.config import EngineConfig
from jackfield.config.origin import Problem, raise_problems


def check_settings(config: EngineConfig) -> None:
    """Refuse settings of the server that contradict each other, do nothing, or name files that cannot be used.

    Raises:
        ConfigError: lists all of them.
    """
    raise_problems([*_address(config), *_origins(config), *_tls(config), *_tracing(config)])


def _problem(config: EngineConfig, name: str, message: str, remedy: str) -> Problem:
    field = f"server.{name}"
    return Problem(field, message, config.get(field), remedy, config.origin(field))


def _address(config: EngineConfig) -> Iterator[Problem]:
    if config.server.uds is None:
        return
    for name in ("host", "port"):
        if config.is_user_set(f"server.{name}"):
            message = f"server.{name} does nothing beside server.uds"
            yield _problem(config, name, message, "leave out one of them")


def _origins(config: EngineConfig) -> Iterator[Problem]:
    settings = config.server
    if settings.allow_credentials and not settings.allowed_origins:
        message = "server.allow_credentials does nothing without server.allowed_origins"
        yield _problem(config, "allow_credentials", message, "set server.allowed_origins")
    if settings.allow_credentials and "*" in settings.allowed_origins:
        message = "pages of any origin must not send credentials"
        yield _problem(config, "allowed_origins", message, "name the origins, or leave out server.allow_credentials")
    for origin in settings.allowed_origins:
        if origin != "*" and not _is_origin(origin):
            remedy = "write it like https://example.org, without a path, or * for any"
            yield _problem(config, "allowed_origins", f"'{origin}' is no origin", remedy)


def _is_origin(text: str) -> bool:
    parts = urlsplit(text)
    return bool(parts.scheme and parts.netloc) and f"{parts.scheme}://{parts.netloc}" == text


def _tls(config: EngineConfig) -> Iterator[Problem]:
    certificate, key = config.server.ssl_certfile, config.server.ssl_keyfile
    if certificate is None:
        if key is not None:
            message = "server.ssl_keyfile does nothing without server.ssl_certfile"
            yield _problem(config, "ssl_keyfile", message, "set server.ssl_certfile")
        return
    unreadable = {name: why for name in ("ssl_certfile", "ssl_keyfile") if (why := _unreadable(config, name))}
    for name, why in unreadable.items():
        yield _problem(config, name, f"the file cannot be read: {why}", "name a PEM file")
    if unreadable:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        message = f"certificate and key cannot be used: {error}"
        remedy = (
            "a PEM certificate with its own key, not encrypted; a key that is in the same file needs no ssl_keyfile"
        )
        yield _problem(config, "ssl_certfile", message, remedy)


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _unreadable(config: EngineConfig, name: str) -> str:
    path = config.get(f"server.{name}")
    if path is None:
        return ""
    try:
        with Path(path).open("rb"):
            return ""
    except OSError as error:
        return str(error.strerror)


def _tracing(config: EngineConfig) -> Iterator[Problem]:
    endpoint = config.server.otlp_endpoint
    if endpoint is None:
        return
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        message = "the endpoint for traces is no URL of HTTP"
        yield _problem(config, "otlp_endpoint", message, "write it like http://localhost:4318")
    if not _has_package("opentelemetry.exporter.otlp.proto.http"):
        message = "traces need packages that are not installed"
        yield _problem(config, "otlp_endpoint", message, "pip install 'jackfield[otel]'")


def _has_package(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
