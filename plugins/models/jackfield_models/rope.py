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
        "use_fope",
        "fope_sep_head",
        "fope_num_inv_freq",
        "num_inv_freq",
        "fope_init_factor",
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

    @property
    def fourier(self) -> bool:
        """Whether it is a Fourier position embedding, which has weights."""
        return self.scaling is not None and bool(self.scaling.get("use_fope"))


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
    scaling |= fourier_keys(scaling, whole_head=size == head_size)
    plain = scaling["rope_type"] == "default" and scaling.get("mrope_section") is None and not scaling["use_fope"]
    return Rope(size=size, theta=theta, scaling=None if plain else scaling)


def fourier_keys(scaling: Mapping[str, Any], *, whole_head: bool) -> dict[str, Any]:
    """Return the keys of a Fourier position embedding (FoPE, arXiv:2412.17739) under one name each, or ``use_fope`` as
    False. Any of its keys says that it is one, as in the models that have it.

    Raises:
        ConfigError: it is not said whether heads have coefficients of their own, or it comes with what cannot be
            combined with it.
    """
    count = scaling.get("fope_num_inv_freq") or scaling.get("num_inv_freq")
    said = (scaling.get("fope_init_factor"), scaling.get("fope_sep_head"), count)
    wanted = scaling.get("use_fope")
    if not (any(value is not None for value in said) if wanted is None else wanted):
        return {"use_fope": False}
    other = "mrope_section" if scaling.get("mrope_section") else "" if whole_head else "partial_rotary_factor"
    if other or scaling.get("fope_sep_head") is None:
        raise ConfigError(
            f"a Fourier position embedding cannot have {other}" if other else "fope_sep_head is absent",
            field=f"rope_scaling.{other or 'fope_sep_head'}",
            value=scaling.get(other or "fope_sep_head"),
            remedy="correct the model's configuration",
        )
    return {"use_fope": True, "fope_sep_head": bool(scaling["fope_sep_head"]), "num_inv_freq": count}


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
