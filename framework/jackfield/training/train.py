"""Trains a draft checkpoint for a target, and writes it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from jackfield.checkpoint import overridden
from jackfield.config import EngineConfig
from jackfield.engine.core import worker_spec
from jackfield.engine.save_state import check_empty
from jackfield.engine.setup import Prepared, Progress, prepare
from jackfield.errors import ConfigError, did_you_mean
from jackfield.interfaces import Drafter, DraftTrainer, Plugin, Settings, TrainedDraft, TrainerEnv, TrainingBatch
from jackfield.registry import Registry
from jackfield.registry.options import resolve_options
from jackfield.training.batches import ROWS, Batch, batches, plan
from jackfield.training.loop import TrainingStep, learn
from jackfield.training.measure import Measured, measure
from jackfield.training.settings import TrainingSettings
from jackfield.training.target import LoadedTarget, RunLimits, TargetRunner
from jackfield.training.texts import Document, Piece, pieces_of, read_documents, split

EPOCHS = 2
"""Times through the text, where the user says nothing."""
Tell = Callable[[TrainingStep], None]


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What came of a training: the folder, accuracies before and after (None without documents held out), and costs."""

    folder: Path
    steps: int
    tokens: int
    loss: float
    seconds: float
    before: Measured | None
    after: Measured | None


def train_drafter(
    model: str | None,
    text: str | Path,
    output: str | Path,
    *,
    method: str,
    training: TrainingSettings | None = None,
    config: EngineConfig | None = None,
    plugins: Sequence[type[Plugin]] = (),
    progress: Progress | None = None,
    tell: Tell | None = None,
    **settings: Any,
) -> TrainingResult:
    """Train a draft checkpoint on a file of texts and write it into a new or empty folder.

    Args:
        model, config, settings, plugins, progress: the target, as for :class:`jackfield.LLM`; ``seed`` is the
            training's too. text: see :func:`jackfield.training.texts.read_documents`. output: the folder.
        method: the drafter's name. training: how. tell: told of every step.

    Raises:
        ConfigError: the folder is not empty, a setting or the text is wrong, the drafter cannot be trained, or the
            training diverged. JackfieldError: as for an engine.
    """
    wish, path, folder = training or TrainingSettings(), Path(text), Path(output)
    wish.check()
    check_empty(folder)
    documents = read_documents(path)
    ids_only = all(isinstance(document, list) for document in documents)
    prepared = prepare(model, config, settings, plugins=plugins, skip_tokenizer_init=ids_only, progress=progress)
    drafter, options = trainable_drafter(prepared.registry, method, wish.options)
    seed = prepared.resolution.config.model.seed or 0
    length = _piece_length(prepared, wish)
    learnt, held = _split(prepared, documents, wish, length, path)
    with torch.random.fork_rng(devices=[]):
        # Of the processor alone: everything is drawn there.
        torch.default_generator.manual_seed(seed)
        work = _Work(prepared, drafter, options, wish, learnt, length, progress)
        return work.train(held, folder, seed, tell)


def trainable_drafter(registry: Registry, method: str, options: Mapping[str, Any]) -> tuple[type[Drafter], Settings]:
    """Return the drafter of a name, and its training options.

    Raises:
        ConfigError: there is none of that name, it cannot be trained, or an option is wrong. PluginError: it does not
            load.
    """
    refs = {ref.name: ref for ref in registry.refs("drafters") if ref.usable}
    plugin = refs[method].require() if method in refs else None
    if plugin is None or not _is_trainable(plugin):
        able = [name for name, ref in refs.items() if _is_trainable(ref.load())]
        hint = did_you_mean(method, able) if plugin is None else ""
        raise ConfigError(
            f"there is no drafter '{method}'" if plugin is None else f"the drafter '{method}' cannot be trained",
            field="--method",
            value=method,
            remedy=f"{hint} drafters that can be trained: {', '.join(able) or 'none'}".strip(),
        )
    assert issubclass(plugin, Drafter)
    return plugin, resolve_options(method, plugin.training_options, options, field="--option {key}")


