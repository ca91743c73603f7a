"""Data sets by name: ``random``, ``sharegpt`` and ``prompts``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from jackfield.benchmarking.prompt_files import choose, read_conversations, read_prompts
from jackfield.benchmarking.prompts import RandomShape, Sample, Vocabulary, probe_text, random_samples, vocabulary
from jackfield.errors import ConfigError, did_you_mean

DATASETS = ("random", "sharegpt", "prompts")
RANDOM_COUNT, INPUT_LEN, OUTPUT_LEN = 100, 256, 128
"""What holds for random prompts when nothing is said."""
_CHARACTERS_PER_TOKEN = 4
"""About right for English, where no tokenizer can be asked."""

Tokenize = Callable[[str], Awaitable[list[int] | None]]
"""Returns the ids of a text without special tokens, or None when there is no tokenizer to ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Which prompts a benchmark sends. What is None was not said.

    Raises:
        ConfigError: the name is unknown, or flags do not fit the data set; all of these are named.
    """

    name: str = "random"
    path: Path | None = None
    num_prompts: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float | None = None
    prefix_len: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            remedy = did_you_mean(self.name, DATASETS) or f"data sets are {', '.join(DATASETS)}"
            raise ConfigError("unknown data set", field="--dataset", value=self.name, remedy=remedy)
        self._check_flags()
        least = {"--num-prompts": (self.num_prompts, 1), "--output-len": (self.output_len, 1), "--seed": (self.seed, 0)}
        for flag, (value, number) in least.items():
            if value is not None and value < number:
                raise ConfigError(f"must be at least {number}", field=flag, value=value, remedy=f"raise {flag}")

    def _check_flags(self) -> None:
        random_only = {
            "--input-len": self.input_len,
            "--range-ratio": self.range_ratio,
            "--prefix-len": self.prefix_len,
        }
        without = {"--dataset-path": self.path} if self.name == "random" else random_only
        wrong = [flag for flag, value in without.items() if value is not None]
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)} has no meaning for the data set '{self.name}'",
                field="--dataset",
                value=self.name,
                remedy="leave it out, or choose another data set",
            )
        if self.name != "random" and self.path is None:
            text = f"the data set '{self.name}' is read from a file"
            raise ConfigError(text, field="--dataset-path", value=None, remedy="name it with --dataset-path")

    async def samples(self, tokenize: Tokenize, *, text: bool = False) -> list[Sample]:
        """Return the prompts. ``text`` makes random ones texts even where token ids could be had.

        Raises:
            ConfigError: the file or a length is at fault.
        """
        return (await self.turns(tokenize, 1, text=text))[0]

    async def turns(self, tokenize: Tokenize, count: int, *, text: bool = False) -> list[list[Sample]]:
        """Return the prompts of ``count`` runs: new random ones for each, or those of the file each time. See
        :meth:`samples`.
        """
        if self.name != "random":
            return [await self._of_file(tokenize)] * count
        words, number = await _vocabulary(tokenize), self.num_prompts or RANDOM_COUNT
        shape = self.shape()
        return [random_samples(shape, words, number, self.seed, text=text, turn=turn) for turn in range(count)]

    async def _of_file(self, tokenize: Tokenize) -> list[Sample]:
        assert self.path is not None
        if self.name == "prompts":
            return read_prompts(self.path, self.num_prompts, self.output_len)
        pairs = choose(read_conversations(self.path), self.num_prompts, self.seed, self.path)
        return [Sample(question, output_len=await self._answer_len(answer, tokenize)) for question, answer in pairs]

    def shape(self) -> RandomShape:
        """Return the lengths of random prompts."""
        return RandomShape(
            input_len=INPUT_LEN if self.input_len is None else self.input_len,
            output_len=self.output_len or OUTPUT_LEN,
            range_ratio=self.range_ratio or 0.0,
            prefix_len=self.prefix_len or 0,
        )

    async def _answer_len(self, answer: str, tokenize: Tokenize) -> int:
        if self.output_len is not None:
            return self.output_len
        ids = await tokenize(answer)
        return max(1, len(answer) // _CHARACTERS_PER_TOKEN if ids is None else len(ids))


async def _vocabulary(tokenize: Tokenize) -> Vocabulary:
    ids = await tokenize(probe_text())
    return vocabulary(ids) if ids else Vocabulary()
