"""``dflash``: a block of masks that is filled in one pass."""

from __future__ import annotations

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
    Preference,
    TargetStep,
)
from jackfield_spec_decode.sizes import check_sizes

if TYPE_CHECKING:
    import torch

    from jackfield_spec_decode.dflash import DFlashConfig
    from jackfield_spec_decode.dflash_drafts import BlockDrafts


class DFlashDrafter(Drafter):
    """DFlash (arXiv:2602.06036): a few layers fill a block of masks behind the last known token in one pass. All of a
    block see one another, and the target's own states as context; embedding and head are the target's. Chains.

    The checkpoint's layout is that of :class:`jackfield_spec_decode.dflash.DFlashModel`. As attention is causal, each
    token of a block is a sequence of its own to it: a pass has room for ``max_num_seqs`` of them, and each reads the
    context for itself.
    """

    name = "dflash"
    summary = "DFlash: layers on the target's states that fill a block of masks in one pass"
    kinds: ClassVar[frozenset[str]] = frozenset({"dflash"})
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "taps", "draft_checkpoint", "draft_cache"})
    placement: ClassVar[str] = "device"
    draws: ClassVar[bool] = True
    graph_support: ClassVar[GraphSupport] = GraphSupport.UNIFORM

    def __init__(self, drafts: BlockDrafts, taps: tuple[int, ...]) -> None:
        self._drafts, self.taps = drafts, taps

    @classmethod
    def preference(cls, request: DrafterRequest) -> Preference:
        """Return GOOD: made for this target."""
        return Preference(Band.GOOD, "layers that were trained on the target")

    @classmethod
    def build(cls, env: DrafterEnv) -> DFlashDrafter:
        """Return the drafter of one engine.

        Raises:
            ConfigError: the checkpoint is for another target, more drafts are wanted than a block has masks, or a pass
                has no room for a block.
        """
        from jackfield_spec_decode.dflash_drafts import BlockDrafts
        from jackfield_spec_decode.dflash_model import DFlashModule

        assert env.build is not None, "a draft checkpoint is needed"
        model, count = env.build(), env.request.num_tokens
        if not isinstance(model.module, DFlashModule):
            raise ConfigError(
                "the draft checkpoint is no dflash checkpoint",
                field="speculative.model",
                value=env.request.model,
                remedy="name one, or use another speculative.method",
            )
        config: DFlashConfig = model.module.config
        check_sizes(env, config)
        _check_target(env, config)
        if count >= config.block_size:
            raise ConfigError(
                f"the checkpoint fills blocks of {config.block_size} tokens, the last known one among them",
                field="speculative.num_speculative_tokens",
                value=count,
                remedy=f"use {config.block_size - 1} or less",
            )
        for field, room in (("max_num_seqs", env.max_sequences), ("max_num_batched_tokens", model.max_tokens)):
            if room <= count:
                raise ConfigError(
                    f"each of the {count + 1} tokens of a block is a sequence of its own to attention",
                    field=f"scheduler.{field}",
                    value=room,
                    remedy=f"set it to {count + 1} or more, or draft less",
                )
        return cls(BlockDrafts(model, env.target, count, env.max_sequences), config.taps)

    def propose(self, batch: DraftBatch) -> Drafts:
        """See Drafter."""
        return self._drafts.propose(batch)

    def draft(self, step: DraftRound) -> torch.Tensor:
        """See Drafter."""
        return self._drafts.draft(step)

    def follow(self, step: TargetStep) -> None:
        """See Drafter."""
        self._drafts.follow(step)


def _check_target(env: DrafterEnv, config: DFlashConfig) -> None:
    """Refuse a checkpoint that was trained on a target with another number of layers.

    Raises:
        ConfigError: it was.
    """
    layers = env.request.target_layers
    if config.target_layers in (0, layers) and all(0 <= tap < layers for tap in config.taps):
        return
    trained = f"a target of {config.target_layers} layers" if config.target_layers else "another target"
    raise ConfigError(
        f"the draft checkpoint is made for {trained}: it looks at layers {', '.join(map(str, config.taps))}, and this"
        f" one has {layers}",
        field="speculative.model",
        value=env.request.model,
        remedy="name a checkpoint that was trained for this target",
    )
