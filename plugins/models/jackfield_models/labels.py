"""Decoders with a head over labels in place of the one over tokens: classifiers, rerankers and reward models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jackfield.errors import CheckpointError
from jackfield.interfaces import ConfigReader, WeightMap, WeightRule
from jackfield_models.decoder import Decoder, DecoderConfig, Scores
from jackfield_models.gemma import Gemma, Gemma2
from jackfield_models.gpt import Gpt2
from jackfield_models.llama import Llama, Mistral, Qwen2, Qwen3
from jackfield_models.moe_decoder import Mixtral, Qwen2Moe, Qwen3Moe
from jackfield_models.relatives import InternLm2, Phi3, SmolLm3

TASK_ACTIVATIONS = {
    "regression": "",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
"""What HF's ``problem_type`` makes of scores."""
MODULE_ACTIVATIONS = {"Identity": "", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""Torch modules that sentence-transformers may name."""


class Scoring(Decoder):
    """What these have in common. The last token of a prompt stands for all of it."""

    features: ClassVar[frozenset[str]] = frozenset()
    tasks: ClassVar[frozenset[str]] = frozenset({"pool"})
    gguf_architectures: ClassVar[frozenset[str]] = frozenset()
    sources: ClassVar[tuple[str, ...]] = ("score",)
    """Projections of the head in the checkpoint."""
    biased: ClassVar[bool] = False
    labels: ClassVar[int] = 2
    """How many labels there are where the configuration is silent."""
    raw: ClassVar[bool] = False
    """Whether scores are what is wanted, and not probabilities."""

    @classmethod
    def config(cls, hf: ConfigReader) -> DecoderConfig:
        """See ModelArchitecture. There is no head over tokens, so none is looked for."""
        labels, activation = read_labels(hf, cls.labels)
        scores = Scores(labels=labels, activation="" if cls.raw else activation, sources=cls.sources, bias=cls.biased)
        return replace(super().config(hf), tie_embeddings=True, scores=scores)

    @classmethod
    def weight_map(cls, config: DecoderConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        found = super().weight_map(config, container)
        rules = tuple(WeightRule(source, f"scores.{i}") for i, source in enumerate(cls.sources))
        return replace(found, rules=found.rules + rules)


def scoring(base: type[Decoder], name: str, **changes: Any) -> type[Decoder]:
    """Return the architecture ``name``: ``base`` with a head over labels. It must be kept under this very name, by
    which other processes find it.
    """
    own = {"name": name, "kinds": frozenset({name}), "__module__": __name__, **changes}
    own.setdefault("summary", f"{base.name.removesuffix('ForCausalLM')}: classifiers and rerankers")
    own.setdefault("__doc__", f"``{name}``.")
    return type(name, (Scoring, base), own)


LlamaForSequenceClassification = scoring(Llama, "LlamaForSequenceClassification")
MistralForSequenceClassification = scoring(Mistral, "MistralForSequenceClassification")
MixtralForSequenceClassification = scoring(Mixtral, "MixtralForSequenceClassification")
Qwen2ForSequenceClassification = scoring(Qwen2, "Qwen2ForSequenceClassification")
Qwen2MoeForSequenceClassification = scoring(Qwen2Moe, "Qwen2MoeForSequenceClassification")
Qwen3ForSequenceClassification = scoring(Qwen3, "Qwen3ForSequenceClassification")
Qwen3MoeForSequenceClassification = scoring(Qwen3Moe, "Qwen3MoeForSequenceClassification")
GemmaForSequenceClassification = scoring(Gemma, "GemmaForSequenceClassification")
Gemma2ForSequenceClassification = scoring(Gemma2, "Gemma2ForSequenceClassification")
Phi3ForSequenceClassification = scoring(Phi3, "Phi3ForSequenceClassification")
SmolLM3ForSequenceClassification = scoring(SmolLm3, "SmolLM3ForSequenceClassification")
GPT2ForSequenceClassification = scoring(Gpt2, "GPT2ForSequenceClassification")
DEEP = ("score.0", "score.2")
Qwen2ForRewardModel = scoring(
    Qwen2,
    "Qwen2ForRewardModel",
    summary="Qwen 2.5 reward models: one score of a whole answer",
    sources=DEEP,
    biased=True,
    labels=1,
    raw=True,
)
Qwen2ForProcessRewardModel = scoring(
    Qwen2,
    "Qwen2ForProcessRewardModel",
    summary="Qwen 2.5 process reward models: scores of each step of an answer",
    sources=DEEP,
    biased=True,
)
InternLM2ForRewardModel = scoring(
    InternLm2,
    "InternLM2ForRewardModel",
    summary="InternLM 2 reward models: one score of a whole answer",
    sources=("v_head",),
    labels=1,
    raw=True,
)


def read_labels(hf: ConfigReader, default: int = 2) -> tuple[int, str]:
    """Return how many labels there are, ``default`` where the configuration is silent, and what makes probabilities of
    their scores.
    """
    own = hf.section("sentence_transformers")
    word = hf.get("sbert_ce_default_activation_function")
    if own is not None:
        own.ignore("version")
        word = own.get("activation_fn") or word
    named, said = hf.get("id2label"), int(hf.get("num_labels", default))
    labels = len(named) if named else said
    return labels, activation_of(word, hf.get("problem_type"), labels)


def activation_of(module: Any, task: Any, labels: int) -> str:
    """Return what makes probabilities of scores.

    Args:
        module: path of a torch module, as sentence-transformers writes it, or None. task: HF's ``problem_type``, or
            None. labels: how many; without either word one score becomes a probability by itself, and several together.

    Raises:
        CheckpointError: one of the words is not known.
    """
    known, word, key = TASK_ACTIVATIONS, task, "problem_type"
    if module is not None:
        known, word, key = MODULE_ACTIVATIONS, str(module).rpartition(".")[2], "sentence_transformers.activation_fn"
    if word is None:
        return "sigmoid" if labels == 1 else "softmax"
    if word not in known:
        raise CheckpointError(
            f"'{word}' does not say how scores become probabilities",
            field=f"config.json: {key}",
            value=module or task,
            remedy=f"known: {', '.join(known)}",
        )
    return known[word]
