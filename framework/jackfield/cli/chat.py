"""``jackfield chat``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags
from jackfield.cli.sampling import SamplingFlags

_NOTHING = SamplingFlags()

Messages = list[dict[str, str]]
Answer = Callable[[Messages], str]
"""Prints the answer to a conversation and returns its text."""


def chat(
    model: str | None = None,
    *,
    url: str | None = None,
    message: str | None = None,
    system: str | None = None,
    sampling: SamplingFlags = _NOTHING,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """Talk with a model. Answers are streamed; an empty line or Ctrl-D ends the talk.

    Parameters
    ----------
    model
        A folder, a file, hf:ORG/NAME or pypi:NAME. With a URL: its name there; the server's first one when not given.
    url
        Talk with a server that runs already; its key is `--api-key` or JACKFIELD_API_KEY.
    message
        Ask this, print the answer, and end.
    system
        A message that tells the model how to answer.
    """
    messages = [{"role": "system", "content": system}] if system else []
    if url is not None:
        return _with_server(url, model, engine, sampling, messages, message)
    _converse(_answers_here(model, engine, sampling), messages, message)
    return 0


def _answers_here(model: str | None, engine: EngineFlags, sampling: SamplingFlags) -> Answer:
    from jackfield.cli.engine import open_engine
    from jackfield.cli.output import Clock, stream_text, tell

    llm = open_engine(engine.config(model))
    params = sampling.params(llm)

    def answer(messages: Messages) -> str:
        clock = Clock()
        text, tokens = stream_text(llm.stream(messages, params))
        tell(f"{clock.line(tokens)} · {llm.report.summary()}")
        return text

    return answer


def _with_server(
    url: str, model: str | None, engine: EngineFlags, sampling: SamplingFlags, messages: Messages, message: str | None
) -> int:
    import asyncio

    from jackfield.cli.remote import key_of_flags
    from jackfield.client.connection import Connection

    connection = Connection(url, api_key=key_of_flags(engine))
    with asyncio.Runner() as runner:
        try:
            name = runner.run(connection.model(model))
            _converse(lambda talk: _answer_there(runner, connection, name, talk, sampling.fields()), messages, message)
        finally:
            runner.run(connection.close())
    return 0


def _answer_there(runner: Any, connection: Any, model: str, messages: Messages, fields: dict[str, Any]) -> str:
    from jackfield.cli.output import Clock, tell
    from jackfield.client.chat import stream_answer

    clock = Clock()
    text, tokens = runner.run(stream_answer(connection, model, messages, fields, _show))
    print()
    tell(f"{clock.line(tokens)} · {model} at {connection.url}")
    return str(text)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _converse(answer: Answer, messages: Messages, message: str | None) -> None:
    """Answer one message, or what is asked until there is nothing more."""
    if message is not None:
        messages.append({"role": "user", "content": message})
        answer(messages)
        return
    while question := _ask():
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer(messages)})


def _ask() -> str:
    sys.stderr.write("> ")
    sys.stderr.flush()
    return sys.stdin.readline().strip()
