"""What a sentence-transformers checkpoint says about pooling: modules.json and the configurations of its pooling
and dense modules (https://www.sbert.net, "Saved model format").
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackfield.checkpoint.locate import read_json, read_json_list
from jackfield.errors import CheckpointError
from jackfield.interfaces.pooling import Projection

_METHODS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_WORDS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


_ACTIVATIONS = {
    "": "",
    "Identity": "",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
"""Torch's modules that a dense module may name, and HF's names of what they do."""


@dataclass(frozen=True, slots=True)
class PoolingDefaults:
    """How a checkpoint's embeddings are made; names as in PoolerConfig. A ``method`` of None: vectors are not pooled,
    and texts are compared token by token.
    """

    method: str | None
    normalize: bool
    projections: tuple[Projection, ...] = ()


def pooling_defaults(path: str | Path) -> PoolingDefaults | None:
    """Return what modules.json in a model folder says, or None when there is none.

    Raises:
        CheckpointError: it asks for a module or a way of pooling that is not supported.
    """
    listing = Path(path) / "modules.json"
    if not listing.is_file():
        return None
    method, normalize, dense = None, False, []
    for module in read_json_list(listing):
        kind = str(module.get("type")).rpartition(".")[2]
        # The name alone: a path with folders in it could lead anywhere.
        folder = Path(path) / Path(str(module.get("path"))).name
        if kind == "Dense":
            dense.append(_dense(folder, per_token=method is None))
        elif kind == "Pooling":
            method = _method(read_json(folder / "config.json"), str(listing))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise CheckpointError(
                f"the checkpoint has a module of type {kind}, which is not supported",
                field="modules.json",
                value=module.get("type"),
                remedy="modules that are supported: Transformer, Pooling, Dense, Normalize",
            )
    by_token = method is None and bool(dense)
    return PoolingDefaults(None if by_token else method or "mean", normalize or by_token, tuple(dense))


def _dense(folder: Path, *, per_token: bool) -> Projection:
    """Return a dense module; that of a model that compares tokens stands before any pooling and adds no residual."""
    config = read_json(folder / "config.json")
    word = str(config.get("activation_function") or "").rpartition(".")[2]
    sizes = [config.get(key) for key in ("in_features", "out_features")]
    if word not in _ACTIVATIONS or config.get("use_residual") or not all(type(size) is int for size in sizes):
        raise CheckpointError(
            "the checkpoint has a dense module of a kind that is not supported",
            field="modules.json",
            value=config,
            remedy=f"supported: in_features, out_features, and activations {', '.join(filter(None, _ACTIVATIONS))}",
        )
    inputs, outputs = (int(size) for size in sizes if size is not None)
    return Projection(
        folder=str(folder),
        inputs=inputs,
        outputs=outputs,
        bias=bool(config.get("bias", True)),
        activation=_ACTIVATIONS[word],
        per_token=per_token,
    )


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
