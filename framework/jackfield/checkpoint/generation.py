"""What a checkpoint says about generation: where to stop, and how to sample when a request does not say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jackfield.checkpoint.binary import corrupt
from jackfield.checkpoint.locate import read_json
from jackfield.errors import ConfigError
from jackfield.interfaces.facts import ModelFacts

SAMPLING_KEYS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "max_new_tokens": int,
}
"""Keys of generation_config.json that are sampling parameters, and their types."""

FILE = "generation_config.json"
_GGUF_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_GGUF_STOPS = ("eos", "eot", "eom")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults of a checkpoint.

    Args:
        eos_token_ids: ids that end a generation, in the checkpoint's order.
        bos_token_id: id that begins a text, or None.
        sampling: sampling values by the names of :data:`SAMPLING_KEYS`; only those that are given.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)


def generation_defaults(facts: ModelFacts, source: str = "auto") -> GenerationDefaults:
    """Return the defaults of a checkpoint.

    For a folder, generation_config.json outranks config.json (top level, then ``text_config``). For GGUF the end of
    text, of turn and of message all end a generation.

    Args:
        facts: what was read from it.
        source: ``auto`` for the model's own, ``none`` for ends of generation alone, without sampling values and
            generation_config.json; or the path of such a file, or of the folder that it lies in.

    Raises:
        ConfigError: there is no such file. CheckpointError: a value has an impossible type.
    """
    gguf, named = facts.container == "gguf", source not in ("auto", "none")
    base = _from_gguf(facts) if gguf else GenerationDefaults()
    file = _named(source) if named else Path(facts.path) / FILE
    own = read_json(file) if named or (source == "auto" and not gguf and file.is_file()) else {}
    nested = facts.config.get("text_config")
    layers = [own, facts.config, nested if isinstance(nested, Mapping) else {}]
    said = {key: _number(file, own, key, key) for key in SAMPLING_KEYS if own.get(key) is not None}
    return GenerationDefaults(
        eos_token_ids=next((ids for layer in layers if (ids := _ids(file, layer, "eos_token_id"))), base.eos_token_ids),
        bos_token_id=next(
            (ids[0] for layer in layers if (ids := _ids(file, layer, "bos_token_id"))), base.bos_token_id
        ),
        sampling=base.sampling if gguf and source == "auto" else said,
    )


def _named(source: str) -> Path:
    path = Path(source).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            "there is no such generation configuration",
            field="model.generation_config",
            value=source,
            remedy=f"name a file, a folder with a {FILE}, auto or none",
        )
    return file


def _from_gguf(facts: ModelFacts) -> GenerationDefaults:
    file, config = Path(facts.path), facts.config
    stops = [_ids(file, config, f"tokenizer.ggml.{name}_token_id") for name in _GGUF_STOPS]
    bos = _ids(file, config, "tokenizer.ggml.bos_token_id")
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(token for ids in stops for token in ids)),
        bos_token_id=bos[0] if bos else None,
        sampling={
            name: _number(file, config, key, name)
            for key, name in _GGUF_SAMPLING.items()
            if config.get(key) is not None
        },
    )


def _ids(file: Path, config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = config.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        corrupt(file, f"{key} must be a token id or a list of them, but is {value!r}", remedy="correct the value")
    return tuple(dict.fromkeys(ids))


def _number(file: Path, config: Mapping[str, Any], key: str, name: str) -> float:
    value = config[key]
    finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not finite or (SAMPLING_KEYS[name] is int and value != int(value)):
        corrupt(file, f"{key} must be a number, but is {value!r}", remedy="correct the value")
    return int(value) if SAMPLING_KEYS[name] is int else float(value)
