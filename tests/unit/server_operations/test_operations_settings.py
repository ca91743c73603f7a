"""Settings that cannot be served, and addresses that cannot be used: told before a model is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from certificate import make_certificate

from jackfield.config import EngineConfig, ServerSection, load_config
from jackfield.errors import ConfigError
from jackfield.server.operations.run import serve
from jackfield.server.operations.settings import check_settings
from jackfield.server.operations.sockets import address_text, bound_socket


def config(**server: Any) -> EngineConfig:
    return load_config(env={}, api={"model": "absent", "server": server})


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"uds": "/x", "port": 1}, "port", "server.port does nothing beside server.uds"),
        ({"uds": "/x", "host": "::1"}, "host", "server.host does nothing beside server.uds"),
        (
            {"allow_credentials": True},
            "allow_credentials",
            "server.allow_credentials does nothing without server.allowed_origins",
        ),
        (
            {"allow_credentials": True, "allowed_origins": ("*",)},
            "allowed_origins",
            "pages of any origin must not send credentials",
        ),
        ({"allowed_origins": ("example.org",)}, "allowed_origins", "'example.org' is no origin"),
        ({"allowed_origins": ("https://a.org/",)}, "allowed_origins", "'https://a.org/' is no origin"),
        ({"ssl_keyfile": "k"}, "ssl_keyfile", "server.ssl_keyfile does nothing without server.ssl_certfile"),
        (
            {"ssl_certfile": "/absent"},
            "ssl_certfile",
            "the file cannot be read: No such file or directory",
        ),
        ({"otlp_endpoint": "localhost:4318"}, "otlp_endpoint", "the endpoint for traces is no URL of HTTP"),
    ],
)
def test_settings_that_cannot_be_served(settings: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(config(**settings))
    assert caught.value.field == f"server.{field}"
    assert caught.value.message.partition(" (")[0] == message
    assert caught.value.remedy


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"3 settings are wrong(.|\n)*uds(.|\n)*origins(.|\n)*ssl_certfile"):
        check_settings(config(uds="/x", port=1, allow_credentials=True, ssl_keyfile="k"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"uds": "/x"},
        {"allowed_origins": ("https://example.org", "http://localhost:3000"), "allow_credentials": True},
        {"allowed_origins": ("*",)},
        {"otlp_endpoint": "http://localhost:4318"},
    ],
)
def test_settings_that_are_fine(settings: dict[str, Any]) -> None:
    check_settings(config(**settings))


def test_certificates(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    check_settings(config(ssl_certfile=str(certificate), ssl_keyfile=str(key)))
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    check_settings(config(ssl_certfile=str(both)))


@pytest.mark.parametrize("fault", ["no key", "other key", "no certificate", "encrypted key"])
def test_certificates_that_do_not_work(tmp_path: Path, fault: str) -> None:
    certificate, key = make_certificate(tmp_path)
    if fault == "no key":
        key = certificate
    elif fault == "other key":
        (tmp_path / "other").mkdir()
        key = make_certificate(tmp_path / "other")[1]
    elif fault == "no certificate":
        certificate.write_text("text")
    else:
        locked = tmp_path / "locked.pem"
        command = ["openssl", "ec", "-aes256", "-passout", "pass:word", "-in", str(key), "-out", str(locked)]
        subprocess.run(command, check=True, capture_output=True)
        key = locked
    with pytest.raises(ConfigError, match="certificate and key cannot be used: ") as caught:
        check_settings(config(ssl_certfile=str(certificate), ssl_keyfile=str(key)))
    assert caught.value.field == "server.ssl_certfile"


def test_a_socket_is_bound_and_does_not_listen_yet() -> None:
    settings = ServerSection(port=0)
    with bound_socket(settings) as sock:
        host, port = sock.getsockname()
        assert address_text(sock, settings) == f"http://{host}:{port}"
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect((host, port))
    assert sock.fileno() == -1


def test_the_address_of_a_server_with_tls_or_with_six_groups() -> None:
    with bound_socket(ServerSection(port=0)) as sock:
        port = sock.getsockname()[1]
        assert address_text(sock, ServerSection(ssl_certfile="x")) == f"https://127.0.0.1:{port}"
    with bound_socket(ServerSection(host="::1", port=0)) as sock:
        assert address_text(sock, ServerSection()) == f"http://[::1]:{sock.getsockname()[1]}"


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"host": "192.0.2.77"}, "server.host", "this machine has no such address"),
        ({"host": "no such host"}, "server.host", "the address to listen on is unknown"),
        ({"host": ".." * 40}, "server.host", "the address to listen on is unknown"),
    ],
)
def test_addresses_that_do_not_exist(settings: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught, bound_socket(ServerSection(port=0, **settings)):
        pass
    assert caught.value.field == field


def test_a_port_that_is_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError) as caught, bound_socket(ServerSection(port=port)):
            pass
    assert caught.value.message == f"cannot listen on 127.0.0.1:{port}: something else listens there"
    assert (caught.value.field, caught.value.value) == ("server.port", port)


def test_a_unix_socket_goes_when_the_server_goes(tmp_path: Path) -> None:
    path = tmp_path / "s"
    settings = ServerSection(uds=str(path))
    with bound_socket(settings) as sock:
        assert path.is_socket()
        assert address_text(sock, settings) == f"unix:{path}"
    assert not path.exists()


def test_what_a_dead_server_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with bound_socket(ServerSection(uds=str(path))):
        assert path.is_socket()


def test_a_unix_socket_that_another_server_took_over_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        with bound_socket(ServerSection(uds=str(path))):
            os.rename(path, tmp_path / "gone")
            other.bind(str(path))
        assert path.is_socket()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("file", "a file that is no socket is there"),
        ("living", "something else listens there"),
        ("no folder", "No such file or directory"),
    ],
)
def test_unix_sockets_that_cannot_be_used(tmp_path: Path, kind: str, message: str) -> None:
    path = tmp_path / ("absent/s" if kind == "no folder" else "s")
    with socket.socket(socket.AF_UNIX) as other:
        if kind == "file":
            path.write_text("mine")
        elif kind == "living":
            other.bind(str(path))
            other.listen()
        with pytest.raises(ConfigError) as caught, bound_socket(ServerSection(uds=str(path))):
            pass
    assert (caught.value.message, caught.value.field) == (f"cannot listen on the Unix socket: {message}", "server.uds")
    assert path.exists() == (kind != "no folder")


@pytest.mark.parametrize(
    "settings", [{"ssl_certfile": "/absent"}, {"api_key_file": "/absent"}, {"uds": "/absent/s"}, {"host": "192.0.2.77"}]
)
def test_serve_refuses_before_it_looks_for_the_model(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(config(**settings))
    assert caught.value.field == f"server.{next(iter(settings))}"
