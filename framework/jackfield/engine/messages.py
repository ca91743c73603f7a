"""What passes between frontends and the engine process: msgpack, one record a message. Commands say from which seat
they come.
"""

from __future__ import annotations

import msgspec

from jackfield.protocol import EngineCoreOutput, EngineCoreRequest


class Add(msgspec.Struct, tag="add"):
    """Queue requests."""

    requests: list[EngineCoreRequest]
    seat: int = 0


class Abort(msgspec.Struct, tag="abort"):
    """End requests."""

    request_ids: list[str]
    seat: int = 0


class Pause(msgspec.Struct, tag="pause"):
    """Stop planning steps, or go on; answered by Paused."""

    on: bool
    seat: int = 0


class Stop(msgspec.Struct, tag="stop"):
    """Shut down."""


class Ready(msgspec.Struct, tag="ready"):
    """The engine process is up: the digest of the plugins it loaded, and the size of its cache in tokens and
    in blocks.
    """

    digest: str
    max_model_len: int
    num_tokens: int
    num_blocks: int


class Failed(msgspec.Struct, tag="failed"):
    """The engine process could not start, or stopped: its error, as text."""

    error: str


class Paused(msgspec.Struct, tag="paused"):
    """No step runs and none is planned, or steps are planned again."""

    on: bool


class Stepped(msgspec.Struct, tag="stepped"):
    """A step happened."""

    output: EngineCoreOutput


Command = Add | Abort | Pause | Stop
Notice = Ready | Failed | Paused | Stepped

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_notice = msgspec.msgpack.Decoder(Notice).decode
