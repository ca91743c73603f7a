"""``jackfield train-drafter``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from jackfield.training import TrainingResult, TrainingStep
    from jackfield.training.train import Tell

_QUIET_SECONDS = 5.0
"""Between two lines of progress."""


def train_drafter(
    model: str,
    *,
    method: str,
    text: Path,
    output: Annotated[Path, Parameter(name=["--out", "--output"])],
    steps: int | None = None,
    epochs: int | None = None,
    batch_tokens: int = 4096,
    learning_rate: float | None = None,
    max_length: int | None = None,
    holdout: float = 0.05,
    draft_vocab: int | None = None,
    heads: int | None = None,
    train_head: Annotated[bool, Parameter(negative="")] = False,
    option: Annotated[list[str] | None, Parameter(negative="")] = None,
    json: Annotated[bool, Parameter(negative="")] = False,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """Train a draft checkpoint for a model, print how often its drafts are right, before and after, and the folder.

    The model is run as for generating: --seed makes a training on a processor repeatable, --dtype is the model's type
    of computation, --platform.force the device.

    Parameters
    ----------
    model
        The target: a folder, a file, hf:ORG/NAME or pypi:NAME.
    method
        Name of a drafter that can be trained (eagle3, medusa).
    text
        Lines of JSON with text or token_ids, or lines of plain text; one document each. Best is what the model itself
        wrote, chat template included.
    output
        Folder to write; new or empty. It is what speculative.model takes.
    steps
        Steps to train, in place of epochs.
    epochs
        Times through the text; 2 when neither is given.
    batch_tokens
        Tokens of a step. Memory grows with it.
    learning_rate
        The highest; the drafter has its own.
    max_length
        Tokens of a piece of text; longer documents are cut into pieces. 1024, or what the model and a step take.
    holdout
        Share of the documents that drafts are measured on, and that nothing is learnt from.
    draft_vocab
        Tokens of the drafter's head, the most frequent ones of the text (eagle3); at most 16384 when not given.
    heads
        Drafts in a row that are learnt: heads of medusa, steps that eagle3 is unrolled.
    train_head
        Learn a projection to the vocabulary for each head, in place of the target's for all (medusa).
    option
        Any other training option of the drafter, as NAME=VALUE.
    json
        Print the figures as JSON.
    """
    named = {"draft_vocab": draft_vocab, "heads": heads, "train_head": train_head or None}
    options = {**_options(option or ()), **{name: value for name, value in named.items() if value is not None}}
    config = engine.config(model)
    from jackfield.training import TrainingSettings
    from jackfield.training import train_drafter as train

    settings = TrainingSettings(
        steps=steps,
        epochs=epochs,
        batch_tokens=batch_tokens,
        learning_rate=learning_rate,
        max_length=max_length,
        holdout=holdout,
        options=options,
    )
    with _progress() as (loading, tell):
        result = train(None, text, output, method=method, training=settings, config=config, progress=loading, tell=tell)
    _print(result, as_json=json)
    return 0


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Return options out of NAME=VALUE, whose values are read as JSON where they are JSON."""
    import msgspec

    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(
                "an option has no value", field="--option", value=word, remedy="write --option NAME=VALUE"
            )
        try:
            found[name.replace("-", "_")] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[name.replace("-", "_")] = value
    return found


@contextmanager
def _progress() -> Iterator[tuple[Any, Tell]]:
    """Give callbacks for bytes that are loaded, which are bars on stderr, and for steps: the first, the last, and now
    and then one between them is a line there.
    """
    from jackfield.cli.output import progress_bars, tell

    told = [-_QUIET_SECONDS]

    def line(step: TrainingStep) -> None:
        now = time.monotonic()
        if step.step in (1, step.steps) or now - told[0] >= _QUIET_SECONDS:
            told[0] = now
            tell(f"step {step.step} of {step.steps}: loss {step.loss:.3f}, {step.tokens} tokens")

    with progress_bars() as loading:
        yield loading, line


def _print(result: TrainingResult, *, as_json: bool) -> None:
    from jackfield.cli.output import tell
    from jackfield.cli.tables import print_json, print_table

    if as_json:
        print_json(asdict(result))
        return
    before, after = result.before, result.after
    if before is not None and after is not None:
        rows = [
            (str(place), f"{old:.1%}", f"{new:.1%}")
            for place, (old, new) in enumerate(zip(before.places, after.places, strict=True), 1)
        ]
        rows.append(("in a row", f"{before.accepted:.2f}", f"{after.accepted:.2f}"))
        print_table(("draft", "right before", "right after"), rows)
    tell(f"{result.steps} steps, {result.tokens} tokens in {result.seconds:.0f} s, loss {result.loss:.3f}")
    print(result.folder)
