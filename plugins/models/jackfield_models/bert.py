"""Encoders: every token sees the whole prompt. What tells them apart is data, as with decoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.interfaces import AttentionGroup, BuildContext, ConfigReader, PoolerConfig, WeightMap
from jackfield_models.decoder import POST, Decoder, DecoderConfig, expect
from jackfield_models.labels import read_labels
from jackfield_models.names import Names, weight_map

if TYPE_CHECKING:
    from torch import nn

HEADS = (r"cls\..*", r"lm_head\..*", r"vocab_(transform|layer_norm|projector)\..*", r"qa_outputs\..*")
"""Heads over tokens, which no vector needs."""
BUFFERS = (r"(\w+\.)?embeddings\.(position_ids|token_type_ids)",)
POOLER = (r"(\w+\.)?pooler\.dense\.(weight|bias)",)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig(DecoderConfig):
    """What the encoder needs besides.

    Args:
        labels: scores of the head, or 0. label_activation: from scores to probabilities, as in PoolerConfig.
        label_pooling: what the head sees: ``cls`` or ``mean``. dense_activation: between the head's two projections.
        dense_bias: whether the first one adds a bias. dense_norm: whether a norm comes between them.
        first_norm: whether the first layer has a norm before attention. vector_size: of the vectors of tokens, where a
            projection makes them, or 0.
    """

    labels: int = 0
    label_activation: str = ""
    label_pooling: str = "cls"
    dense_activation: str = "tanh"
    dense_bias: bool = True
    dense_norm: bool = False
    first_norm: bool = True
    vector_size: int = 0

    def modules(self) -> frozenset[str]:
        """See DecoderConfig."""
        there = {
            "types": bool(self.token_types),
            "dense": bool(self.labels),
            "dense_norm": bool(self.labels) and self.dense_norm,
            "labels": bool(self.labels),
            "project": bool(self.vector_size),
        }
        return DecoderConfig.modules(self) | {name for name, is_there in there.items() if is_there}

    def of_layer(self, index: int) -> EncoderConfig:
        """Return the configuration of one layer."""
        return self if index or self.first_norm else replace(self, norms=self.norms - {"input_norm"})


class Encoder(Decoder):
    """Base of the encoders. A subclass whose name ends with ``ForSequenceClassification`` has labels."""

    features: ClassVar[frozenset[str]] = frozenset()
    tasks: ClassVar[frozenset[str]] = frozenset({"pool"})
    tied = True
    max_position = 512

    @classmethod
    def config(cls, hf: ConfigReader) -> EncoderConfig:
        """See ModelArchitecture."""
        hf.ignore("position_embedding_type")
        expect(hf, position_embedding_type="absolute", is_decoder=False)
        base = super().config(hf)
        values = {part.name: getattr(base, part.name) for part in fields(base)}
        return EncoderConfig(**{**values, "tie_embeddings": True, **cls.around(hf), **cls.head(hf)})

    @classmethod
    def around(cls, hf: ConfigReader) -> dict[str, Any]:
        """Return what an encoder has that decoders do not."""
        return {"token_types": int(hf.get("type_vocab_size", 2))}

    @classmethod
    def head(cls, hf: ConfigReader) -> dict[str, Any]:
        """Return the head's part of the configuration."""
        labels, activation = read_labels(hf)
        if not cls.name.endswith("ForSequenceClassification"):
            return {}
        return {"labels": labels, "label_activation": activation}

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder: sums go through norms, and positions are learned."""
        return {
            "order": "sum",
            "gated": False,
            "norms": POST,
            "norm_kind": "layer",
            "final_norm": False,
            "embed_norm": True,
            **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True),
            "positions": values["max_position"],
            "ropes": (None,) * values["num_layers"],
        }

    @classmethod
    def attention_groups(cls, config: DecoderConfig) -> tuple[AttentionGroup, ...]:
        """See ModelArchitecture."""
        return tuple(replace(group, kind="encoder") for group in super().attention_groups(config))

    @classmethod
    def pooler(cls, config: DecoderConfig) -> PoolerConfig:
        """See ModelArchitecture: a checkpoint of sentence-transformers says how vectors are made."""
        assert isinstance(config, EncoderConfig)
        method = config.label_pooling if config.labels else "mean"
        return PoolerConfig(method=method, normalize=False, labels=config.labels, activation=config.label_activation)

    @classmethod
    def weight_map(cls, config: DecoderConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        found = weight_map(cls.names, config, paired=False)
        unused = () if "dense" in config.modules() else POOLER
        return replace(found, ignore=(*found.ignore, *HEADS, *BUFFERS, *unused))

    @classmethod
    def build(cls, config: DecoderConfig, ctx: BuildContext) -> nn.Module:
        """See ModelArchitecture."""
        from jackfield_models.bert_model import EncoderModel

        assert isinstance(config, EncoderConfig)
        return EncoderModel(config, cls.attention_groups(config), ctx)


BERT_LAYER = {
    "qkv.q": "attention.self.query",
    "qkv.k": "attention.self.key",
    "qkv.v": "attention.self.value",
    "o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
BERT_TOP = {
    "embed": "bert.embeddings.word_embeddings",
    "positions": "bert.embeddings.position_embeddings",
    "types": "bert.embeddings.token_type_embeddings",
    "embed_norm": "bert.embeddings.LayerNorm",
    "dense": "bert.pooler.dense",
    "labels": "classifier",
}


class Bert(Encoder):
    """``BertModel`` and its like: BERT (arXiv:1810.04805), MiniLM, E5, BGE, GTE of the first kind."""

    name = "BertModel"
    summary = "BERT, MiniLM, E5, BGE: vectors"
    kinds: ClassVar[frozenset[str]] = frozenset({"BertModel"})
    names = Names(BERT_TOP, BERT_LAYER, "bert.encoder.layer", ignore=(), droppable="bert.")
    eps = ("layer_norm_eps", 1e-12)
    activation = ("hidden_act", "gelu")


class BertMasked(Bert):
    """``BertForMaskedLM``: its encoder."""

    name = "BertForMaskedLM"
    summary = "BERT: the encoder of models saved with their head over tokens"
    kinds = frozenset({"BertForMaskedLM"})


class BertLabels(Bert):
    """``BertForSequenceClassification``: the state of the first token goes through BERT's pooler."""

    name = "BertForSequenceClassification"
    summary = "BERT: classifiers and cross-encoders"
    kinds = frozenset({"BertForSequenceClassification"})


