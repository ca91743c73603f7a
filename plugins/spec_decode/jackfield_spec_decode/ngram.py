"""``ngram``: drafts are what followed the last time the same words were said. No model, no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from jackfield.errors import ConfigError
from jackfield.interfaces import (
    Band,
    DraftBatch,
    Drafter,
    DrafterEnv,
    DrafterRequest,
    DraftRound,
    Drafts,
    GraphSupport,
    Option,
    Preference,
)

if TYPE_CHECKING:
    import torch

    from jackfield_spec_decode.ngram_index import NgramIndex


class NgramDrafter(Drafter):
    """Prompt lookup: finds the longest suffix of a sequence (``max_n`` tokens down to ``min_n``) that occurred in it
    before, and proposes what followed its most recent occurrence.

    The options are what others call ``prompt_lookup_min`` and ``prompt_lookup_max``. A ``min_n`` of 2 keeps single
    common words from drawing drafts that are mostly refused.
    """

    name = "ngram"
    summary = "prompt lookup: repeats what followed the same tokens before"
    kinds: ClassVar[frozenset[str]] = frozenset({"ngram"})
    needs: ClassVar[frozenset[str]] = frozenset({"tokens"})
    placement: ClassVar[str] = "host"
    graph_support: ClassVar[GraphSupport] = GraphSupport.UNIFORM
    options: ClassVar[Mapping[str, Option]] = {
        "min_n": Option(int, 2, "shortest suffix that is looked up, in tokens (prompt_lookup_min)"),
        "max_n": Option(int, 4, "longest suffix that is looked up, in tokens (prompt_lookup_max)"),
    }

    def __init__(self, index: NgramIndex, shortest: int, longest: int) -> None:
        self._index, self._shortest, self._longest = index, shortest, longest

    @classmethod
    def preference(cls, request: DrafterRequest) -> Preference:
        """Return SUPPORTED: costs next to nothing, and helps where output repeats its context."""
        return Preference(Band.SUPPORTED, "no model to run")

    @classmethod
    def build(cls, env: DrafterEnv) -> NgramDrafter:
        """Return the drafter of one engine.

        Raises:
            ConfigError: ``min_n`` is below 1 or above ``max_n``.
        """
        from jackfield_spec_decode.ngram_index import NgramIndex

        shortest = env.settings.values.get("min_n", cls.options["min_n"].default)
        longest = env.settings.values.get("max_n", cls.options["max_n"].default)
        if not 1 <= shortest <= longest:
            raise ConfigError(
                f"min_n must be from 1 to max_n = {longest}",
                field="plugins.options.ngram.min_n",
                value=shortest,
                remedy="set min_n to at least 1 and max_n to at least min_n",
            )
        return cls(NgramIndex(shortest, longest, env.request.num_tokens), shortest, longest)

    def propose(self, batch: DraftBatch) -> Drafts:
        """See Drafter."""
        assert batch.token_ids is not None, "a host drafter is given tokens"
        return Drafts(self._index.propose(batch.token_ids, batch.slots, batch.lengths, batch.limits))

    def draft(self, step: DraftRound) -> torch.Tensor:
        """See Drafter."""
        from jackfield_spec_decode.ngram_lookup import last_matches

        lengths_B = step.starts + 2 + step.kept
        return last_matches(step.tokens[step.slots], lengths_B, self._shortest, self._longest, step.num_drafts)

    def forget(self, slots: Sequence[int]) -> None:
        """See Drafter."""
        self._index.forget(slots)
