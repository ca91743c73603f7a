"""``medusa`` and ``mlp_speculator``: small heads on the target's last hidden state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.errors import ConfigError
from jackfield.interfaces import (
    Band,
    DraftBatch,
    Drafter,
    DrafterEnv,
    DrafterRequest,
    Drafts,
    Preference,
)
from jackfield_spec_decode.sizes import check_sizes

if TYPE_CHECKING:
    import torch


class HeadsDrafter(Drafter):
    """Base: draws place after place from the heads of a module with ``num_heads`` and ``step``."""

    needs: ClassVar[frozenset[str]] = frozenset({"last_hidden", "draft_checkpoint"})
    placement: ClassVar[str] = "device"
    draws: ClassVar[bool] = True

    def __init__(self, module: Any) -> None:
        self._module = module

    @classmethod
    def preference(cls, request: DrafterRequest) -> Preference:
        """Return GOOD: made for this target."""
        return Preference(Band.GOOD, "heads that were trained on the target")

    @classmethod
    def build(cls, env: DrafterEnv) -> HeadsDrafter:
        """Return the drafter of one engine.

        Raises:
            ConfigError: the checkpoint is for another target, or more drafts are wanted than there are heads.
        """
        assert env.build is not None, "a draft checkpoint is needed"
        module = env.build().module
        check_sizes(env, module.config)
        if env.request.num_tokens > module.num_heads:
            raise ConfigError(
                f"the checkpoint has {module.num_heads} heads, one for each draft",
                field="speculative.num_speculative_tokens",
                value=env.request.num_tokens,
                remedy=f"use {module.num_heads} or less",
            )
        return cls(module)

    def propose(self, batch: DraftBatch) -> Drafts:
        """See Drafter."""
        import torch

        assert batch.hidden is not None and batch.last_tokens is not None and batch.draw is not None
        state_BE, last_B = batch.hidden, batch.last_tokens
        ids: list[torch.Tensor] = []
        for place in range(int(batch.limits.max())):
            state_BE, logits_BV = self._module.step(place, state_BE, last_B)
            last_B = batch.draw(logits_BV.float(), place)
            ids.append(last_B)
        return Drafts(torch.stack(ids, 1))


class MedusaDrafter(HeadsDrafter):
    """Medusa heads as a chain: each head's draft stands behind those of the heads before it."""

    name = "medusa"
    summary = "Medusa heads, as a chain"
    kinds: ClassVar[frozenset[str]] = frozenset({"medusa"})


class MlpSpeculatorDrafter(HeadsDrafter):
    """IBM's MLP speculators."""

    name = "mlp_speculator"
    summary = "MLP speculators: heads that see what was drafted before them"
    kinds: ClassVar[frozenset[str]] = frozenset({"mlp_speculator"})
