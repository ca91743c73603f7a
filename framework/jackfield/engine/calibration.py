"""What linear layers are given when a model reads texts: what calibrated writers of checkpoints want to know.

Legend: T tokens, O outputs, I inputs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jackfield.config import EngineConfig
from jackfield.engine.llm import LLM
from jackfield.engine.setup import Progress
from jackfield.errors import ConfigError
from jackfield.executor.in_process import InProcessExecutor
from jackfield.interfaces import WeightMap, WeightRule
from jackfield.layers.functional import settled
from jackfield.layers.linear import Linear
from jackfield.loader.arrange import arrange
from jackfield.protocol import SamplingParams
from jackfield.tokenizer import Tokenizer

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""In a module's path: the layer it belongs to. Layers are calibrated one after another, each with what those before it
give once they are quantized (arXiv:2210.17323, section 3.3).
"""


@dataclass(frozen=True, slots=True)
class Texts:
    """What to calibrate with.

    Args:
        file: a text. samples: most pieces that are read of it. length: tokens of a piece.
    """

    file: Path
    samples: int = 128
    length: int = 512

    def pieces(self, tokenizer: Tokenizer, longest: int) -> list[list[int]]:
        """Return pieces of the text, from its beginning, one after another.

        Raises:
            ConfigError: the file cannot be read, or has not one piece, or a number is not positive.
        """
        for name, value in (("samples", self.samples), ("sample_length", self.length)):
            if value < 1:
                raise ConfigError(f"{name} is no positive number", field=name, value=value, remedy="use 1 or more")
        try:
            ids = tokenizer.encode(self.file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise self._unfit(f"the text cannot be read: {error}") from None
        size = min(self.length, longest - 1)
        found = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)][: self.samples]
        if size < 1 or not found:
            raise self._unfit(f"the text has {len(ids)} tokens, and not one piece of {size}")
        return found

    def _unfit(self, message: str) -> ConfigError:
        return ConfigError(message, field="text", value=str(self.file), remedy="name a longer text in UTF-8")


class Calibration:
    """A model in its own numbers, whose layers are watched, and become what they are quantized to.

    Args:
        config: of the model; what it says on quantization is left out, since this is about dense weights. texts: to
            read. weights: where the checkpoint's tensors go. progress: told of weights being loaded.

    Raises:
        JackfieldError: as for an engine.
    """

    def __init__(
        self, config: EngineConfig, texts: Texts, weights: WeightMap, progress: Progress | None = None
    ) -> None:
        cache = config.cache.model_copy(update={"enable_prefix_caching": False})
        plain = {"quantization": type(config.quantization)(), "cache": cache}
        self._llm = LLM(config=config.model_copy(update=plain), progress=progress)
        executor = self._llm._core._executor
        assert isinstance(executor, InProcessExecutor), "an engine of this process runs its model here"
        modules = executor.worker.watched_model().modules()
        self._layers = {module.path: module for module in modules if isinstance(module, Linear)}
        self._rules: dict[str, list[WeightRule]] = {}
        for source, rule in weights.named():
            self._rules.setdefault(source, []).append(rule)
        try:
            self._pieces = texts.pieces(self._llm.get_tokenizer(), self._llm.max_model_len)
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Free the model."""
        self._llm.shutdown()

    def stages(self, modules: Collection[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield, layer by layer in the model's order, what the layer's modules are given: the mean product of every two
        inputs, float32 [I, I], by checkpoint module. A stage is computed when it is asked for.
        """
        targets = {self._rules[module][0].target for module in modules}
        stages: dict[str, list[str]] = {}
        for path in self._layers:
            if path in targets:
                found = LAYER.search(path)
                stages.setdefault(found[0] if found else path, []).append(path)
        for paths in stages.values():
            moments = self._moments(paths)
            yield {m: moments[t] for m in sorted(modules) if (t := self._rules[m][0].target) in moments}

    def replace(self, module: str, weight_OI: torch.Tensor) -> None:
        """Let a checkpoint module's matrix be another one from now on."""
        for rule in self._rules[module]:
            layer = self._layers[rule.target]
            layer.load(rule.shard, "weight", arrange(weight_OI, rule, layer, "weight"))

    def _moments(self, paths: Sequence[str]) -> dict[str, torch.Tensor]:
        sums: dict[str, torch.Tensor] = {}
        counts = dict.fromkeys(paths, 0)

        def watch(module: Linear, arguments: tuple[Any, ...]) -> None:
            x_TI = settled(arguments[0]).detach().float()
            product = x_TI.t() @ x_TI
            sums[module.path] = sums[module.path].add_(product) if module.path in sums else product
            counts[module.path] += len(x_TI)

        hooks = [self._layers[path].register_forward_pre_hook(watch) for path in paths]
        try:
            self._llm.generate(self._pieces, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
        finally:
            for hook in hooks:
                hook.remove()
        idle = [path for path in paths if not counts[path]]
        if idle:
            raise ConfigError(
                "no text reaches some layers of the model",
                field="quantization",
                value=", ".join(idle[:10]),
                remedy="leave them out with the method's option ignore",
            )
        return {path: sums[path] / counts[path] for path in paths}
