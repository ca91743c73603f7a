"""The conformance kit: one subclass and one fixture for each plugin."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from acme_rocket.audit import RocketAudit
from acme_rocket.backend import Rocket, RocketRows
from acme_rocket.echo import RocketEcho
from acme_rocket.host import RocketHost
from acme_rocket.int8 import RocketInt8
from acme_rocket.model import RocketModel

from jackfield.testing import (
    AttentionConformance,
    DrafterConformance,
    HooksConformance,
    ModelConformance,
    PlatformConformance,
    QuantizationConformance,
)
from jackfield.testing.quantization import Stored
from jackfield.testing.tiny import Tiny, make_tiny


class TestRocket(AttentionConformance):
    @pytest.fixture
    def plugin(self) -> type[Rocket]:
        return Rocket


class TestRocketRows(AttentionConformance):
    @pytest.fixture
    def plugin(self) -> type[RocketRows]:
        return RocketRows


class TestRocketInt8(QuantizationConformance):
    loss = 0.01

    @pytest.fixture
    def plugin(self) -> type[RocketInt8]:
        return RocketInt8

    def pack(self, weight_OI: torch.Tensor) -> Mapping[str, Stored]:
        scale = weight_OI.float().abs().amax(1).clamp_min(1e-9) / 127
        weight = (weight_OI.float() / scale.unsqueeze(1)).round().to(torch.int8)
        return {"weight": Stored(weight), "scale": Stored(scale)}


class TestRocketModel(ModelConformance):
    @pytest.fixture
    def plugin(self) -> type[RocketModel]:
        return RocketModel

    def make(self, plugin: Any, folder: Path) -> Tiny:
        tiny = make_tiny(folder, "LlamaForCausalLM")
        config = json.loads((folder / "config.json").read_text())
        config["architectures"], config["model_type"] = ["RocketForCausalLM"], "rocket"
        (folder / "config.json").write_text(json.dumps(config))
        return tiny


class TestRocketEcho(DrafterConformance):
    @pytest.fixture
    def plugin(self) -> type[RocketEcho]:
        return RocketEcho


class TestRocketHost(PlatformConformance):
    @pytest.fixture
    def plugin(self) -> type[RocketHost]:
        return RocketHost


class TestRocketAudit(HooksConformance):
    name = "rocket_audit"

    @pytest.fixture
    def listener(self) -> RocketAudit:
        return RocketAudit()
