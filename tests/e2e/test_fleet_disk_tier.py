"""A fleet whose replicas keep their KV on disk: after a power cut they load what they had computed."""

import pytest

from bench.local_fleet import LocalFleet, wait_for
from kvrelay.cli.main import main as kvrelay

PROMPT_TOKENS = 400
PAGE_TOKENS = 32
FLAGS = {"engine": "mock", "kv_mib": 64, "mock_profile": "prefill_ms_per_token=1", "disk_tier_mib": 64}
ROLES = {"together": {"prefill": 0, "decode": 0, "both": 1}, "split": {"disaggregate": "always"}}


def ids(seed):
    return [(seed * 37 + position * position) % 500 + 1 for position in range(PROMPT_TOKENS)]


def kill(fleet, name):
    """Kill a replica and wait until it is back and used again."""
    before = fleet.replicas()[name].peer.incarnation
    assert kvrelay(["kill", name, "--state-dir", str(fleet.folder)]) == 0

    def back():
        replica = fleet.replicas().get(name)
        return replica and replica.state == "ready" and replica.peer.incarnation != before

    wait_for(f"{name} to be back", back)


@pytest.mark.parametrize("roles", ROLES)
def test_after_sigkill_a_prompt_is_loaded_instead_of_computed(roles, tmp_path, capsys):
    with LocalFleet(FLAGS | ROLES[roles] | {"disk_tier_dir": tmp_path}) as fleet:
        with fleet.client() as client:
            first = client.generate(ids(1), max_tokens=8, ignore_eos=True)
        assert first.usage.computed_tokens == PROMPT_TOKENS
        pages = PROMPT_TOKENS // PAGE_TOKENS
        names = list(fleet.replicas())
        wait_for("the pages to be written", lambda: len(list(tmp_path.rglob("*.kvpage"))) >= pages * len(names))
        for name in names:
            kill(fleet, name)
        with fleet.client() as client:
            second = client.generate(ids(1), max_tokens=8, ignore_eos=True)
        assert second.ids == first.ids
        assert second.usage.cached_tokens == pages * PAGE_TOKENS
        assert second.usage.computed_tokens == PROMPT_TOKENS - pages * PAGE_TOKENS
        assert "tier_load" in fleet.log.read_text()
    capsys.readouterr()
