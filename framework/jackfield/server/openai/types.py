"""Requests of OpenAI's API, with the further fields that clients of such servers know.

Numbers are taken strictly: ``"5"`` and ``true`` are no numbers. Fields that no model here declares are kept apart, so
that an answer can name them (see :mod:`jackfield.server.openai.unknown`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jackfield.server.openai.values import Bias, Count, Ids, Messages, Objects, Positive, Prompts, Stops, Words


class RequestModel(BaseModel):
    """Base of requests."""

    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True, protected_namespaces=())


class StreamOptions(RequestModel):
    """What a stream tells besides the text."""

    include_usage: bool = False
    """Send the usage in a chunk of its own before the stream ends."""
    continuous_usage_stats: bool = False
    """Send the usage so far with every chunk."""


class SamplingFields(RequestModel):
    """Fields that chat and text completions share. What is not given is left to the model's own defaults."""

    model: str | None = None
    """Name of the model; the server's own when not given."""
    n: Positive | None = None
    """Choices for each prompt."""
    stream: bool | None = None
    """Send the answer in pieces, as server-sent events."""
    stream_options: StreamOptions | None = None
    """For streams only."""
    max_tokens: Count | None = None
    """Most tokens of the answer; 0 only scores a prompt."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """Keep this many of the most likely tokens; 0 and -1 keep all."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Stops = None
    stop_token_ids: Ids = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: Bias = None
    bad_words: Words = None
    allowed_token_ids: Ids = None
    repetition_detection: dict[str, int] | None = None
    """End an answer that repeats itself: max_pattern_size, min_pattern_size, min_count."""
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    extra_args: dict[str, Any] | None = None
    """For logits processors."""
    echo: bool | None = None
    """Completions: put the prompt before the text. Chat: put the last message before the answer, when the answer
    belongs to the same turn."""
    prompt_logprobs: int | None = None
    """Log probabilities of this many likely tokens at each place of the prompt."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Keep this many tokens of the prompt, the last ones; -1 keeps what fits."""
    add_special_tokens: bool | None = None
    """Add the tokens that begin a text: on by default for text prompts, off for chat."""
    priority: int | None = None
    """Smaller runs earlier; needs a scheduling policy that reads it."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Share cached prefixes only with requests of the same salt."""
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    """Part of the answer's id; unique among running requests."""
    return_token_ids: bool | None = None
    """Send the token ids of prompt and answer too."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens in log probabilities as `token_id:N`."""
    user: str | None = None
    """No effect on the answer."""


class ChatCompletionRequest(SamplingFields):
    """A request for the next message of a conversation."""

    messages: Messages
    """The conversation."""
    max_completion_tokens: Count | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Send the log probability of each token of the answer."""
    top_logprobs: Count | None = None
    """Send this many of the most likely tokens at each place too; needs logprobs."""
    tools: Objects = None
    """Functions that the model may call, for the chat template."""
    tool_choice: str | dict[str, Any] | None = None
    """`none` or `auto`."""
    parallel_tool_calls: bool | None = None
    """No effect: answers are text, and hold no parsed calls."""
    response_format: dict[str, Any] | None = None
    """`{"type": "text"}`."""
    reasoning_effort: str | None = None
    """For chat templates that read it."""
    documents: Objects = None
    """For chat templates that read them."""
    chat_template: str | None = None
    """A Jinja template, where the server allows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template."""
    add_generation_prompt: bool | None = None
    """End the prompt with the head of the assistant's turn; on by default, unless the last message is continued."""
    continue_final_message: bool | None = None
    """Go on inside the last message."""
    service_tier: Literal["auto", "default"] | None = None
    """There is one tier."""
    metadata: dict[str, Any] | None = None
    """No effect on the answer."""
    store: bool | None = None
    """No effect on the answer."""


class CompletionRequest(SamplingFields):
    """A request to continue texts."""

    prompt: Prompts
    """Texts or token ids."""
    suffix: str | None = None
    """Not supported."""
    best_of: Positive | None = None
    """Draw this many and answer with the n most likely ones."""
    logprobs: Count | None = None
    """Log probabilities of this many likely tokens, and of the chosen one, at each place."""


class TokenizeRequest(RequestModel):
    """A request for the ids of a text or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    """A text; either this or messages."""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    """A conversation."""
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    """Send the text of each token too."""
    tools: Objects = None
    documents: Objects = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(RequestModel):
    """A request for the text of ids."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False