def write_draft(folder: Path, draft: TrainedDraft, dtype: torch.dtype) -> None:
    """Write a draft checkpoint: tensors of floating point in ``dtype``, others as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in draft.tensors.items():
        stored = tensor.detach().cpu()
        tensors[name] = stored.to(dtype).contiguous() if stored.is_floating_point() else stored.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {**draft.config, "torch_dtype": str(dtype).removeprefix("torch.")}
    # Last, so that a folder that was not finished is none that can be read.
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _Work:
    """A training from the loaded target to the written checkpoint."""

    def __init__(
        self,
        prepared: Prepared,
        drafter: type[Drafter],
        options: Settings,
        wish: TrainingSettings,
        learnt: Sequence[Piece],
        length: int,
        progress: Progress | None,
    ) -> None:
        self._prepared, self._drafter, self._options = prepared, drafter, options
        self._wish, self._learnt = wish, learnt
        spec = worker_spec(replace(prepared.resolution, drafter=None))
        self._dtype = torch.float16 if spec.dtype == "float16" else torch.bfloat16
        name = Path(spec.facts.path).name
        loading = None if progress is None else lambda done, total: progress(name, done, total)
        self._trainer: DraftTrainer
        self._runner = TargetRunner(spec, RunLimits(ROWS, wish.batch_tokens, length), self._begin, loading)
        device = self._runner.device.type
        self._narrow = torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu")

    def train(self, held: Sequence[Piece], folder: Path, seed: int, tell: Tell | None) -> TrainingResult:
        """Measure, learn, measure, and write."""
        began, before = time.monotonic(), self._measure(held)
        wish, trainer = self._wish, self._trainer
        lengths = [len(piece) for piece in self._learnt]
        planned = plan(lengths, wish.batch_tokens, seed, wish.steps, wish.epochs or EPOCHS)
        highest = wish.learning_rate or trainer.learning_rate
        last = TrainingStep(0, len(planned), math.nan, 0, 0.0)
        for last in learn(trainer, self._run(planned, self._learnt), len(planned), highest, self._narrow):
            if tell is not None:
                tell(last)
        after = self._measure(held)
        write_draft(folder, trainer.checkpoint(), self._dtype)
        return TrainingResult(folder, last.step, last.tokens, last.loss, time.monotonic() - began, before, after)

    def _begin(self, target: LoadedTarget) -> Sequence[int]:
        """Make the trainer, and return the layers that it looks at."""
        resolution = self._prepared.resolution
        config, architecture = resolution.model_config, resolution.architecture
        counts = torch.zeros(config.vocab_size, dtype=torch.int64)
        for piece in self._learnt:
            counts += torch.bincount(torch.from_numpy(piece), minlength=config.vocab_size)
        env = TrainerEnv(
            target=target,
            config=config,
            keys=_keys(self._prepared),
            groups=architecture.attention_groups(config),
            counts=counts,
            device=target.device,
            settings=self._options,
        )
        self._trainer = self._drafter.trainer(env)
        if self._trainer.taps and "taps" not in architecture.features:
            raise ConfigError(
                f"{self._drafter.name} looks at layers of the target, and {architecture.name} shows none",
                field="--method",
                value=self._drafter.name,
                remedy="use a method that needs the last hidden state alone",
            )
        return self._trainer.taps

    def _measure(self, held: Sequence[Piece]) -> Measured | None:
        if not held:
            return None
        chosen = batches([len(piece) for piece in held], self._wish.batch_tokens, range(len(held)))
        with self._narrow:
            return measure(self._trainer, self._run(chosen, held))

    def _run(self, chosen: Sequence[Batch], pieces: Sequence[Piece]) -> Iterator[TrainingBatch]:
        for batch in chosen:
            yield self._runner.run([pieces[at] for at in batch])


def _is_trainable(plugin: type[Plugin] | None) -> bool:
    return plugin is not None and issubclass(plugin, Drafter) and plugin.trainable


def _piece_length(prepared: Prepared, wish: TrainingSettings) -> int:
    config, size = prepared.resolution.config, prepared.resolution.model_config
    return wish.piece_length(min(size.max_position, config.model.max_model_len or size.max_position))


def _split(
    prepared: Prepared, documents: Sequence[Document], wish: TrainingSettings, length: int, path: Path
) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces to learn from, and those to measure on."""
    resolution = prepared.resolution
    cut = pieces_of(documents, prepared.tokenizer, resolution.model_config.vocab_size, length, path)
    return split(cut, wish.holdout, resolution.config.model.seed or 0, path)


def _keys(prepared: Prepared) -> Mapping[str, Any]:
    """Return the keys of the target's config.json, translated where it is a GGUF file."""
    resolution = prepared.resolution
    facts, keys = resolution.facts, resolution.facts.config
    if facts.container == "gguf":
        shapes = {name: tensor.shape for name, tensor in facts.tensors.items()}
        keys = resolution.architecture.gguf_config(keys, shapes)
    return overridden(keys, resolution.config.model.hf_overrides)
