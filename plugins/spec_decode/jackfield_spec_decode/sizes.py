"""Draft checkpoints that read the target's hidden states fit one target only."""

from __future__ import annotations

from jackfield.errors import ConfigError
from jackfield.interfaces import DrafterEnv, Option, TextConfig

TREE_WIDTH = Option(int, 0, "most children of a draft, where drafts are to branch; 0: a chain", tuple(range(17)))


def check_sizes(env: DrafterEnv, config: TextConfig) -> None:
    """Refuse a checkpoint that was made for a target of other sizes.

    Raises:
        ConfigError: width or vocabulary differ.
    """
    asked = env.request
    for name, mine, wanted in (
        ("hidden size", config.hidden_size, asked.hidden_size),
        ("vocabulary", config.vocab_size, asked.vocab_size),
    ):
        if mine != wanted:
            raise ConfigError(
                f"the draft checkpoint is made for a target whose {name} is {mine}, and this one's is {wanted}",
                field="speculative.model",
                value=asked.model,
                remedy="name a checkpoint that was trained for this target",
            )
