"""How hidden states become vectors and scores, for the task ``pool``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """A linear layer behind the model that its vectors go through, kept in a folder of its own (the Dense module of
    sentence-transformers).

    Args:
        folder: where its weights are. inputs, outputs: sizes. bias: whether it adds one. activation: HF's name, or "".
        per_token: it comes before pooling.
    """

    folder: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = ""
    per_token: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolerConfig:
    """How a model that makes vectors was trained.

    Args:
        method: which hidden state stands for a prompt: of its first token (``cls``), of its last one (``last``), or
            their ``mean``. normalize: embeddings have length 1. labels: scores that ``classify`` gives, 0 where there
            is no such head. activation: from scores to probabilities: ``softmax``, ``sigmoid``, or "".
        token_labels: tokens whose logits may be asked for in place of labels, 0 where the model has no logits.
        size: of its embeddings, if not the model's width. projections: what vectors go through, in order.
        late_interaction: texts are compared token by token (ColBERT, arXiv:2004.12832).
    """

    method: str = "last"
    normalize: bool = True
    labels: int = 0
    activation: str = ""
    token_labels: int = 0
    size: int = 0
    projections: tuple[Projection, ...] = ()
    late_interaction: bool = False
