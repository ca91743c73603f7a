"""Rules between fields, and what the interfaces allow but nothing serves yet."""

from __future__ import annotations

from collections.abc import Iterator

from jackfield.config.engine import EngineConfig
from jackfield.config.origin import Problem, raise_problems
from jackfield.errors import ConfigError


def check(config: EngineConfig) -> None:
    """Refuse settings that contradict each other, that would do nothing, or that nothing serves yet.

    Raises:
        ConfigError: lists all of them.
    """
    raise_problems([*_unsupported(config), *_contradictions(config), *_inert(config)])


def require_model(config: EngineConfig) -> str:
    """Return the model's name.

    Raises:
        ConfigError: no model is set.
    """
    if not config.model.model:
        remedy = "name one: a folder, a file, hf:ORG/NAME or pypi:NAME"
        raise ConfigError("no model is set", field="model.model", value="", remedy=remedy)
    return config.model.model


def _problem(config: EngineConfig, field: str, message: str, remedy: str) -> Problem:
    return Problem(field, message, config.get(field), remedy, config.origin(field))


def _unsupported(config: EngineConfig) -> Iterator[Problem]:
    for field in ("parallel.tensor_parallel_size", "parallel.pipeline_parallel_size"):
        if config.get(field) > 1:
            message = f"{field} = {config.get(field)}: there is no executor for it yet"
            yield _problem(config, field, message, "leave it at 1")
    if config.model.trust_remote_code:
        message = "code that comes with a checkpoint cannot be run yet"
        yield _problem(
            config, "model.trust_remote_code", message, "leave it out; install a plugin for the architecture"
        )


def _contradictions(config: EngineConfig) -> Iterator[Problem]:
    tokens, sequences = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    if tokens is not None and tokens < sequences:
        message = f"a step of {tokens} tokens cannot hold {sequences} sequences"
        remedy = f"set scheduler.max_num_seqs to at most {tokens}, or raise scheduler.max_num_batched_tokens"
        yield _problem(config, "scheduler.max_num_batched_tokens", message, remedy)
    names = config.sampling.logits_processors
    if twice := sorted({name for name in names if names.count(name) > 1}):
        message = f"logits processors are named twice: {', '.join(twice)}"
        yield _problem(config, "sampling.logits_processors", message, "name each once")


def _inert(config: EngineConfig) -> Iterator[Problem]:
    if config.cache.kv_events and not config.cache.enable_prefix_caching:
        message = "cache.kv_events does nothing without prefix caching"
        yield _problem(config, "cache.kv_events", message, "leave cache.enable_prefix_caching on")
    if config.speculative.method is not None:
        return
    for name, info in type(config.speculative).model_fields.items():
        field = f"speculative.{name}"
        if config.get(field) != info.default:
            yield _problem(
                config, field, f"{field} does nothing without a method", "set speculative.method to a drafter"
            )
