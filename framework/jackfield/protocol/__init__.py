"""Records that cross a module or process border: requests going in, plans and results of steps, outputs coming back."""

from jackfield.protocol.requests import CoreEvent, EngineCoreOutput, EngineCoreRequest, FinishReason
from jackfield.protocol.sampling_params import OutputKind, SamplingParams
from jackfield.protocol.steps import ModelRunnerOutput, NewSequence, SamplerOutput, SchedulerOutput

__all__ = [
    "CoreEvent",
    "EngineCoreOutput",
    "EngineCoreRequest",
    "FinishReason",
    "ModelRunnerOutput",
    "NewSequence",
    "OutputKind",
    "SamplerOutput",
    "SamplingParams",
    "SchedulerOutput",
]
