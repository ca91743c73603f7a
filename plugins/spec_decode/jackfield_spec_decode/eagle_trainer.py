"""Trains EAGLE-3 as it drafts: unrolled over its own features (Li et al. 2025, arXiv:2503.01840, section 3.2).

Legend: B documents, L tokens of the longest, N places, E width, F width of the taps, V vocabulary, D tokens of the
head, K drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from jackfield.errors import ConfigError
from jackfield.interfaces import Agreement, DraftTrainer, Settings, TrainedDraft, TrainerEnv, TrainingBatch
from jackfield_spec_decode.eagle import usual_taps
from jackfield_spec_decode.eagle_network import Eagle3Network, LayerSizes
from jackfield_spec_decode.training_goals import FADING, ROWS, Places, goal_logits, greedy, reached

MOST_TOKENS = 16384
"""Tokens of the head, where the user says nothing: large heads make drafts slow."""
UNIT = 64
"""Such heads have a multiple of this many tokens, which suits matrix products."""
PLAIN_KINDS = frozenset({"full", "sliding", "chunked"})
"""Kinds of layers whose heads the draft layer takes over."""
SPREAD = 0.02
"""Standard deviation that matrices begin with."""
HEAD_SIZE = 64
"""For targets that have none of them."""


class Eagle3Trainer(DraftTrainer):
    """Trains a layer and a head over the frequent tokens of the text."""

    learning_rate: ClassVar[float] = 5e-4

    def __init__(self, env: TrainerEnv) -> None:
        self._env, self._steps = env, int(env.settings["heads"])
        layers = env.config.num_layers
        behind = usual_taps(layers)
        self._named = not 0 < min(behind) <= max(behind) <= layers
        if self._named:
            # The usual places do not exist in targets of few layers.
            behind = (1, max(1, layers // 2), layers)
        self._behind, self.taps = behind, tuple(layer - 1 for layer in behind)
        initial = read_initial(str(env.settings["initial"]), env.config.vocab_size)
        if initial is None:
            self._ids_D = frequent(env.counts, env.settings["draft_vocab"]).to(env.device)
        else:
            self._ids_D = initial.ids_D.to(env.device)
        self._sizes = layer_sizes(env, len(behind))
        self.module = self._network = Eagle3Network(self._sizes, len(self._ids_D))
        if initial is None:
            self._begin()
        else:
            initial.fill(self.module, env.settings)
        self.module.to(env.device)

    def losses(self, batch: TrainingBatch) -> Iterator[torch.Tensor]:
        """See DraftTrainer: one part, the divergence from the target's distribution over the head's tokens. Places
        where the target's first choice is none of them are left out: what is drafted there is refused.
        """
        places, goal_ND = self._goals(batch)
        total = torch.zeros((), device=batch.ids.device)
        for step, states_BLE in enumerate(self._unrolled(batch)):
            kept = places.token > step
            if not kept.any():
                break
            log_ND = self._network.lm_head(states_BLE[places[kept].before(step + 1)]).float().log_softmax(-1)
            total = total + FADING**step * F.kl_div(log_ND, goal_ND[kept], reduction="batchmean", log_target=True)
        if total.requires_grad:
            yield total

    def agreement(self, batch: TrainingBatch) -> Agreement:
        """See DraftTrainer."""
        best_BL, known_NK = greedy(self._env.target, batch), reached(batch, self._steps)
        places = Places.of(batch)
        right_NK = torch.zeros_like(known_NK)
        for step, states_BLE in enumerate(self._unrolled(batch)):
            rows = known_NK[:, step].nonzero().flatten()
            # Rows begin one token before the first draft's place; both are in the order of the batch.
            there = places[rows]
            for part in torch.split(torch.arange(len(rows), device=rows.device), ROWS):
                at = Places(there.document[part], there.token[part] + step)
                drafts_N = self._ids_D[self._network.lm_head(states_BLE[at.before(step + 1)]).argmax(-1)]
                right_NK[rows[part], step] = drafts_N == best_BL[at.before(0)]
        return Agreement(right_NK, known_NK)

    def checkpoint(self) -> TrainedDraft:
        """See DraftTrainer: the layout of the paper's authors."""
        config, sizes, ids_D = self._env.config, self._sizes, self._ids_D.cpu()
        tensors = dict(self.module.state_dict())
        if len(ids_D) < config.vocab_size:
            tensors["d2t"] = ids_D - torch.arange(len(ids_D))
            tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids_D, True)
        keys = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "draft_vocab_size": len(ids_D),
            "hidden_size": sizes.width,
            "intermediate_size": sizes.inner,
            "num_hidden_layers": 1,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_size,
            "hidden_act": "silu",
            "rms_norm_eps": sizes.eps,
            "rope_theta": sizes.theta,
            "max_position_embeddings": config.max_position,
            "tie_word_embeddings": False,
        }
        if self._named:
            keys["eagle_aux_hidden_state_layer_ids"] = list(self._behind)
        return TrainedDraft(keys, tensors)

    @torch.no_grad()
    def _begin(self) -> None:
        """Start near the target: features are the last tap, the layer adds little, and the head is the target's."""
        network, width = self._network, self._sizes.width
        for parameter in network.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=SPREAD)
        network.fc.weight.zero_()
        network.fc.weight[:, -width:].copy_(torch.eye(width))
        network.lm_head.weight.copy_(self._env.target.head(self._ids_D))

    def _goals(self, batch: TrainingBatch) -> tuple[Places, torch.Tensor]:
        """Return the places that are learnt from, and [N, D] the target's log probabilities there."""
        places, goals = [], []
        for part in Places.of(batch).chunks():
            logits_NV = goal_logits(self._env.target, batch, part)
            goal_ND = logits_NV[:, self._ids_D]
            kept = goal_ND.amax(-1) == logits_NV.amax(-1)
            places.append(part[kept])
            goals.append(goal_ND[kept].log_softmax(-1))
        document, token = (torch.cat(parts) for parts in zip(*((p.document, p.token) for p in places), strict=True))
        return Places(document, token), torch.cat(goals)

    def _unrolled(self, batch: TrainingBatch) -> Iterator[torch.Tensor]:
        states: Iterator[torch.Tensor] = self._network(
            self._env.target.embed(batch.ids), torch.cat(tuple(batch.taps), -1), self._steps
        )
        return states


