"""Flags that benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from jackfield.benchmarking.datasets import Dataset
    from jackfield.benchmarking.statistics import Goal


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class DatasetFlags:
    """Which prompts are sent."""

    dataset: str = "random"
    "`random`, `sharegpt` (a JSON file in that layout) or `prompts` (lines of JSON with prompt or messages)."
    dataset_path: Path | None = None
    "The file, for `sharegpt` and `prompts`."
    num_prompts: int | None = None
    "How many prompts; 100 random ones, or all of a file, when not set."
    input_len: int | None = None
    "Mean tokens of a random prompt; 256 when not set."
    output_len: int | None = None
    "Mean most tokens of an answer; for random prompts 128, for files what they say, when not set."
    range_ratio: float | None = None
    "Random lengths vary evenly by this share of the mean to both sides; 0 when not set."
    prefix_len: int | None = None
    "Tokens that all random prompts begin with, besides their own; 0 when not set."

    def dataset_for(self, seed: int) -> Dataset:
        """Return the data set. Raises ConfigError when flags do not fit together."""
        from jackfield.benchmarking.datasets import Dataset

        return Dataset(
            name=self.dataset,
            path=self.dataset_path,
            num_prompts=self.num_prompts,
            input_len=self.input_len,
            output_len=self.output_len,
            range_ratio=self.range_ratio,
            prefix_len=self.prefix_len,
            seed=seed,
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class DrawFlags:
    """How tokens are drawn; the model's own defaults hold for what is not set."""

    temperature: float | None = None
    "0 takes the most likely token; higher values are more random."
    top_p: float | None = None
    "Draw from the smallest set of tokens with this probability."
    top_k: int | None = None
    "Draw from this many of the most likely tokens."
    min_p: float | None = None
    "Drop tokens below this share of the most likely one's probability."

    def fields(self, *, ignore_eos: bool) -> dict[str, Any]:
        """Return what was set, by the names of SamplingParams."""
        values = {name: getattr(self, name) for name in self.__slots__}
        given = {name: value for name, value in values.items() if value is not None}
        return {**given, "ignore_eos": True} if ignore_eos else given


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ReportFlags:
    """What is reported, and where to."""

    percentiles: str = "90,95,99"
    "Percentiles of latencies, with commas between."
    output: Path | None = None
    "Write the figures to this file, as JSON."

    def parsed_percentiles(self) -> tuple[float, ...]:
        """Return the percentiles. Raises ConfigError."""
        from jackfield.benchmarking.statistics import parse_percentiles

        return parse_percentiles(self.percentiles)

    def check(self) -> None:
        """Raise ConfigError when something is wrong, before anything is measured."""
        from jackfield.cli.remote import check_writable

        self.parsed_percentiles()
        check_writable(self.output, "--output")


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class LoadFlags:
    """How requests arrive at the server."""

    request_rate: float = float("inf")
    "Requests per second; `inf` sends all at once."
    burstiness: float = 1.0
    "Shape of the gaps between requests: 1 is a Poisson process, less is burstier."
    max_concurrency: int | None = None
    "Most requests at a time."
    sweep: str | None = None
    "Run once for each of these numbers, such as 1,2,4,8."
    sweep_by: str = "concurrency"
    "What the sweep changes: `concurrency` or `rate`."


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ServeReportFlags(ReportFlags):
    """What is reported of a server besides."""

    goodput: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = ()
    "Goals of a good request in milliseconds: ttft:MS, tpot:MS, e2el:MS."
    picture: Path | None = None
    "Draw latency against throughput into this file, as SVG."
    detailed: bool = False
    "Write the times of every request to the output file too."

    def goals(self) -> tuple[Goal, ...]:
        """Return the goals. Raises ConfigError."""
        from jackfield.benchmarking.statistics import parse_goals

        return parse_goals(self.goodput)

    def check(self) -> None:
        """Raise ConfigError when something is wrong, before anything is measured."""
        from jackfield.cli.remote import check_writable

        # Without super(): slots make a new class, which the argument-less form does not know.
        ReportFlags.check(self)
        self.goals()
        check_writable(self.picture, "--picture")
        if self.detailed and self.output is None:
            raise ConfigError(
                "details are written to a file", field="--detailed", value=True, remedy="name it with --output"
            )
