"""Records that cross a module or process border: requests going in, plans and results of steps, outputs coming back."""

from jackfield.protocol.pooling_params import PoolingParams
from jackfield.protocol.requests import (
    CoreCounters,
    CoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    Feature,
    FinishReason,
    PooledResult,
)
from jackfield.protocol.sampling_params import OutputKind, RepetitionDetection, SamplingParams
from jackfield.protocol.steps import ModelRunnerOutput, NewSequence, Recordings, SamplerOutput, SchedulerOutput

__all__ = [
    "CoreCounters",
    "CoreEvent",
    "EngineCoreOutput",
    "EngineCoreRequest",
    "Feature",
    "FinishReason",
    "ModelRunnerOutput",
    "NewSequence",
    "OutputKind",
    "PooledResult",
    "PoolingParams",
    "Recordings",
    "RepetitionDetection",
    "SamplerOutput",
    "SamplingParams",
    "SchedulerOutput",
]
