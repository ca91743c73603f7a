"""What configurations say about rotary embeddings, in the two forms that transformers has had for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jackfield.errors import CheckpointError, ConfigError, did_you_mean
from jackfield.interfaces import ConfigReader

_YARN = frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})
KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "mrope": frozenset(),
    "linear": frozenset({"factor"}),
    "ntk": frozenset({"factor", "mixed_b"}),
    "dynamic": frozenset({"factor", "alpha"}),
    "yarn": _YARN | {"factor"},
    "deepseek_yarn": _YARN | {"factor"},
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "proportional": frozenset({"factor"}),
    "factors": frozenset({"factors"}),
}
"""Keys that each kind of scaling reads."""
COMMON = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "finetuned",
        "mrope_section",
        "mrope_interleaved",
    }
)
"""Keys that any scaling object may have."""
ALIASES = {"su": "longrope"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """One rotary embedding: ``size`` features of a head turn, with base ``theta``; ``scaling`` is HF's object with
    every default filled in, or None.
    """

    size: int
    theta: float
    scaling: Mapping[str, Any] | None = None


def read_rope(hf: ConfigReader, head_size: int, *, theta: float = 10000.0, part: float = 1.0, kind: str = "") -> Rope:
    """Return the rotary embedding from ``rope_parameters`` (transformers 5), or from ``rope_theta``,
    ``partial_rotary_factor`` and ``rope_scaling``.

    Args:
        hf: the configuration. head_size: features of a head. theta, part: what the architecture has where the
            configuration is silent. kind: which of several embeddings, by type of layer (``sliding_attention``).

    Raises:
        ConfigError: the kind of scaling is unknown.
        CheckpointError: the scaling has keys that nothing reads.
    """
    parameters = hf.get("rope_parameters")
    theta = float(hf.get("rope_theta", theta))
    part = float(hf.get("partial_rotary_factor", part))
    original, longest = hf.get("original_max_position_embeddings"), hf.get("max_position_embeddings")
    if parameters is None:
        parameters = hf.get("rope_scaling") or {}
    else:
        hf.ignore("rope_scaling")
        parameters = parameters.get(kind) or {} if _nested(parameters) else parameters
    name = str(parameters.get("rope_type") or parameters.get("type") or "default")
    scaling = {**parameters, "rope_type": ALIASES.get(name, name)}
    _check_keys(scaling)
    theta, part = float(scaling.get("rope_theta") or theta), float(scaling.get("partial_rotary_factor") or part)
    if scaling["rope_type"] in ("llama3", "yarn", "deepseek_yarn", "longrope"):
        known = original or scaling.get("original_max_position_embeddings") or longest
        scaling["original_max_position_embeddings"] = known
    whole = scaling["rope_type"] == "proportional"
    size = head_size if whole else int(head_size * part)
    plain = scaling["rope_type"] == "default" and scaling.get("mrope_section") is None
    return Rope(size=size, theta=theta, scaling=None if plain else scaling)


def _nested(parameters: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in parameters.values())


def _check_keys(scaling: Mapping[str, Any]) -> None:
    kind = scaling["rope_type"]
    if kind not in KEYS:
        raise ConfigError(
            f"rotary scaling '{kind}' is not known",
            field="rope_scaling.rope_type",
            value=kind,
            remedy=did_you_mean(kind, KEYS) or f"known: {', '.join(KEYS)}",
        )
    known = KEYS[kind] | COMMON
    if kind == "dynamic" and scaling.get("alpha") is not None:
        known |= _YARN  # Hunyuan writes them all, and its own code looks at alpha alone
    left = sorted(key for key, value in scaling.items() if key not in known and value is not None)
    if left:
        raise CheckpointError(
            f"nothing reads these keys of the rotary scaling '{kind}': {', '.join(left)}",
            field="config.json: rope_scaling",
            value=left,
            remedy="use a plugin that knows these keys; running without them could compute wrong results",
        )
