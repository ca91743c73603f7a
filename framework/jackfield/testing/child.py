"""What a fresh process says about a plugin: it has no environment, was not forked, and imports nothing beforehand."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

HEAVY = (
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "numba", "triton"),
    *("pytest", "hypothesis"),
)
"""Modules that choosing among plugins must not import."""
SECONDS = 120
"""How long the process may take."""

_SCRIPT = """
import json, logging, os, sys, warnings
path, manifest, watched = json.load(sys.stdin)
sys.path[:] = path
from jackfield.registry import Manifest, Registry
def state():
    return dict(os.environ), list(logging.root.handlers), logging.root.level, os.getcwd(), list(sys.path)
before = state()
first, second = (Registry.from_manifest(manifest) for _ in range(2))
refs = first.refs()
print(json.dumps({
    "heavy": [name for name in watched if name in sys.modules],
    "once": all(a.load_object() is b.load_object() for a, b in zip(refs, second.refs())),
    "digest": Manifest.of(refs).digest,
    "changed": [i for i, (a, b) in enumerate(zip(before, state())) if a != b],
}))
"""


@dataclass(frozen=True, slots=True)
class Told:
    """What the process saw.

    Args:
        error: what it said when it failed, or ``""``. heavy: watched modules that loading imported. once: whether two
            registries have the same objects. digest: of the manifest that it made. changed: whether loading changed
            the environment, logging, the working folder or the search path.
    """

    error: str
    heavy: tuple[str, ...] = ()
    once: bool = False
    digest: str = ""
    changed: bool = False


@cache
def ask(manifest: str, watched: tuple[str, ...]) -> Told:
    """Load the plugins of a manifest (JSON) in a fresh process, twice, and return what it says."""
    message = json.dumps([sys.path, json.loads(manifest), watched])
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=message,
        env={},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        return Told(done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Told("", tuple(said["heavy"]), said["once"], said["digest"], bool(said["changed"]))
