"""The page as one HTML document, put together from the files in ``static``, and the headers that go with it."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

FRAME = "page.html"
STYLES = ("base.css", "playground.css", "live.css")
SCRIPTS = (
    "dom.js",
    "api.js",
    "settings.js",
    "tokens.js",
    "answer.js",
    "playground.js",
    "metrics.js",
    "chart.js",
    "live.js",
    "decisions.js",
    "main.js",
)
"""In the order in which they become one script: a module, so that nothing of it is global."""
_STYLE, _SCRIPT = "/* styles */", "/* scripts */"
"""Where :data:`FRAME` takes them."""


@dataclass(frozen=True, slots=True)
class Document:
    """The page.

    Args:
        body: UTF-8. headers: of the answer that carries it.
    """

    body: bytes
    headers: dict[str, str]

    @property
    def etag(self) -> str:
        """Changes with the page."""
        return self.headers["etag"]


@cache
def document() -> Document:
    """Return the page; the files are read once."""
    style, script = _joined(STYLES), _joined(SCRIPTS)
    body = read_static(FRAME).replace(_STYLE, style).replace(_SCRIPT, script).encode()
    headers = {
        "content-security-policy": _policy(style, script),
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Document(body, headers)


def read_static(name: str) -> str:
    """Return the text of a file in ``static``."""
    return (resources.files(__package__) / "static" / name).read_text(encoding="utf-8")


def _joined(names: tuple[str, ...]) -> str:
    return "\n".join(["", *(read_static(name) for name in names)])


def _policy(style: str, script: str) -> str:
    """Return a policy by which the browser runs this script, applies this style sheet, talks to this server, and does
    nothing else; nor may the script turn text into HTML.
    """
    rules = (
        "default-src 'none'",
        f"script-src '{_digest(script)}'",
        f"style-src '{_digest(style)}'",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return "; ".join(rules)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
