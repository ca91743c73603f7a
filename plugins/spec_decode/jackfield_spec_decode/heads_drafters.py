"""``medusa`` and ``mlp_speculator``: small heads on the target's last hidden state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.errors import ConfigError
from jackfield.interfaces import (
    Band,
    DraftBatch,
    Drafter,
    DrafterEnv,
    DrafterRequest,
    DraftRound,
    Drafts,
    DraftTrainer,
    GraphSupport,
    Option,
    Preference,
    Settings,
    TrainerEnv,
)
from jackfield_spec_decode.sizes import TREE_WIDTH, check_sizes

if TYPE_CHECKING:
    import torch


class HeadsDrafter(Drafter):
    """Base: draws place after place from the heads of a module with ``num_heads`` and ``step``, or grows a tree of what
    they say is likely.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"last_hidden", "draft_checkpoint"})
    placement: ClassVar[str] = "device"
    draws: ClassVar[bool] = True
    graph_support: ClassVar[GraphSupport] = GraphSupport.UNIFORM
    options: ClassVar[Mapping[str, Option]] = {"tree_width": TREE_WIDTH}

    def __init__(self, module: Any, count: int, width: int) -> None:
        self._module, self._count, self._width = module, count, width

    @classmethod
    def preference(cls, request: DrafterRequest) -> Preference:
        """Return GOOD: made for this target."""
        return Preference(Band.GOOD, "heads that were trained on the target")

    @classmethod
    def branches(cls, settings: Settings) -> bool:
        """See Drafter."""
        return int(settings["tree_width"]) > 0

    @classmethod
    def build(cls, env: DrafterEnv) -> HeadsDrafter:
        """Return the drafter of one engine.

        Raises:
            ConfigError: the checkpoint is for another target, or more drafts are wanted than there are heads.
        """
        assert env.build is not None, "a draft checkpoint is needed"
        module = env.build().module
        check_sizes(env, module.config)
        width = int(env.settings["tree_width"])
        if not width and env.request.num_tokens > module.num_heads:
            raise ConfigError(
                f"the checkpoint has {module.num_heads} heads, one for each draft",
                field="speculative.num_speculative_tokens",
                value=env.request.num_tokens,
                remedy=f"use {module.num_heads} or less",
            )
        return cls(module, env.request.num_tokens, width)

    def propose(self, batch: DraftBatch) -> Drafts:
        """See Drafter."""
        import torch

        assert batch.hidden is not None and batch.last_tokens is not None and batch.draw is not None
        if self._width:
            return self._grow(batch, batch.hidden, batch.last_tokens)
        state_BE, last_B = batch.hidden, batch.last_tokens
        ids: list[torch.Tensor] = []
        for place in range(int(batch.limits.max())):
            state_BE, logits_BV = self._module.step(place, state_BE, last_B)
            last_B = batch.draw(logits_BV.float(), place)
            ids.append(last_B)
        return Drafts(torch.stack(ids, 1))

    def draft(self, step: DraftRound) -> torch.Tensor:
        """See Drafter."""
        import torch

        state_BE, last_B, ids = step.hidden[step.rows, step.kept], step.last_tokens, []
        for place in range(step.num_drafts):
            state_BE, logits_BV = self._module.step(place, state_BE, last_B)
            last_B = logits_BV.argmax(-1)
            ids.append(last_B)
        return torch.stack(ids, 1)

    def _grow(self, batch: DraftBatch, state_XE: torch.Tensor, last_X: torch.Tensor) -> Drafts:
        """Return the likeliest paths through the heads' tokens; X are the drafts of all sequences that are grown on."""
        import torch

        from jackfield_spec_decode.tree_growth import GrowingTree

        tree, rows = GrowingTree(self._width), len(batch.slots)
        for place in range(self._module.num_heads):
            state_XE, logits_XV = self._module.step(place, state_XE, last_X)
            ids_BW, above_BW = tree.grow(logits_XV.unflatten(0, (rows, -1)))
            first_B = torch.arange(rows, device=ids_BW.device) * (len(state_XE) // rows)
            state_XE, last_X = state_XE[(first_B.unsqueeze(1) + above_BW).flatten()], ids_BW.flatten()
        return Drafts(*tree.best(self._count))


class MedusaDrafter(HeadsDrafter):
    """Medusa heads: each head's drafts stand behind those of the heads before it."""

    name = "medusa"
    summary = "Medusa heads, as a chain or a tree"
    kinds: ClassVar[frozenset[str]] = frozenset({"medusa"})
    trainable: ClassVar[bool] = True
    training_options: ClassVar[Mapping[str, Option]] = {
        "heads": Option(int, 4, "heads, one for each draft", tuple(range(1, 17))),
        "layers": Option(int, 1, "residual layers of a head", tuple(range(1, 9))),
        "train_head": Option(bool, False, "learn a projection for each head; else all share the target's as it is"),
    }

    @classmethod
    def completed(cls, config: Mapping[str, Any], request: DrafterRequest) -> Mapping[str, Any]:
        """See Drafter: files of Medusa's authors say no sizes."""
        return {"hidden_size": request.hidden_size, "vocab_size": request.vocab_size, **config}

    def draft(self, step: DraftRound) -> torch.Tensor:
        """See Drafter: no head waits for another."""
        likeliest_BK: torch.Tensor = self._module.likeliest(step.hidden[step.rows, step.kept], step.num_drafts)
        return likeliest_BK

    @classmethod
    def trainer(cls, env: TrainerEnv) -> DraftTrainer:
        """See Drafter."""
        from jackfield_spec_decode.medusa_trainer import MedusaTrainer

        return MedusaTrainer(env)


class MlpSpeculatorDrafter(HeadsDrafter):
    """IBM's MLP speculators."""

    name = "mlp_speculator"
    summary = "MLP speculators: heads that see what was drafted before them"
    kinds: ClassVar[frozenset[str]] = frozenset({"mlp_speculator"})
