"""``eagle`` and ``eagle3``: a layer that goes on from the target's features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from jackfield.errors import ConfigError
from jackfield.interfaces import (
    Band,
    DraftBatch,
    Drafter,
    DrafterEnv,
    DrafterRequest,
    DraftModel,
    DraftRound,
    Drafts,
    DraftTrainer,
    GraphSupport,
    Option,
    Preference,
    Settings,
    TargetStep,
    TrainerEnv,
)
from jackfield_spec_decode.sizes import TREE_WIDTH, check_sizes

if TYPE_CHECKING:
    import torch

    from jackfield_spec_decode.feature_drafts import FeatureDrafts, Growth
    from jackfield_spec_decode.parallel_drafts import ParallelDrafts


LEVELS = 5
"""Of a tree, where the user says nothing."""


class EagleDrafter(Drafter):
    """EAGLE-1, as a chain or a dynamic tree."""

    name = "eagle"
    summary = "EAGLE-1 and 2: a layer on the target's final states, as a chain or a tree"
    kinds: ClassVar[frozenset[str]] = frozenset({"eagle"})
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "last_hidden", "draft_checkpoint", "draft_cache"})
    placement: ClassVar[str] = "device"
    draws: ClassVar[bool] = True
    graph_support: ClassVar[GraphSupport] = GraphSupport.UNIFORM
    builds: ClassVar[str] = "EagleLlamaForCausalLM"
    saved_as: ClassVar[frozenset[str]] = frozenset({"LlamaForCausalLM"})
    options: ClassVar[Mapping[str, Option]] = {
        "tree_width": TREE_WIDTH,
        "tree_depth": Option(int, 0, f"levels of a tree; 0: {LEVELS}", tuple(range(17))),
    }

    def __init__(
        self, drafts: FeatureDrafts | ParallelDrafts, taps: tuple[int, ...], growth: Growth | None = None
    ) -> None:
        self._drafts, self.taps, self._growth = drafts, taps, growth

    @classmethod
    def preference(cls, request: DrafterRequest) -> Preference:
        """Return GOOD: made for this target."""
        return Preference(Band.GOOD, "a layer that was trained on the target")

    @classmethod
    def architecture(cls, name: str) -> str:
        """See Drafter."""
        return cls.builds if name in cls.saved_as else name

    @classmethod
    def branches(cls, settings: Settings) -> bool:
        """See Drafter."""
        return int(settings["tree_width"]) > 0

    @classmethod
    def build(cls, env: DrafterEnv) -> EagleDrafter:
        """Return the drafter of one engine.

        Raises:
            ConfigError: the checkpoint is for another target, or the target has too few layers.
        """
        from jackfield_spec_decode.eagle_model import EagleModule

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
        return cls.of(env, model, taps)

    @classmethod
    def of(cls, env: DrafterEnv, model: DraftModel, taps: tuple[int, ...]) -> EagleDrafter:
        """Return the drafter over a model that fits the target."""
        from jackfield_spec_decode.feature_drafts import FeatureDrafts

        return cls(FeatureDrafts(model, env.target), taps, _growth(env, model))

    def propose(self, batch: DraftBatch) -> Drafts:
        """See Drafter."""
        if self._growth is not None:
            return self._drafts.grow(batch, self._growth)  # type: ignore[union-attr]  # no others have a growth
        return self._drafts.propose(batch)

    def draft(self, step: DraftRound) -> torch.Tensor:
        """See Drafter."""
        return self._drafts.draft(step)

    def follow(self, step: TargetStep) -> None:
        """See Drafter."""
        self._drafts.follow(step)


def _growth(env: DrafterEnv, model: DraftModel) -> Growth | None:
    """Return how trees are grown, or None for chains.

    Raises:
        ConfigError: a depth was set and no width; or what is grown on has no room: drafts are stored in the cache until
            they are verified.
    """
    from jackfield_spec_decode.feature_drafts import Growth

    width, said, count = int(env.settings["tree_width"]), int(env.settings["tree_depth"]), env.request.num_tokens
    if not width and said:
        raise ConfigError(
            "drafts in a chain have no levels",
            field=f"plugins.options.{env.request.kind}.tree_depth",
            value=said,
            remedy="set tree_width too",
        )
    if not width:
        return None
    depth = said or LEVELS
    needed = width * (depth - 1)
    if needed > count or width > model.max_tokens:
        raise ConfigError(
            f"a tree of width {width} and depth {depth} is grown from {needed} drafts, {width} at a time",
            field="speculative.num_speculative_tokens",
            value=count,
            remedy=f"draft {needed} or more, set tree_width or tree_depth lower, or give steps more tokens",
        )
    return Growth(count, width, depth)


class Eagle3Drafter(EagleDrafter):
    """EAGLE-3 (arXiv:2503.01840), as a chain or a dynamic tree; or all drafts in one pass (P-EAGLE, arXiv:2602.01469).

    A checkpoint that was trained for one pass has ``mask_hidden`` and ``embed_tokens`` beside the parts of EAGLE-3, and
    names the token that stands for unknown ones; see :class:`jackfield_spec_decode.eagle.Eagle3`. It is recognized by
    that token. What is known and the masks behind it are one pass of the layers, after every step of the target; in
    recorded rounds they are two.
    """

    name = "eagle3"
    summary = "EAGLE-3: a layer on the states of three of the target's layers, as a chain, a tree, or all at once"
    kinds: ClassVar[frozenset[str]] = frozenset({"eagle3"})
    needs: ClassVar[frozenset[str]] = EagleDrafter.needs | {"taps"}
    builds: ClassVar[str] = "Eagle3LlamaForCausalLM"
    saved_as: ClassVar[frozenset[str]] = frozenset(
        {"LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel"}
    )
    options: ClassVar[Mapping[str, Option]] = {
        **EagleDrafter.options,
        "parallel_drafting": Option(
            bool, None, "make all drafts in one pass (P-EAGLE); not set: as the checkpoint was trained"
        ),
    }
    trainable: ClassVar[bool] = True
    training_options: ClassVar[Mapping[str, Option]] = {
        "heads": Option(int, 4, "drafts in a row that are learnt: the layer is unrolled", tuple(range(1, 17))),
        "draft_vocab": Option(int, None, "tokens of the head, the text's most frequent ones"),
        "initial": Option(str, "", "folder of a checkpoint of the same sizes, to go on from"),
        "intermediate_size": Option(int, None, "inner size of the layer; the target's where it says one"),
    }

    @classmethod
    def of(cls, env: DrafterEnv, model: DraftModel, taps: tuple[int, ...]) -> EagleDrafter:
        """See EagleDrafter.

        Raises:
            ConfigError: one pass was asked for, and the checkpoint was not trained for it; or drafts of one pass are to
                branch.
        """
        from jackfield_spec_decode.feature_drafts import FeatureDrafts
        from jackfield_spec_decode.parallel_drafts import ParallelDrafts

        able, asked = model.module.config.mask_token is not None, env.settings["parallel_drafting"]
        field = f"plugins.options.{env.request.kind}.parallel_drafting"
        if asked and not able:
            raise ConfigError(
                "the draft checkpoint has nothing that stands for tokens and features that are not known yet",
                field=field,
                value=asked,
                remedy="name a P-EAGLE checkpoint, or leave the setting out",
            )
        growth = _growth(env, model)
        if not able or asked is False:
            return cls(FeatureDrafts(model, env.target, model.module.embed), taps, growth)
        if growth is not None:
            raise ConfigError(
                "drafts that are made in one pass do not branch",
                field=f"plugins.options.{env.request.kind}.tree_width",
                value=env.settings["tree_width"],
                remedy=f"leave it out, or set {field} to false",
            )
        return cls(ParallelDrafts(model, env.target, env.request.num_tokens), taps)

    @classmethod
    def trainer(cls, env: TrainerEnv) -> DraftTrainer:
        """See Drafter."""
        from jackfield_spec_decode.eagle_trainer import Eagle3Trainer

        return Eagle3Trainer(env)
