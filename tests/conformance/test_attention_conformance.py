"""The kit's attention tests, through every backend of the project."""

from __future__ import annotations

from suites import suite

from jackfield.testing import AttentionConformance
from jackfield_attention.flash_attn import FlashAttnBackend
from jackfield_attention.flex import FlexBackend
from jackfield_attention.native_cpu import NativeCpuBackend
from jackfield_attention.torch_linear import TorchDeltaBackend, TorchLinearBackend
from jackfield_attention.torch_mamba import TorchMambaBackend
from jackfield_attention.torch_mla import TorchMlaBackend
from jackfield_attention.torch_mla_sparse import TorchMlaSparseBackend
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_attention.torch_short_conv import TorchShortConvBackend
from jackfield_attention.triton_backend import TritonBackend
from jackfield_attention.triton_mla import TritonMlaBackend
from jackfield_attention.triton_states import TritonStatesBackend

TestTorchSdpa = suite(AttentionConformance, TorchSdpaBackend)
TestNativeCpu = suite(AttentionConformance, NativeCpuBackend)
TestFlex = suite(AttentionConformance, FlexBackend)
TestTorchMla = suite(AttentionConformance, TorchMlaBackend)
TestTorchMlaSparse = suite(AttentionConformance, TorchMlaSparseBackend)
TestTorchMamba = suite(AttentionConformance, TorchMambaBackend)
TestTorchLinear = suite(AttentionConformance, TorchLinearBackend)
TestTorchDelta = suite(AttentionConformance, TorchDeltaBackend)
TestTorchShortConv = suite(AttentionConformance, TorchShortConvBackend)
TestTriton = suite(AttentionConformance, TritonBackend)
TestTritonMla = suite(AttentionConformance, TritonMlaBackend)
TestTritonStates = suite(AttentionConformance, TritonStatesBackend)
TestFlashAttn = suite(AttentionConformance, FlashAttnBackend)
