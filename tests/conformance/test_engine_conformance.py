"""The kit's tests that run engines, through the project's own drafters, policies, platforms and some architectures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtp_models import make_mtp
from suites import suite

from jackfield.testing import DrafterConformance, ModelConformance, PlatformConformance, SchedulingConformance
from jackfield.testing.tiny import Tiny, make_tiny
from jackfield_models.gemma import Gemma2
from jackfield_models.llama import Llama, Qwen3
from jackfield_models.moe_decoder import Mixtral
from jackfield_platforms.cpu import CpuPlatform
from jackfield_platforms.cuda import CudaPlatform
from jackfield_scheduling.policies import Fcfs, Priority
from jackfield_spec_decode.draft_model import DraftModelDrafter
from jackfield_spec_decode.mtp import MtpDrafter
from jackfield_spec_decode.ngram import NgramDrafter
from jackfield_spec_decode.suffix import SuffixDrafter


def with_draft_model(self: Any, plugin: Any, target: Tiny, folder: Path) -> dict[str, Any]:
    """Draft with a smaller model of the same vocabulary."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "initializer_range": 0.1}
    make_tiny(folder, vocab_size=target.model.config.vocab_size, **sizes)
    return {
        "speculative.method": plugin.name,
        "speculative.model": str(folder),
        "speculative.num_speculative_tokens": 3,
        "speculative.adaptive": False,
    }


def with_draft_layers(name: str) -> Callable[..., Tiny]:
    """Return what makes a target with a layer that only drafts."""

    def target(self: Any, folder: Path, **values: Any) -> Tiny:
        made = make_mtp(folder, name, **values)
        return Tiny(made.folder, made.model)

    return target


TestCpuPlatform = suite(PlatformConformance, CpuPlatform)
TestCudaPlatform = suite(PlatformConformance, CudaPlatform)
TestFcfs = suite(SchedulingConformance, Fcfs)
TestPriority = suite(SchedulingConformance, Priority)
TestNgram = suite(DrafterConformance, NgramDrafter, options={"min_n": 1})
TestSuffix = suite(DrafterConformance, SuffixDrafter)
TestDraftModel = suite(DrafterConformance, DraftModelDrafter, settings=with_draft_model)
TestMtp = suite(DrafterConformance, MtpDrafter, target=with_draft_layers("deepseek-v3"))
TestMtpOfStates = suite(DrafterConformance, MtpDrafter, target=with_draft_layers("qwen3-next"))
TestLlama = suite(ModelConformance, Llama)
TestQwen3 = suite(ModelConformance, Qwen3, values={"head_dim": 32, "tie_word_embeddings": True})
TestGemma2 = suite(ModelConformance, Gemma2, values={"head_dim": 16, "attn_implementation": "eager"})
TestMixtral = suite(ModelConformance, Mixtral, values={"num_local_experts": 4, "num_experts_per_tok": 2})
