"""Tiny random models made with transformers' own classes, and the rules by which an engine's tokens are held against
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jackfield.engine.llm import LLM
from jackfield.interfaces import Plugin

TOLERANCE = 1e-4
"""In natural log units: how far below the reference's best logit a token may lie and still count as equal."""
LENGTHS = (1, 9, 40, 77)
SIZES: Mapping[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
NO_TOKENS: Mapping[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
DEFAULTS: Mapping[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 16, "kv_cache_memory": "16MiB"}


@dataclass(frozen=True, slots=True)
class Tiny:
    """A random model: the folder that it was saved to, and the reference, which maps ``input_ids`` [1, T] to an object
    with ``logits`` [1, T, V].
    """

    folder: Path
    model: Any


def make_tiny(folder: Path, architecture: str = "LlamaForCausalLM", **values: Any) -> Tiny:
    """Make, fill and save a random model of a class of transformers.

    Args:
        folder: where to. architecture: name of the class. values: of its configuration, over SIZES; sizes that the
            class does not have are left out.
    """
    import transformers

    model_class = getattr(transformers, architecture)
    config_class = model_class.config_class
    known = config_class()
    sizes = {key: value for key, value in SIZES.items() if hasattr(known, key)}
    torch.manual_seed(17)
    model = model_class(config_class(**{**sizes, **NO_TOKENS, **values})).float().eval()
    randomize(model)
    model.save_pretrained(folder)
    return Tiny(folder, model)


@torch.no_grad()
def randomize(model: Any) -> None:
    """Give biases and norms random values too: transformers starts them at 0 and 1, where mistakes do not show."""
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.normal_(0.0, 0.3)
        elif parameter.dim() == 1 and name.endswith("weight"):
            parameter.normal_(1.0, 0.2)


def random_prompts(lengths: Sequence[int] = LENGTHS, vocab_size: int = 256, seed: int = 0) -> list[list[int]]:
    """Return prompts of random ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def continuation_logits(model: Any, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """Return the reference's logits [N, V] in front of each of the N output tokens, which are forced."""
    ids = torch.tensor([[*prompt, *output[:-1]]])
    logits: torch.Tensor = model(input_ids=ids).logits[0, len(prompt) - 1 :]
    return logits.float()


def assert_greedy(model: Any, prompts: Iterable[Sequence[int]], outputs: Iterable[Sequence[int]]) -> None:
    """Fail at the first token that is neither the reference's choice nor tied with it, or where over 1 % are tied."""
    compared = ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = continuation_logits(model, prompt, output)
        chosen = logits[torch.arange(len(output)), torch.tensor(list(output))]
        best = logits.max(dim=-1)
        gaps = best.values - chosen
        wrong = (gaps > TOLERANCE).nonzero().flatten().tolist()
        assert not wrong, (
            f"prompt of {len(prompt)}: token {wrong[0]} is {output[wrong[0]]}, "
            f"the reference takes {int(best.indices[wrong[0]])}, {float(gaps[wrong[0]]):.2e} ahead"
        )
        compared += len(output)
        ties += int((best.indices != torch.tensor(list(output))).sum())
    assert compared, "nothing was compared"
    assert ties <= 0.01 * compared, f"{ties} of {compared} tokens are tied"


@contextmanager
def engine(folder: Path, plugins: Sequence[type[Plugin]] = (), **settings: Any) -> Iterator[LLM]:
    """Start an engine on token ids; when it is left it must hold nothing: no block, no slot, no request."""
    llm = LLM(str(folder), plugins=plugins, **{**DEFAULTS, **settings})
    try:
        yield llm
        while llm._core.has_work():
            llm._advance()
        llm._core.scheduler.check_idle()
    finally:
        llm.shutdown()
