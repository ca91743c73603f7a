"""The reference: HF transformers in float32, and the rules by which an engine's tokens are held against it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

TOLERANCE = 1e-4
"""In natural log units: how far below the reference's best logit a token may lie and still count as equal."""

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW = 24

CLASSES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@dataclass(frozen=True)
class Tiny:
    """A random model: the folder it was saved to, and the reference."""

    folder: Path
    model: Any


def make_tiny(folder: Path, kind: str, *, shard: str = "1GB", **changes: Any) -> Tiny:
    """Make, fill and save a random model of about 100 thousand parameters; ``shard`` is the largest file."""
    config_class, model_class = CLASSES[kind]
    torch.manual_seed(17)
    model = model_class(config_class(**{**SIZES, **changes})).float().eval()
    randomize(model)
    model.save_pretrained(folder, max_shard_size=shard)
    return Tiny(folder, model)


def randomize(model: PreTrainedModel) -> None:
    """Give biases and norms random values too: transformers starts them at 0 and 1, where mistakes do not show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.normal_(1.0, 0.2)


def random_prompts(lengths: Sequence[int], vocab_size: int = 256, seed: int = 0) -> list[list[int]]:
    """Return prompts of random ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def continuation_logits(model: Any, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """Return the reference's logits [N, V] in front of each of the N output tokens, which are forced."""
    ids = torch.tensor([[*prompt, *output[:-1]]])
    logits: torch.Tensor = model(input_ids=ids).logits[0, len(prompt) - 1 :]
    return logits.float()


@dataclass
class Equality:
    """Counts how tokens compare: ``ties`` were not the reference's first choice, but within the tolerance of it."""

    tokens: int = 0
    ties: int = 0

    def add(self, model: Any, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Compare one output; fails at the first token that is neither first nor tied."""
        logits = continuation_logits(model, prompt, output)
        best = logits.max(dim=-1)
        chosen = logits[torch.arange(len(output)), torch.tensor(list(output))]
        gaps = best.values - chosen
        wrong = (gaps > TOLERANCE).nonzero().flatten().tolist()
        assert not wrong, (
            f"prompt of {len(prompt)}: token {wrong[0]} is {output[wrong[0]]}, "
            f"the reference takes {int(best.indices[wrong[0]])}, {float(gaps[wrong[0]]):.2e} ahead"
        )
        self.tokens += len(output)
        self.ties += int((best.indices != torch.tensor(list(output))).sum())

    def finish(self) -> None:
        """Add the counts to the session's; fails when nothing was compared or more than 1 % of the tokens are tied."""
        TOTAL.tokens += self.tokens
        TOTAL.ties += self.ties
        assert self.tokens
        assert self.ties <= 0.01 * self.tokens, f"{self.ties} of {self.tokens} tokens are tied"


TOTAL = Equality()
"""All comparisons of the session, for the line that ends it."""


def assert_equal(model: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
    """Compare all outputs with the reference."""
    equality = Equality()
    for prompt, output in zip(prompts, outputs, strict=True):
        equality.add(model, prompt, output)
    equality.finish()


def assert_logprobs(model: Any, prompt: Sequence[int], completion: Any, count: int) -> None:
    """Compare an output's log probabilities with the reference's log-softmax: values, ranks and who is on top."""
    reference = continuation_logits(model, prompt, completion.token_ids).log_softmax(dim=-1)
    assert len(completion.logprobs) == len(completion.token_ids)
    for token, entry, row in zip(completion.token_ids, completion.logprobs, reference, strict=True):
        assert token in entry
        assert count <= len(entry) <= count + 1
        found = {id_: one.logprob for id_, one in entry.items()}
        assert found == {id_: _close(float(row[id_])) for id_ in entry}
        top = sorted(found.values(), reverse=True)[:count]
        assert top == [_close(float(value)) for value in row.topk(count).values]


def _close(value: float) -> Any:
    import pytest

    return pytest.approx(value, abs=TOLERANCE)


def changed_copy(folder: Path, target: Path, **changes: Any) -> str:
    """Copy a model with other keys in its config.json."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return str(target)
