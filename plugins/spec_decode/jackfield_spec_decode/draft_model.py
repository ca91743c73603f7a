"""``draft_model``: a smaller model says what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from jackfield.errors import ConfigError
from jackfield.interfaces import (
    Band,
    DraftBatch,
    Drafter,
    DrafterEnv,
    DrafterRequest,
    Drafts,
    Preference,
    TargetStep,
)

if TYPE_CHECKING:
    from jackfield_spec_decode.model_drafts import ModelDrafts


class DraftModelDrafter(Drafter):
    """Runs a whole model of its own on the target's sequences and draws its drafts (Leviathan et al. 2023,
    arXiv:2211.17192). Its keys and values lie in the target's cache blocks, so that prefixes are shared too. Where its
    vocabulary is another, it drafts what both have (token-level intersection: Timor et al. 2025, arXiv:2502.05202).
    """

    name = "draft_model"
    summary = "a smaller model, of the same vocabulary or one that shares tokens with it"
    kinds: ClassVar[frozenset[str]] = frozenset({"draft_model"})
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "draft_checkpoint", "draft_cache"})
    placement: ClassVar[str] = "device"
    draws: ClassVar[bool] = True

    def __init__(self, drafts: ModelDrafts) -> None:
        self._drafts = drafts

    @classmethod
    def preference(cls, request: DrafterRequest) -> Preference:
        """Return GOOD: a model knows more than a look-up."""
        return Preference(Band.GOOD, "a model of its own")

    @classmethod
    def build(cls, env: DrafterEnv) -> DraftModelDrafter:
        """Return the drafter of one engine.

        Raises:
            ConfigError: there is no draft model.
        """
        from jackfield_spec_decode.model_drafts import ModelDrafts

        if env.build is None:
            raise ConfigError("a draft model is needed", field="speculative.model", value="", remedy="name one")
        return cls(ModelDrafts(env.build(), env.max_sequences))

    def propose(self, batch: DraftBatch) -> Drafts:
        """See Drafter."""
        return self._drafts.propose(batch)

    def follow(self, step: TargetStep) -> None:
        """See Drafter."""
        self._drafts.follow(step)

    def forget(self, slots: Sequence[int]) -> None:
        """See Drafter."""
        self._drafts.forget(slots)
