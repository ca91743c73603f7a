"""ModernBERT: an encoder with rotary positions, gated MLPs, norms before them, and windows in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.bert import Encoder
from jackfield_models.decoder import PRE, windows_by_type
from jackfield_models.names import Names
from jackfield_models.rope import Rope, read_rope


class ModernBert(Encoder):
    """``ModernBertModel`` (arXiv:2412.13663): every third layer sees all, the others ``local_attention`` tokens."""

    name = "ModernBertModel"
    summary = "ModernBERT: vectors"
    kinds: ClassVar[frozenset[str]] = frozenset({"ModernBertModel"})
    names = Names(
        {
            "embed": "model.embeddings.tok_embeddings",
            "embed_norm": "model.embeddings.norm",
            "norm": "model.final_norm",
            "dense": "head.dense",
            "dense_norm": "head.norm",
            "labels": "classifier",
        },
        {
            **dict.fromkeys(("qkv.q", "qkv.k", "qkv.v"), "attn.Wqkv"),
            "o": "attn.Wo",
            **dict.fromkeys(("gate_up.gate", "gate_up.up"), "mlp.Wi"),
            "down": "mlp.Wo",
            "input_norm": "attn_norm",
            "post_norm": "mlp_norm",
        },
        "model.layers",
        ignore=(r"decoder\..*",),
        droppable="model.",
    )
    activation = ("hidden_activation", "gelu")
    eps = ("norm_eps", 1e-5)
    max_position = 8192

    @classmethod
    def around(cls, hf: ConfigReader) -> dict[str, Any]:
        """See Encoder."""
        hf.ignore("deterministic_flash_attn", "initializer_cutoff_factor", "mlp_dropout", "reference_compile")
        hf.ignore("sparse_pred_ignore_index", "sparse_prediction", "repad_logits_with_grad", "decoder_bias")
        hf.ignore("global_attn_every_n_layers", "layer_norm_eps")
        return {
            "first_norm": False,
            "label_pooling": str(hf.get("classifier_pooling", "cls")),
            "dense_activation": str(hf.get("classifier_activation", "gelu")),
            "dense_bias": bool(hf.get("classifier_bias", False)),
            "dense_norm": True,
        }

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        types = cls.types(hf, values["num_layers"])
        # So many tokens on both sides, and the token itself.
        windows = windows_by_type(types, int(hf.get("local_attention", 128)) // 2 + 1)
        return {
            "norms": PRE,
            "norm_kind": "layer",
            "norm_bias": bool(hf.get("norm_bias", False)),
            "embed_norm": True,
            **dict.fromkeys(("qkv_bias", "output_bias"), bool(hf.get("attention_bias", False))),
            "mlp_bias": bool(hf.get("mlp_bias", False)),
            "windows": windows,
            "ropes": cls.ropes(hf, values["head_size"], types),
        }

    @classmethod
    def types(cls, hf: ConfigReader, layers: int) -> list[str]:
        """Return the type of each layer."""
        step = int(hf.get("global_attn_every_n_layers", 3))
        return hf.get("layer_types") or [("sliding_attention", "full_attention")[i % step == 0] for i in range(layers)]

    @classmethod
    def ropes(cls, hf: ConfigReader, size: int, types: list[str]) -> tuple[Rope, ...]:
        """Return the rotary embedding of each layer: configurations before transformers 5 have two bases."""
        old = {
            "full_attention": float(hf.get("global_rope_theta", 160000.0)),
            "sliding_attention": float(hf.get("local_rope_theta", 10000.0)),
        }
        return tuple(read_rope(hf, size, theta=old[kind], kind=kind) for kind in types)


class ModernBertMasked(ModernBert):
    """``ModernBertForMaskedLM``: its encoder; the head over tokens is not needed."""

    name = "ModernBertForMaskedLM"
    summary = "ModernBERT: the encoder of models saved with their head over tokens"
    kinds = frozenset({"ModernBertForMaskedLM"})
    names = Names(ModernBert.names.top, ModernBert.names.layer, "model.layers", ignore=(r"(decoder|head)\..*",))


class ModernBertLabels(ModernBert):
    """``ModernBertForSequenceClassification``."""

    name = "ModernBertForSequenceClassification"
    summary = "ModernBERT: classifiers and cross-encoders"
    kinds = frozenset({"ModernBertForSequenceClassification"})