class ColBert(Bert):
    """``HF_ColBERT``: BERT whose tokens' hidden states go through one projection (ColBERT, arXiv:2004.12832)."""

    name = "HF_ColBERT"
    summary = "ColBERT: texts are compared token by token"
    kinds = frozenset({"HF_ColBERT"})
    names = Names({**BERT_TOP, "project": "linear"}, BERT_LAYER, "bert.encoder.layer", ignore=(), droppable="bert.")

    @classmethod
    def around(cls, hf: ConfigReader) -> dict[str, Any]:
        """See Encoder."""
        return {**super().around(hf), "vector_size": int(hf.get("dim", 128))}

    @classmethod
    def pooler(cls, config: DecoderConfig) -> PoolerConfig:
        """See ModelArchitecture."""
        assert isinstance(config, EncoderConfig)
        return PoolerConfig(method="cls", size=config.vector_size, late_interaction=True)


class Roberta(Bert):
    """``RobertaModel``: positions begin behind that of padding (arXiv:1907.11692)."""

    name = "RobertaModel"
    summary = "RoBERTa: vectors"
    kinds = frozenset({"RobertaModel"})
    names = Names(
        {name: source.replace("bert.", "roberta.") for name, source in BERT_TOP.items()}
        | {"dense": "classifier.dense", "labels": "classifier.out_proj"},
        BERT_LAYER,
        "roberta.encoder.layer",
        ignore=POOLER,
        droppable="roberta.",
    )

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        first = int(hf.get("pad_token_id", 1)) + 1
        found = super().details(hf, values)
        return {**found, "position_offset": first, "max_position": values["max_position"] - first}


class RobertaLabels(Roberta):
    """``RobertaForSequenceClassification``."""

    name = "RobertaForSequenceClassification"
    summary = "RoBERTa: classifiers and cross-encoders"
    kinds = frozenset({"RobertaForSequenceClassification"})


class XlmRoberta(Roberta):
    """``XLMRobertaModel``: RoBERTa for many languages (arXiv:1911.02116)."""

    name = "XLMRobertaModel"
    summary = "XLM-RoBERTa, BGE-M3, multilingual E5: vectors"
    kinds = frozenset({"XLMRobertaModel"})


class XlmRobertaLabels(XlmRoberta):
    """``XLMRobertaForSequenceClassification``."""

    name = "XLMRobertaForSequenceClassification"
    summary = "XLM-RoBERTa: classifiers, BGE rerankers"
    kinds = frozenset({"XLMRobertaForSequenceClassification"})


class DistilBert(Encoder):
    """``DistilBertModel``: BERT with half the layers and no token types (arXiv:1910.01108)."""

    name = "DistilBertModel"
    summary = "DistilBERT: vectors"
    kinds: ClassVar[frozenset[str]] = frozenset({"DistilBertModel"})
    names = Names(
        {
            "embed": "distilbert.embeddings.word_embeddings",
            "positions": "distilbert.embeddings.position_embeddings",
            "embed_norm": "distilbert.embeddings.LayerNorm",
            "dense": "pre_classifier",
            "labels": "classifier",
        },
        {
            "qkv.q": "attention.q_lin",
            "qkv.k": "attention.k_lin",
            "qkv.v": "attention.v_lin",
            "o": "attention.out_lin",
            "attention_norm": "sa_layer_norm",
            "up": "ffn.lin1",
            "down": "ffn.lin2",
            "mlp_norm": "output_layer_norm",
        },
        "distilbert.transformer.layer",
        ignore=(),
        droppable="distilbert.",
    )
    keys: ClassVar[Mapping[str, str]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
    }
    activation = ("activation", "gelu")
    eps = ("layer_norm_eps", 1e-12)

    @classmethod
    def around(cls, hf: ConfigReader) -> dict[str, Any]:
        """See Encoder: how the table of positions was first filled does not matter."""
        hf.ignore("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_", "output_past")
        return {"dense_activation": "relu"}


class DistilBertLabels(DistilBert):
    """``DistilBertForSequenceClassification``."""

    name = "DistilBertForSequenceClassification"
    summary = "DistilBERT: classifiers"
    kinds = frozenset({"DistilBertForSequenceClassification"})
