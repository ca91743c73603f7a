"""Types of request fields, with one clear error where a field takes several kinds of values."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

MAX_PROMPTS = 2048
"""Prompts of one request."""
MAX_MESSAGES = 10_000
"""Messages of one conversation."""
MAX_WORDS = 1024
"""Bad words of one request."""
MAX_TOOLS = 1024
"""Tools, or documents, of one request."""
MAX_INT = 2**63 - 1
"""Largest whole number that a message to the engine can carry."""

T = TypeVar("T")


def one_of(words: str) -> WrapValidator:
    """Return a validator that tells what a field takes, instead of what was wrong with each alternative."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("one_of", "must be {words}", {"words": words}) from None

    return WrapValidator(check)


Prompts = Annotated[
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[int], Field(min_length=1)]
    | Annotated[list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)],
    one_of(f"a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} texts or of as many lists of token ids"),
]
Stops = Annotated[str | list[str] | None, one_of("a text or a list of texts")]
Ids = Annotated[list[int] | None, one_of("a list of token ids")]
Words = Annotated[
    Annotated[list[str], Field(max_length=MAX_WORDS)] | None, one_of(f"a list of at most {MAX_WORDS} texts")
]
Objects = Annotated[
    Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None,
    one_of(f"a list of at most {MAX_TOOLS} objects"),
]
Bias = Annotated[dict[str, float] | None, one_of("a map from token ids, written as texts, to numbers from -100 to 100")]
Messages = Annotated[
    list[dict[str, Any]],
    Field(min_length=1, max_length=MAX_MESSAGES),
]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Positive = Annotated[int, Field(ge=1, le=MAX_INT)]
