"""LogitsProcessor: changes logits before a token is chosen. Group ``jackfield.logits_processors.v1``.

This family is not choose-one: all processors that ``sampling.logits_processors`` names are active, in that order. Each
is applied to every row of every request that it wants, in greedy, sampled, overlapped, recorded and speculative steps
alike. Legend: R rows, V vocabulary, L tokens of a sequence.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jackfield.interfaces.plugin import ANY, Plugin, Request, Settings

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsRequest(Request):
    """Asks for one processor by name.

    Args:
        vocab_size: V.
    """

    vocab_size: int = 0


class ParamsView(Protocol):
    """What a processor may know of a request's sampling parameters."""

    @property
    def temperature(self) -> float:
        """Softmax temperature."""
        ...

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        ...

    @property
    def extra_args(self) -> Mapping[str, Any] | None:
        """Arguments for plugins."""
        ...


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """One row of logits: the place behind the last of its tokens.

    Args:
        request_id: whose. token_ids: [L] int32 on the device, prompt and output so far; with speculative decoding the
            drafts before this place too. A view: do not write, do not keep.
        prompt_length: how many of them are the prompt. extra_args: the request's arguments for plugins.
    """

    request_id: str
    token_ids: torch.Tensor
    prompt_length: int
    extra_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogitsEnv:
    """What a processor is given when it builds.

    Args:
        vocab_size: V. device: of the logits. settings: the plugin's options.
    """

    vocab_size: int
    device: torch.device
    settings: Settings = field(default_factory=Settings)


class LogitsProcessor(Plugin):
    """Changes the logits of the requests that it wants. Results must depend on a row's own tokens and arguments alone:
    rows of one request come in any batch, may come twice (after preemption, for refused drafts) and may be left out.
    """

    family: ClassVar[str] = "logits_processors"
    kinds: ClassVar[frozenset[str]] = ANY
    argmax_invariant: ClassVar[bool] = False
    """Never changes which logit is the largest. A greedy request that only such processors want is not processed."""

    @classmethod
    def wants(cls, params: ParamsView) -> bool:
        """Return whether a request's rows are processed. Asked once, when the request comes in; must be pure.

        Raises:
            RequestError: the request's ``extra_args`` are wrong; it is refused.
        """
        return True

    @classmethod
    @abstractmethod
    def build(cls, env: LogitsEnv) -> LogitsProcessor:
        """Return the processor of one engine."""

    @abstractmethod
    def apply(self, logits_RV: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        """Change logits in place: row i of [R, V] float32 belongs to ``rows[i]``. Only rows that the processor wants
        are given. An exception ends the requests of these rows with an error: no token of theirs is sampled from
        logits that were not processed.
        """
