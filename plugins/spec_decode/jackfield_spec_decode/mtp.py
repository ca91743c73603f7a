"""``mtp``: layers of the target's own checkpoint that only draft (multi-token prediction)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import (
    Band,
    DraftBatch,
    Drafter,
    DrafterEnv,
    DrafterRequest,
    DraftRound,
    Drafts,
    GraphSupport,
    Preference,
    TargetStep,
)

if TYPE_CHECKING:
    import torch

    from jackfield_spec_decode.feature_drafts import FeatureDrafts


class MtpDrafter(Drafter):
    """One layer that was trained with the target and lies in its checkpoint (DeepSeek-V3, arXiv:2412.19437, section
    2.2). Behind the first draft it goes on from its own states. Chains.
    """

    name = "mtp"
    summary = "multi-token prediction: the layer of the target's own checkpoint that only drafts"
    kinds: ClassVar[frozenset[str]] = frozenset({"mtp"})
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "last_hidden", "draft_layers", "draft_cache"})
    placement: ClassVar[str] = "device"
    draws: ClassVar[bool] = True
    graph_support: ClassVar[GraphSupport] = GraphSupport.UNIFORM

    def __init__(self, drafts: FeatureDrafts) -> None:
        self._drafts = drafts

    @classmethod
    def preference(cls, request: DrafterRequest) -> Preference:
        """Return BEST: no other drafter knows the target so well."""
        return Preference(Band.BEST, "a layer that was trained with the target")

    @classmethod
    def build(cls, env: DrafterEnv) -> MtpDrafter:
        """Return the drafter of one engine."""
        from jackfield_spec_decode.feature_drafts import FeatureDrafts

        assert env.build is not None, "it needs draft_layers"
        return cls(FeatureDrafts(env.build(), env.target))

    def propose(self, batch: DraftBatch) -> Drafts:
        """See Drafter."""
        return self._drafts.propose(batch)

    def draft(self, step: DraftRound) -> torch.Tensor:
        """See Drafter."""
        return self._drafts.draft(step)

    def follow(self, step: TargetStep) -> None:
        """See Drafter."""
        self._drafts.follow(step)
