"""Sampling flags that ``generate`` and ``chat`` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

_MAX_TOKENS = 512


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How tokens are drawn; the model's own defaults hold for what is not set."""

    temperature: float | None = None
    "0 takes the most likely token; higher values are more random."
    top_p: float | None = None
    "Draw from the smallest set of tokens with this probability."
    top_k: int | None = None
    "Draw from this many of the most likely tokens."
    min_p: float | None = None
    "Drop tokens below this share of the most likely one's probability."
    max_tokens: int | None = None
    "Most tokens of the answer; 512 when not set."
    stop: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = ()
    "Text that ends the answer; may be repeated."

    def given(self) -> dict[str, Any]:
        """Return the flags that were set, by the names of SamplingParams."""
        values = {name: getattr(self, name) for name in self.__slots__}
        chosen = {name: value for name, value in values.items() if value is not None and value != ()}
        if "stop" in chosen:
            chosen["stop"] = list(chosen["stop"])
        return chosen

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request to a server, whose own defaults hold for the rest."""
        return {"max_tokens": _MAX_TOKENS, **self.given()}

    def params(self, llm: Any) -> Any:
        """Return SamplingParams: the model's defaults, then the configuration's, then the flags that were set."""
        defaults = {"max_tokens": _MAX_TOKENS, **llm.sampling_defaults}
        return llm.default_sampling_params(**{**defaults, **self.given()})
