"""``jackfield chat``."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags
from jackfield.cli.sampling import SamplingFlags

_NOTHING = SamplingFlags()


def chat(
    model: str,
    *,
    message: str | None = None,
    system: str | None = None,
    sampling: SamplingFlags = _NOTHING,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """Talk with a model. Answers are streamed; an empty line or Ctrl-D ends the talk.

    Parameters
    ----------
    model
        A folder, a file, hf:ORG/NAME or pypi:NAME.
    message
        Ask this, print the answer, and end.
    system
        A message that tells the model how to answer.
    """
    from jackfield.cli.engine import open_engine

    config = engine.config(model)
    llm = open_engine(config)
    params = sampling.params(llm)
    messages = [{"role": "system", "content": system}] if system else []
    if message is not None:
        _turn(llm, messages, message, params)
    else:
        _talk(llm, messages, params)
    return 0


def _talk(llm: Any, messages: list[dict[str, str]], params: Any) -> None:
    while question := _ask():
        _turn(llm, messages, question, params)


def _ask() -> str:
    sys.stderr.write("> ")
    sys.stderr.flush()
    return sys.stdin.readline().strip()


def _turn(llm: Any, messages: list[dict[str, str]], question: str, params: Any) -> None:
    from jackfield.cli.output import Clock, stream_text, tell

    messages.append({"role": "user", "content": question})
    clock = Clock()
    answer, tokens = stream_text(llm.stream(messages, params))
    messages.append({"role": "assistant", "content": answer})
    tell(f"{clock.line(tokens)} · {llm.report.summary()}")
