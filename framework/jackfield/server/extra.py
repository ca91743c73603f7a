"""What the APIs beside OpenAI's chat and completions share: further fields of requests, refusals, names of fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import Field

from jackfield.errors import RequestError
from jackfield.server.chat import own_template
from jackfield.server.openai.types import RequestModel, SamplingFields
from jackfield.server.openai.values import Bias, Ids
from jackfield.server.state import ServerState

Refused = Mapping[str, tuple[str, tuple[Any, ...]]]
"""Fields that would change the answer: why they are refused, and the values that ask for nothing."""


class ExtraFields(RequestModel):
    """Fields that the API does not have; they act as in OpenAI's routes."""

    top_k: int | None = None
    """Keep this many of the most likely tokens; 0 keeps all."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: Ids = None
    logit_bias: Bias = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    """Smaller runs earlier; needs a scheduling policy that reads it."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Share cached prefixes only with requests of the same salt."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""


def sampling_fields(body: ExtraFields, **own: Any) -> SamplingFields:
    """Return a request as OpenAI's routes have it: the further fields, and the API's own by OpenAI's names."""
    names = ExtraFields.model_fields.keys() & SamplingFields.model_fields.keys()
    return SamplingFields.model_construct(**{name: getattr(body, name) for name in names}, **own)


def refuse(body: RequestModel, table: Refused, place: str = "") -> None:
    """Refuse fields of a request that no model here declares and that would change the answer.

    Raises:
        RequestError: lists all of them.
    """
    refuse_keys(body.model_extra or {}, table, place)


def refuse_keys(given: Mapping[str, Any], table: Refused, place: str = "") -> None:
    """As :func:`refuse`, for an object inside a request; ``place`` is its own path with a dot behind."""
    found = [name for name, value in given.items() if name in table and _asks(value, table[name][1])]
    if found:
        text = "; ".join(f"{place}{name}: {table[name][0]}" for name in found)
        raise RequestError(text, field=f"{place}{found[0]}", remedy="leave it out")


def template_of(state: ServerState) -> str:
    """Return the text of the chat template that requests are written with; empty when there is none."""
    return own_template(state.engine.tokenizer) if state.chat_template is None else state.chat_template


@contextmanager
def fields_renamed(**names: str) -> Iterator[None]:
    """Let errors name fields as the request does. A renamed field loses the path below it: what was converted has
    other places than the request.
    """
    try:
        yield
    except RequestError as error:
        first = (error.field or "").partition(".")[0]
        if first not in names:
            raise
        raise moved(error, error.field or "", names[first]) from error


def moved(error: RequestError, old: str, new: str) -> RequestError:
    """Return an error whose field begins with ``new`` instead of ``old``."""
    field = new + (error.field or "").removeprefix(old)
    return RequestError(error.message, field=field, value=error.value, remedy=error.remedy)


def _asks(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is not None and not any(value == one and type(value) is type(one) for one in neutral)
