"""PoolingParams: what one request wants of a model that makes vectors instead of text."""

from __future__ import annotations

from typing import Literal

import msgspec

from jackfield.errors import RequestError

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
POOLING_TASKS: tuple[PoolingTask, ...] = ("embed", "classify", "token_embed", "token_classify")
POOLING_METHODS = ("cls", "last", "mean")


class PoolingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to make of the final hidden states of a prompt.

    Args:
        task: ``embed``: one vector. ``classify``: one score for each label. ``token_embed``, ``token_classify``: the
            same for every token.
        method: which hidden state stands for the prompt: of the first token (``cls``), of the last one (``last``), or
            their mean; None: as the model was trained. Of no meaning for token tasks.
        dimensions: keep this many leading numbers of an embedding (Matryoshka, arXiv:2205.13147), before it is
            normalized; None: all.
        normalize: scale embeddings to length 1; None: as the model was trained.
        activation: turn scores of labels into probabilities.
        step_tag_id: for ``token_classify``: only of tokens with this id, which end the steps of a text whose steps are
            judged one by one (process reward models).
        returned_token_ids: for labels: only these, in this order, and probabilities among them alone. For a model that
            generates they are tokens of its vocabulary, whose logits stand for labels.

    Raises:
        RequestError: a value is out of range.
    """

    task: PoolingTask = "embed"
    method: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool = True
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        if self.task not in POOLING_TASKS:
            raise _wrong("task", self.task, f"one of {', '.join(POOLING_TASKS)}")
        if self.method is not None and (self.method not in POOLING_METHODS or self.per_token):
            rule = "unset for tasks on tokens" if self.per_token else f"one of {', '.join(POOLING_METHODS)}"
            raise _wrong("method", self.method, rule)
        whole = isinstance(self.dimensions, int) and not isinstance(self.dimensions, bool)
        if self.dimensions is not None and not (whole and self.dimensions >= 1 and self.makes_embeddings):
            raise _wrong("dimensions", self.dimensions, "a whole number from 1 on, and set for embeddings only")
        if self.normalize and not self.makes_embeddings:
            raise _wrong("normalize", self.normalize, "unset where labels are scored")
        self._check_labels()

    def _check_labels(self) -> None:
        step, ids = self.step_tag_id, self.returned_token_ids
        if step is not None and not (_is_id(step) and self.task == "token_classify"):
            raise _wrong("step_tag_id", step, "a token id, and set for token_classify only")
        if ids is None:
            return
        listed = isinstance(ids, list) and ids and all(_is_id(one) for one in ids)
        if not listed or len(set(ids)) < len(ids) or self.makes_embeddings:
            raise _wrong("returned_token_ids", ids, "a list of different ids, and set where labels are scored")

    @property
    def per_token(self) -> bool:
        """Whether every token gets a result."""
        return self.task.startswith("token_")

    @property
    def makes_embeddings(self) -> bool:
        """Whether the result is hidden states, and not scores of labels."""
        return self.task.endswith("embed")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _wrong(field: str, value: object, rule: str) -> RequestError:
    return RequestError(
        f"{field} must be {rule}",
        field=f"pooling_params.{field}",
        value=value,
        remedy=f"set {field} to a value that is {rule}",
    )
