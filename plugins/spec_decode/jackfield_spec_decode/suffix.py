"""``suffix``: drafts are what most often followed the same words, here and in earlier answers, as long as it is likely.

After SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975).
"""

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
    Drafts,
    Option,
    Preference,
)

if TYPE_CHECKING:
    from jackfield_spec_decode.suffix_index import SuffixIndex

_LOWEST = {"max_tree_depth": 2, "max_cached_requests": 0, "max_cached_tokens": 0}


class SuffixDrafter(Drafter):
    """Counts what followed every run of tokens of a sequence, and of the answers of requests that ended. A draft goes
    on with the most frequent token while the path is likely, so that its length follows how sure it is.
    """

    name = "suffix"
    summary = "suffix trees: goes on as this and earlier answers did, as far as that is likely"
    kinds: ClassVar[frozenset[str]] = frozenset({"suffix"})
    needs: ClassVar[frozenset[str]] = frozenset({"tokens"})
    placement: ClassVar[str] = "host"
    options: ClassVar[Mapping[str, Option]] = {
        "max_tree_depth": Option(int, 24, "longest run of tokens that is remembered, match and draft together"),
        "max_spec_factor": Option(float, 1.0, "most draft tokens for each matched token"),
        "min_token_prob": Option(float, 0.1, "a draft ends where its path gets less likely than this"),
        "max_cached_requests": Option(
            int, 10_000, "answers that are remembered, oldest dropped first; 0: no request sees those of others"
        ),
        "max_cached_tokens": Option(int, 200_000, "tokens of the answers that are remembered"),
    }

    def __init__(self, index: SuffixIndex) -> None:
        self._index = index

    @classmethod
    def preference(cls, request: DrafterRequest) -> Preference:
        """Return SUPPORTED: costs little, and helps where output repeats its context or earlier outputs."""
        return Preference(Band.SUPPORTED, "no model to run")

    @classmethod
    def build(cls, env: DrafterEnv) -> SuffixDrafter:
        """Return the drafter of one engine.

        Raises:
            ConfigError: an option is out of its range.
        """
        from jackfield_spec_decode.suffix_index import SuffixIndex

        values = {name: env.settings.values.get(name, option.default) for name, option in cls.options.items()}
        for name, value in values.items():
            least = _LOWEST.get(name, 0)
            if value < least or (name == "min_token_prob" and value > 1):
                bounds = "from 0 to 1" if name == "min_token_prob" else f"at least {least}"
                raise ConfigError(
                    f"{name} must be {bounds}",
                    field=f"plugins.options.suffix.{name}",
                    value=value,
                    remedy=f"set {name} to a value {bounds}",
                )
        return cls(SuffixIndex(env.request.num_tokens, **values))

    def propose(self, batch: DraftBatch) -> Drafts:
        """See Drafter."""
        assert batch.token_ids is not None, "a host drafter is given tokens"
        return Drafts(self._index.propose(batch.token_ids, batch.slots, batch.lengths, batch.limits))

    def forget(self, slots: Sequence[int]) -> None:
        """See Drafter."""
        self._index.forget(slots)
