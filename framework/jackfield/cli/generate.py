"""``jackfield generate``."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags
from jackfield.cli.sampling import SamplingFlags

_NOTHING = SamplingFlags()


def generate(
    model: str,
    *prompt: str,
    sampling: SamplingFlags = _NOTHING,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """Continue prompts. One prompt is streamed; several run together and are printed one after another.

    Parameters
    ----------
    model
        A folder, a file, hf:ORG/NAME or pypi:NAME.
    prompt
        Texts to continue.
    """
    from jackfield.cli.engine import open_engine
    from jackfield.cli.output import Clock, stream_text, tell
    from jackfield.errors import RequestError

    if not prompt:
        raise RequestError("there is no prompt", field="prompt", value=(), remedy='jackfield generate MODEL "text"')
    config = engine.config(model)
    llm = open_engine(config)
    params = sampling.params(llm)
    clock = Clock()
    if len(prompt) == 1:
        _, tokens = stream_text(llm.stream(prompt[0], params))
    else:
        tokens = _print_all(prompt, llm.generate(list(prompt), params))
    tell(f"{clock.line(tokens)} · {llm.report.summary()}")
    return 0


def _print_all(prompts: tuple[str, ...], outputs: list[Any]) -> int:
    for text, output in zip(prompts, outputs, strict=True):
        print(f"{text}{output.outputs[0].text}\n")
    return sum(len(output.outputs[0].token_ids) for output in outputs)
