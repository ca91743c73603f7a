"""Conformance of platforms: questions are answered before any device context exists, and they bind as they said."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import asdict
from typing import Any, ClassVar

import pytest
import torch

from jackfield.config import load_config
from jackfield.errors import JackfieldError
from jackfield.interfaces import DeviceFacts, Platform, Probe, Proposal
from jackfield.testing.common import PluginConformance

_PROBE = """
import importlib, json, os, sys
path, module, name = json.loads(sys.argv[1])
sys.path[:] = path
platform = getattr(importlib.import_module(module), name)
before = dict(os.environ)
answers = [platform.probe() for _ in range(2)]
told = {"same": answers[0] == answers[1], "present": answers[0].present, "environment": dict(os.environ) == before}
torch = sys.modules.get("torch")
device = getattr(torch, platform.device_type, None) if torch is not None else None
told["context"] = bool(device is not None and hasattr(device, "is_initialized") and device.is_initialized())
print(json.dumps(told))
"""


class PlatformConformance(PluginConformance):
    """Where its devices are absent only what needs none is tested, and the rest is skipped with the probe's words."""

    family: ClassVar[str] = "platforms"

    @pytest.fixture
    def present(self, plugin: type[Platform]) -> Probe:
        """The probe's answer on a machine that has the devices."""
        probe = plugin.probe()
        if not probe.present:
            pytest.skip(f"{plugin.name} is not present: {probe.detail}")
        return probe

    @pytest.fixture
    def facts(self, plugin: type[Platform], present: Probe) -> DeviceFacts:
        """Facts of the first device."""
        return plugin.facts(0)

    def test_probing_makes_no_context_and_changes_nothing(self, plugin: type[Platform]) -> None:
        """In a process of its own, asked twice."""
        argument = json.dumps([sys.path, plugin.__module__, plugin.__name__])
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, argument], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout.splitlines()[-1])
        assert told == {"same": True, "present": plugin.probe().present, "environment": True, "context": False}

    def test_probe_says_what_it_saw(self, plugin: type[Platform]) -> None:
        """Present or not, there is a text; devices are counted."""
        probe = plugin.probe()
        assert isinstance(probe, Probe) and probe.detail
        assert (probe.device_count > 0) == probe.present

    def test_facts_are_plain_data(self, plugin: type[Platform], facts: DeviceFacts) -> None:
        """They can be sent to other processes, are the same each time, and name the platform's own type."""
        assert pickle.loads(pickle.dumps(facts)) == facts == plugin.facts(0)
        assert facts.type == plugin.device_type
        assert facts.memory_bytes > 0 and facts.cores > 0
        assert all(isinstance(feature, str) for feature in facts.features)
        assert asdict(facts)

    def test_proposals_are_about_settings_that_exist(self, plugin: type[Platform], facts: DeviceFacts) -> None:
        """Each value is one that the setting takes, with a reason; asked twice they are the same."""
        config = load_config(env={})
        proposals = list(plugin.proposals(config, facts))
        assert proposals == list(plugin.proposals(config, facts))
        for proposal in proposals:
            assert isinstance(proposal, Proposal) and proposal.reason
            config.get(proposal.field)
            try:
                load_config(env={}, api={proposal.field: proposal.value})
            except JackfieldError as error:
                pytest.fail(f"{proposal.field} does not take {proposal.value!r}: {error}")

    def test_variables_of_workers_are_text(self, plugin: type[Platform]) -> None:
        """What worker processes are started with."""
        for rank in range(2):
            variables = plugin.worker_env(rank)
            assert all(isinstance(part, str) for pair in variables.items() for part in pair)

    def test_what_binds_is_what_was_said(self, plugin: type[Platform], present: Probe) -> None:
        """The device is of the platform's type, tensors live on it, memory is counted, streams are as declared."""
        platform: Any = plugin.bind(0, load_config(env={}))
        assert isinstance(platform, plugin)
        assert platform.device.type == plugin.device_type
        assert torch.ones(3, device=platform.device).sum().item() == 3
        memory = platform.memory()
        assert 0 < memory.free <= memory.total
        platform.synchronize()
        platform.empty_cache()
        assert (platform.stream_api() is not None) >= plugin.asynchronous, "asynchronous, and without streams"
