"""Fleets that end-to-end tests share."""

import pytest
from support import prompts as prompt_set

from bench.local_fleet import LocalFleet

FP32 = {"dtype": "float32", "kv_mib": 1024}


@pytest.fixture(scope="session")
def text():
    return prompt_set.load()


@pytest.fixture(scope="module")
def split_fleet():
    """One prefill and one decode replica on the bundled model in fp32; every prompt is read remotely."""
    with LocalFleet(FP32 | {"prefill": 1, "decode": 1, "disaggregate": "always"}) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def mock_fleet():
    """Two prefill and two decode replicas on the mock engine: the question is where requests go."""
    profile = "prefill_ms_per_token=0.05,step_ms=2"
    flags = {"prefill": 2, "decode": 2, "engine": "mock", "model": "mock", "mock_profile": profile, "kv_mib": 64}
    with LocalFleet(flags | {"disaggregate": "always"}) as fleet:
        yield fleet
