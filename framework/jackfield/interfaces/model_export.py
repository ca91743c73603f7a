"""ModelExporter: writes a dense model whole, into a container of its own kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.interfaces.facts import TensorFacts

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A dense model as it lies in a folder.

    Args:
        name: what it is called, without where it comes from.
        architecture: HF architecture string.
        config: keys of config.json, with what the user overrides.
        tensors: facts of the tensors that the architecture takes, by name; nothing is known to be superfluous in it.
        read: returns a tensor of that name in the checkpoint's type, on the host.
        tokenizer: folder with the tokenizer's files as transformers saves them, or None where the model has none.
        eos_token_ids: ids that end a generation, besides the tokenizer's own.
        sampling: the model's sampling defaults, by the names of generation_config.json.
    """

    name: str
    architecture: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorFacts]
    read: Callable[[str], torch.Tensor]
    tokenizer: Path | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)


class ModelExporter:
    """Writes dense models whole: weights, configuration and tokenizer, in files that say all of it."""

    def write(self, source: ModelSource, folder: Path) -> None:
        """Write the model.

        Args:
            source: the model. folder: where to; absent or empty, and to be made after all that may be refused. What
                was not finished must be nothing that can be read.

        Raises:
            ConfigError: the container cannot say what the model is.
        """
        raise NotImplementedError
