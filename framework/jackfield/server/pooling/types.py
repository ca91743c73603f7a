"""Requests and answers of the routes that make vectors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jackfield.protocol.pooling_params import PoolingTask
from jackfield.server.extra import Refused
from jackfield.server.openai.answers import Answer
from jackfield.server.openai.types import RequestModel
from jackfield.server.openai.values import MAX_PROMPTS, Positive, Prompts, one_of

Document = str | dict[str, Any]
Texts = Annotated[
    str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)],
    one_of(f"a text or a list of 1 to {MAX_PROMPTS} texts"),
]
Documents = Annotated[
    list[Document],
    Field(min_length=1, max_length=MAX_PROMPTS),
    one_of(f"a list of 1 to {MAX_PROMPTS} texts, or of objects with a text"),
]

_ADD_IT = "texts are embedded as they are; write what the model expects before them"
REFUSED: Refused = {
    "messages": ("conversations are not embedded; send input", ()),
    "input_type": (_ADD_IT, ()),
    "prompt_name": (_ADD_IT, ()),
    "instruction": (_ADD_IT, ("",)),
    "late_chunking": ("texts are embedded one by one", (False,)),
    "embedding_types": ("embeddings are numbers; see encoding_format", (["float"],)),
    "rank_fields": ("documents are ranked by their text", (["text"],)),
    "mm_processor_kwargs": ("the model takes text only", ()),
}
"""Fields that clients of such servers know and that would change the answer."""


class PooledFields(RequestModel):
    """What all of these routes share."""

    model: str | None = None
    """Name of the model; the server's own when not given."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Keep this many tokens of each text, the first ones, and those that the tokenizer puts around it; -1 keeps what
    fits.
    """
    add_special_tokens: bool = True
    """Add the tokens that begin and end a text."""
    priority: int | None = None
    """Smaller runs earlier; needs a scheduling policy that reads it."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Share cached prefixes only with requests of the same salt."""
    user: str | None = None
    """No effect on the answer."""


class EmbeddingRequest(PooledFields):
    """A request for embeddings."""

    input: Prompts
    """Texts or token ids."""
    encoding_format: Literal["float", "base64"] = "float"
    """`base64` of little-endian 32-bit floats."""
    dimensions: Positive | None = None
    """Keep this many leading numbers, before an embedding is normalized."""
    normalize: bool | None = None
    """Scale embeddings to length 1; as the model was trained when not given."""


class PoolingRequest(EmbeddingRequest):
    """A request for what a model makes of its hidden states."""

    task: PoolingTask = "embed"
    """`embed`, `classify`, or the same for every token: `token_embed`, `token_classify`."""
    activation: bool = True
    """Turn scores of labels into probabilities."""
    step_tag_id: int | None = None
    """For `token_classify`: only of tokens with this id."""
    returned_token_ids: list[int] | None = None
    """Only these labels, or these tokens of a model that generates."""


class ClassifyRequest(PooledFields):
    """A request for labels."""

    input: Prompts
    """Texts or token ids."""
    activation: bool = True
    """Turn scores into probabilities."""
    returned_token_ids: list[int] | None = None
    """Only these labels, or these tokens of a model that generates."""


class ScoreRequest(PooledFields):
    """A request for how alike texts are, pair by pair."""

    text_1: Texts | None = None
    """One text, or as many as on the other side."""
    text_2: Texts | None = None
    queries: Texts | None = None
    """Another name of text_1."""
    documents: Texts | None = None
    """Another name of text_2."""


class RerankRequest(PooledFields):
    """A request to order documents by how well they answer a query."""

    query: str
    documents: Documents
    """Texts, or objects with a `text`."""
    top_n: Positive | None = None
    """Answer with this many of the best ones; with all when not given."""
    return_documents: bool | None = None
    """Send the documents back; on by default, but for `/v2/rerank`."""
    max_tokens_per_doc: Positive | None = None
    """Keep this many tokens of each document, as `truncate_prompt_tokens` does."""


class PooledUsage(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Answer):
    """One embedding."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Pooled(Answer):
    """What became of one text."""

    object: Literal["pooling"]
    index: int
    shape: list[int]
    """[numbers], or [tokens, numbers] of tasks on tokens."""
    data: list[Any] | str


class Label(Answer):
    """The scores of all labels for one text."""

    object: Literal["classification"]
    index: int
    label: int
    """Place of the highest score."""
    probs: list[float]
    num_classes: int


class Score(Answer):
    """The score of one pair."""

    object: Literal["score"]
    index: int
    score: float


class Listed(Answer):
    """What all lists of results begin with."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PooledUsage


class Embeddings(Listed):
    """Embeddings, in the order of the input."""

    data: list[Embedding]


class PooledList(Listed):
    """Results, in the order of the input."""

    data: list[Pooled]


class Labels(Listed):
    """Labels, in the order of the input."""

    data: list[Label]


class Scores(Listed):
    """Scores, in the order of the pairs."""

    data: list[Score]


class Ranked(Answer):
    """A document's place."""

    index: int
    """In the request."""
    relevance_score: float
    document: dict[str, Any] | None = None


class Ranking(Answer):
    """Documents, the best one first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PooledUsage
    meta: dict[str, Any] | None = None
    """Only from `/v2/rerank`."""
