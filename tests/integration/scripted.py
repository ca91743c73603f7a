"""A model that says a given text: every token has one successor, whatever came before.

The embedding of token t is the unit vector t, all layers add nothing, and row s(t) of the head is the unit vector t.
"""

from __future__ import annotations

from pathlib import Path

import torch
from hf import CLASSES, SIZES, Tiny
from text_model import EOS_ID, add_tokenizer

START = 1
"""The token in front of the text."""
VOCAB = 260


def make_scripted(folder: Path, text: str | bytes, eos: int | list[int] = EOS_ID) -> Tiny:
    """Make a model that says ``text`` (no byte of it twice) behind :data:`START`, and then ends."""
    said = text.encode() if isinstance(text, str) else text
    assert len(set(said)) == len(said) and START not in said, "every token has one successor only"
    successor = {token: (token + 1) % 256 for token in range(VOCAB)}
    successor |= dict(zip((START, *said), (*said, EOS_ID), strict=True))
    config_class, model_class = CLASSES["llama"]
    sizes = {"hidden_size": VOCAB, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8, "eos_token_id": eos}
    model = model_class(config_class(**{**SIZES, **sizes})).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        for token, after in successor.items():
            model.lm_head.weight[after, token] = 1.0
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return Tiny(folder, model)
