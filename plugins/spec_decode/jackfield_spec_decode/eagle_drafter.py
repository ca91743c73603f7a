"""``eagle`` and ``eagle3``: a layer that goes on from the target's features."""

from __future__ import annotations

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
from jackfield_spec_decode.sizes import check_sizes

if TYPE_CHECKING:
    from jackfield_spec_decode.feature_drafts import FeatureDrafts


class EagleDrafter(Drafter):
    """EAGLE-1, as a chain."""

    name = "eagle"
    summary = "EAGLE-1: a layer on the target's final states, as a chain"
    kinds: ClassVar[frozenset[str]] = frozenset({"eagle"})
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "last_hidden", "draft_checkpoint", "draft_cache"})
    placement: ClassVar[str] = "device"
    draws: ClassVar[bool] = True
    builds: ClassVar[str] = "EagleLlamaForCausalLM"
    saved_as: ClassVar[frozenset[str]] = frozenset({"LlamaForCausalLM"})

    def __init__(self, drafts: FeatureDrafts, taps: tuple[int, ...]) -> None:
        self._drafts, self.taps = drafts, taps

    @classmethod
    def preference(cls, request: DrafterRequest) -> Preference:
        """Return GOOD: made for this target."""
        return Preference(Band.GOOD, "a layer that was trained on the target")

    @classmethod
    def architecture(cls, name: str) -> str:
        """See Drafter."""
        return cls.builds if name in cls.saved_as else name

    @classmethod
    def build(cls, env: DrafterEnv) -> EagleDrafter:
        """Return the drafter of one engine.

        Raises:
            ConfigError: the checkpoint is for another target, or the target has too few layers.
        """
        from jackfield_spec_decode.eagle_model import EagleModule
        from jackfield_spec_decode.feature_drafts import FeatureDrafts

        assert env.build is not None, "a draft checkpoint is needed"
        model, layers = env.build(), env.request.target_layers
        if not isinstance(model.module, EagleModule):
            raise ConfigError(
                f"the draft checkpoint is no {cls.name} checkpoint",
                field="speculative.model",
                value=env.request.model,
                remedy="name one, or use another speculative.method",
            )
        check_sizes(env, model.module.config)
        taps = model.module.taps(layers)
        if any(not 0 <= tap < layers for tap in taps):
            raise ConfigError(
                f"the draft checkpoint looks at layers {', '.join(map(str, taps))}, and the target has {layers}",
                field="speculative.model",
                value=env.request.model,
                remedy="name a checkpoint that was trained for this target",
            )
        return cls(FeatureDrafts(model, env.target), taps)

    def propose(self, batch: DraftBatch) -> Drafts:
        """See Drafter."""
        return self._drafts.propose(batch)

    def follow(self, step: TargetStep) -> None:
        """See Drafter."""
        self._drafts.follow(step)


class Eagle3Drafter(EagleDrafter):
    """EAGLE-3, as a chain."""

    name = "eagle3"
    summary = "EAGLE-3: a layer on the states of three of the target's layers, as a chain"
    kinds: ClassVar[frozenset[str]] = frozenset({"eagle3"})
    needs: ClassVar[frozenset[str]] = EagleDrafter.needs | {"taps"}
    builds: ClassVar[str] = "Eagle3LlamaForCausalLM"
    saved_as: ClassVar[frozenset[str]] = frozenset({"LlamaForCausalLM", "LlamaForCausalLMEagle3"})
