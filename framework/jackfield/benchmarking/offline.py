"""Benchmarks without a server: latency of one batch, and throughput of many prompts, through LLM in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jackfield.benchmarking.datasets import Dataset
from jackfield.benchmarking.prompts import Sample
from jackfield.benchmarking.statistics import PERCENTILES, summary
from jackfield.engine.llm import LLM
from jackfield.engine.outputs import RequestOutput
from jackfield.errors import ConfigError
from jackfield.protocol import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How often the work is done: ``warmup`` times unmeasured, ``iterations`` times measured.

    Raises:
        ConfigError: a number is too small.
    """

    warmup: int
    iterations: int

    def __post_init__(self) -> None:
        for flag, value, least in (("--warmup", self.warmup, 0), ("--iterations", self.iterations, 1)):
            if value < least:
                raise ConfigError(f"must be at least {least}", field=flag, value=value, remedy=f"raise {flag}")


@dataclass(slots=True)
class Work:
    """Prompts and their sampling parameters, ready to run."""

    prompts: list[Any]
    params: list[SamplingParams]


@dataclass(slots=True)
class Round:
    """One time through the work: seconds it took, and the outputs."""

    seconds: float
    outputs: list[RequestOutput]


async def make_work(llm: LLM, dataset: Dataset, fields: dict[str, Any]) -> Work:
    """Return the prompts of a data set for ``llm``.

    Args:
        fields: sampling parameters that were set; answers without a length of their own get the model's default.

    Raises:
        JackfieldError: the data set or a parameter is at fault.
    """
    tokenizer = llm.get_tokenizer()

    async def tokenize(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    samples = await dataset.samples(tokenize)
    params = [llm.default_sampling_params(**_limited(sample, fields)) for sample in samples]
    return Work([_prompt(sample, tokenizer) for sample in samples], params)


def run_rounds(llm: LLM, work: Work, repeats: Repeats, on_end: Callable[[], object] = lambda: None) -> list[Round]:
    """Run the work and return the measured rounds. Prefixes that earlier rounds left in the cache are forgotten first,
    so that every round computes all its prompts. Interrupting it returns the rounds that were whole.
    """
    rounds = []
    try:
        for number in range(repeats.warmup + repeats.iterations):
            if not llm.reset_prefix_cache():
                raise AssertionError("a round begins while requests run")
            start = time.perf_counter()
            outputs = llm.generate(work.prompts, work.params)
            if number >= repeats.warmup:
                rounds.append(Round(time.perf_counter() - start, outputs))
            on_end()
    except KeyboardInterrupt:
        if not rounds:
            raise
    return rounds


def offline_report(rounds: Sequence[Round], percentiles: Iterable[float] = PERCENTILES) -> dict[str, Any]:
    """Return the figures of rounds: time of a round (``latency``), rates over all of them, and times of requests."""
    percentiles = list(percentiles)
    all_outputs = [output for one in rounds for output in one.outputs]
    outputs = [output for output in all_outputs if not _failed(output)]
    seconds = sum(one.seconds for one in rounds)
    taken = sum(len(output.prompt_token_ids) for output in outputs)
    made = sum(_made(output) for output in outputs)
    report: dict[str, Any] = {
        "rounds": len(rounds),
        "duration": round(seconds, 4),
        "completed": len(outputs),
        "failed": len(all_outputs) - len(outputs),
        "total_input_tokens": taken,
        "total_output_tokens": made,
        "request_throughput": round(len(outputs) / seconds, 4),
        "input_throughput": round(taken / seconds, 4),
        "output_throughput": round(made / seconds, 4),
        "total_token_throughput": round((taken + made) / seconds, 4),
        **summary("latency", [one.seconds for one in rounds], percentiles),
    }
    for name, values in _times(outputs).items():
        report |= summary(name, values, percentiles)
    return report


def _limited(sample: Sample, fields: dict[str, Any]) -> dict[str, Any]:
    return fields if sample.output_len is None else {**fields, "max_tokens": sample.output_len}


def _prompt(sample: Sample, tokenizer: Any) -> Any:
    if sample.messages is not None:
        return {"prompt_token_ids": tokenizer.apply_chat_template(sample.messages, True, None, tokenize=True)}
    return {"prompt_token_ids": sample.prompt} if isinstance(sample.prompt, list) else sample.prompt


def _failed(output: RequestOutput) -> bool:
    return any(completion.finish_reason in ("error", "abort") for completion in output.outputs)


def _made(output: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in output.outputs)


def _times(outputs: Iterable[RequestOutput]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2el": []}
    for output in outputs:
        seen = output.metrics
        if seen.first_token is None or seen.last_token is None:
            continue
        times["ttft"].append(seen.first_token - seen.arrival)
        times["e2el"].append(seen.last_token - seen.arrival)
        if _made(output) > 1:
            times["tpot"].append((seen.last_token - seen.first_token) / (_made(output) - 1))
    return times
