"""docker-compose.yml is valid, and says what an operator must know."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = shutil.which("docker-compose")
TIMEOUT_S = 60.0


def _config(**env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMPOSE, "config"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.skipif(COMPOSE is None, reason="docker-compose is not installed")
def test_compose_file_is_valid_and_passes_the_advertised_address_to_every_process():
    done = _config(KVRELAY_HOST_ADVERTISE="10.0.0.7")
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert set(services) == {"redis", "registry", "router", "prefill", "decode"}
    advertised = {name: spec.get("environment", {}).get("KVRELAY_ADVERTISE") for name, spec in services.items()}
    assert advertised == dict.fromkeys(services, "10.0.0.7") | {"redis": None}
    assert all("healthcheck" in spec for spec in services.values())


@pytest.mark.skipif(COMPOSE is None, reason="docker-compose is not installed")
def test_compose_refuses_to_start_without_an_address_to_advertise():
    done = _config()
    assert done.returncode != 0
    assert "KVRELAY_HOST_ADVERTISE" in done.stderr


def test_images_do_not_run_as_root():
    stages = (ROOT / "ops/Dockerfile").read_text().split("\nFROM ")[1:]
    for stage in stages:
        users = [line.split()[1] for line in stage.splitlines() if line.startswith("USER ")]
        assert users[-1] == "kvrelay"
