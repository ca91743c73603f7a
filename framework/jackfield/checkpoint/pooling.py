"""What a sentence-transformers checkpoint says about pooling: modules.json and the configuration of its pooling
module (https://www.sbert.net, "Saved model format").
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackfield.checkpoint.locate import read_json, read_json_list
from jackfield.errors import CheckpointError

_METHODS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_WORDS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class PoolingDefaults:
    """How a checkpoint's embeddings are made; names as in PoolerConfig."""

    method: str
    normalize: bool


def pooling_defaults(path: str | Path) -> PoolingDefaults | None:
    """Return what modules.json in a model folder says, or None when there is none.

    Raises:
        CheckpointError: it asks for a module or a way of pooling that is not supported.
    """
    listing = Path(path) / "modules.json"
    if not listing.is_file():
        return None
    method, normalize = None, False
    for module in read_json_list(listing):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            # The name alone: a path with folders in it could lead anywhere.
            folder = Path(path) / Path(str(module.get("path"))).name
            method = _method(read_json(folder / "config.json"), str(listing))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise CheckpointError(
                f"the checkpoint has a module of type {kind}, which is not supported",
                field="modules.json",
                value=module.get("type"),
                remedy="modules that are supported: Transformer, Pooling, Normalize",
            )
    return PoolingDefaults(method or "mean", normalize)


def _method(config: Any, where: str) -> str:
    word = config.get("pooling_mode")
    active = [word] if word else [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    known = _WORDS if word else _METHODS
    if len(active) != 1 or active[0] not in known:
        raise CheckpointError(
            "the checkpoint pools in a way that is not supported",
            field="pooling_mode",
            value=active,
            remedy=f"{where}: exactly one of {', '.join(sorted(known))} is supported",
        )
    return known[active[0]]
