"""What a checkpoint says about generation: where to stop, and how to sample when a request does not say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jackfield.checkpoint.binary import corrupt
from jackfield.checkpoint.locate import read_json
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


def generation_defaults(facts: ModelFacts, path: str | Path | None = None) -> GenerationDefaults:
    """Return the defaults of a checkpoint.

    For a folder, generation_config.json outranks config.json (top level, then ``text_config``). For GGUF the end of
    text, of turn and of message all end a generation.

    Args:
        facts: what was read from it.
        path: where generation_config.json is looked for; ``facts.path`` by default.

    Raises:
        CheckpointError: a value has an impossible type.
    """
    if facts.container == "gguf":
        return _from_gguf(facts)
    file = Path(path or facts.path) / "generation_config.json"
    own = read_json(file) if file.is_file() else {}
    nested = facts.config.get("text_config")
    layers = [own, facts.config, nested if isinstance(nested, Mapping) else {}]
    return GenerationDefaults(
        eos_token_ids=next((ids for layer in layers if (ids := _ids(file, layer, "eos_token_id"))), ()),
        bos_token_id=next((ids[0] for layer in layers if (ids := _ids(file, layer, "bos_token_id"))), None),
        sampling={key: _number(file, own, key, key) for key in SAMPLING_KEYS if own.get(key) is not None},
    )


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