@dataclass(frozen=True, slots=True)
class Initial:
    """A checkpoint to go on from: ``ids_D`` are the tokens of its head."""

    folder: str
    ids_D: torch.Tensor
    tensors: Mapping[str, torch.Tensor]

    def fill(self, module: nn.Module, settings: Settings) -> None:
        """Put the checkpoint's numbers into a module.

        Raises:
            ConfigError: it has other sizes, or the user wants another vocabulary.
        """
        wanted = settings["draft_vocab"]
        if wanted is not None and wanted != len(self.ids_D):
            raise ConfigError(
                f"the checkpoint that is gone on from has a head of {len(self.ids_D)} tokens",
                field="--draft-vocab",
                value=wanted,
                remedy="leave it out, or begin anew",
            )
        try:
            module.load_state_dict({name: tensor.float() for name, tensor in self.tensors.items()})
        except RuntimeError as error:
            raise self._unfit("it has other sizes, or other tensors") from error

    def _unfit(self, why: str) -> ConfigError:
        return ConfigError(
            f"that is no EAGLE-3 checkpoint of this target: {why}",
            field="--option initial",
            value=self.folder,
            remedy="name one that was trained for the target with the same sizes",
        )


def read_initial(folder: str, vocab_size: int) -> Initial | None:
    """Return what training goes on from, or None where it begins anew.

    Raises:
        ConfigError: there is no such file.
    """
    if not folder:
        return None
    path = Path(folder) / "model.safetensors"
    if not path.is_file():
        raise ConfigError(
            "there is no model.safetensors to go on from",
            field="--option initial",
            value=folder,
            remedy="name the folder of a checkpoint that was trained before",
        )
    tensors = load_file(path)
    known = tensors.pop("t2d", None)
    tensors.pop("d2t", None)
    ids = torch.arange(vocab_size) if known is None else known.nonzero().flatten()
    return Initial(folder, ids, tensors)


def frequent(counts_V: torch.Tensor, wanted: int | None) -> torch.Tensor:
    """Return [D] the most frequent tokens, by id; of equally frequent ones those with lower ids.

    Args:
        wanted: D; None: what the text has, but no more than ``MOST_TOKENS``.

    Raises:
        ConfigError: it is no number of tokens of the target.
    """
    vocab = len(counts_V)
    if wanted is None:
        wanted = min(vocab, MOST_TOKENS, -(-int((counts_V > 0).sum()) // UNIT) * UNIT)
    if not 0 < wanted <= vocab:
        raise ConfigError(
            f"the target has {vocab} tokens",
            field="--draft-vocab",
            value=wanted,
            remedy=f"use a number from 1 to {vocab}",
        )
    return counts_V.argsort(descending=True, stable=True)[:wanted].sort().values


def layer_sizes(env: TrainerEnv, taps: int) -> LayerSizes:
    """Return the sizes of a layer like the target's own."""
    config, keys = env.config, env.keys
    like = next((g for g in env.groups if g.kind in PLAIN_KINDS and g.num_heads and g.head_size % 2 == 0), None)
    scaling = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    theta, inner = scaling.get("rope_theta") or keys.get("rope_theta"), keys.get("intermediate_size")
    return LayerSizes(
        width=config.hidden_size,
        features=taps * config.hidden_size,
        num_heads=like.num_heads if like else max(1, config.hidden_size // HEAD_SIZE),
        num_kv_heads=like.num_kv_heads if like else max(1, config.hidden_size // HEAD_SIZE),
        head_size=like.head_size if like else HEAD_SIZE,
        inner=env.settings["intermediate_size"] or (inner if isinstance(inner, int) else 3 * config.hidden_size),
        eps=float(keys.get("rms_norm_eps") or 1e-6),
        theta=float(theta) if isinstance(theta, int | float) else 10000.0,
    )
