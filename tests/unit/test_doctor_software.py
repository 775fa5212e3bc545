"""What `kvrelay doctor` makes of what is installed, and how it looks into processes that may crash."""

import json
import sys

import pytest
from packaging.requirements import Requirement

from kvrelay.doctor import probe, software
from kvrelay.doctor.finding import Finding, Status, ok
from kvrelay.doctor.probe import Probed, last_object, last_words

WANTED = [Requirement("grpcio>=1.76"), Requirement("redis[hiredis]>=6")]
CPU_TORCH = {"version": "2.13.0+cpu", "cuda": "", "devices": []}
GPU_TORCH = {"version": "2.13.0", "cuda": "12.8", "devices": ["H200"]}


def installed(**versions):
    return lambda name: versions.get(name, "")


def loaded(torch=CPU_TORCH, flash_attn=None):
    return Probed({"torch": torch, "flash_attn": flash_attn or {}, "nixl": {}})


def test_advice_is_for_what_is_not_well():
    with pytest.raises(AssertionError):
        Finding("python", Status.FAIL, "old")
    with pytest.raises(AssertionError):
        Finding("python", Status.OK, "new", "do something")


@pytest.mark.parametrize(
    ("version", "status"), [("3.11.7", Status.OK), ("3.14.0rc1", Status.OK), ("3.10.2", Status.FAIL)]
)
def test_python_is_held_against_the_supported_range(version, status):
    assert software.check_python(version, ">=3.11").status is status


def test_the_supported_range_is_that_of_the_installed_package():
    assert software.supported_python() == ">=3.11"


def test_packages_within_their_ranges_are_fine():
    assert software.check_packages(WANTED, installed(grpcio="1.85.3", redis="8.1.0")).status is Status.OK


def test_a_missing_package_and_one_out_of_range_are_both_named():
    finding = software.check_packages(WANTED, installed(grpcio="1.60.0"))
    assert finding.status is Status.FAIL
    assert finding.found == "redis is not installed; grpcio 1.60.0 is outside >=1.76"


def test_a_machine_without_the_worker_s_packages_is_warned_not_failed():
    finding = software.check_worker_packages([Requirement("torch>=2.6")], installed())
    assert finding.status is Status.WARN
    assert "kvrelay[worker]" in finding.advice
    finding = software.check_worker_packages([Requirement("torch>=2.6")], installed(torch="2.1.0"))
    assert finding.status is Status.FAIL


def test_requirements_are_those_of_the_installed_package():
    assert {"grpcio", "redis"} <= {each.name for each in software.requirements()}
    assert "torch" not in {each.name for each in software.requirements()}
    assert {each.name for each in software.requirements("worker")} == {"torch", "nixl-cu12", "safetensors"}


def test_what_is_not_installed_has_no_version():
    assert software.version_of("no-such-package-anywhere") == ""
    assert software.version_of("rich")


@pytest.mark.parametrize(
    ("torch", "gpu", "status", "words"),
    [
        (CPU_TORCH, False, Status.OK, "CPU"),
        (GPU_TORCH, True, Status.OK, "H200"),
        (CPU_TORCH, True, Status.WARN, "CUDA build"),
        (GPU_TORCH | {"devices": []}, True, Status.WARN, "nvidia-smi"),
        ({}, False, Status.WARN, "kvrelay[worker]"),
        ({"error": "ImportError: libc10.so"}, False, Status.FAIL, "libc10"),
    ],
)
def test_torch(torch, gpu, status, words):
    finding = software.check_torch(loaded(torch), gpu=gpu)
    assert finding.status is status
    assert words in finding.found + finding.advice


def test_a_crash_while_loading_is_a_finding():
    finding = software.check_torch(Probed(error="the process was killed by SIGSEGV"), gpu=False)
    assert finding.status is Status.FAIL
    assert "SIGSEGV" in finding.found


def test_flash_attn_is_wanted_with_a_gpu_only():
    assert software.check_flash_attn(loaded()).status is Status.SKIPPED
    assert software.check_flash_attn(loaded(GPU_TORCH, {"version": "2.8"})).found == "2.8"
    assert software.check_flash_attn(loaded(GPU_TORCH)).status is Status.WARN
    broken = software.check_flash_attn(loaded(GPU_TORCH, {"error": "undefined symbol"}))
    assert "undefined symbol" in broken.found


def test_gpus_show_by_their_driver(tmp_path):
    assert not software.has_gpu([tmp_path / "nvidia0"])
    (tmp_path / "nvidia0").touch()
    assert software.has_gpu([tmp_path / "nvidia0"])


def test_a_probe_s_answer_is_its_last_object_whatever_libraries_print():
    assert last_object('noise\n{"a": 1}\n{"b": 2}\nmore noise\n{broken\n') == {"b": 2}
    assert last_object("noise") is None


def test_a_probe_that_died_is_described():
    assert last_words(-11, "x") == "the process was killed by SIGSEGV"
    assert last_words(1, "Traceback\n  ImportError: x\n\n") == "ImportError: x"
    assert last_words(3, "") == "the process ended with exit code 3"


def run_text(monkeypatch, text, **options):
    """Run a text as a probe."""
    monkeypatch.setattr(probe.sys, "executable", "/bin/sh")
    real = probe.subprocess.run

    def run(_command, **given):
        return real([PYTHON, "-c", text], **given)

    monkeypatch.setattr(probe.subprocess, "run", run)
    return probe.run_probe("loaded", **options)


PYTHON = sys.executable


def test_a_probe_that_answers_and_then_crashes_has_answered(monkeypatch):
    text = f"import os; print({json.dumps(json.dumps({'a': 1}))}, flush=True); os.kill(os.getpid(), 11)"
    assert run_text(monkeypatch, text).values == {"a": 1}


def test_a_probe_that_crashes_first_has_not(monkeypatch):
    assert run_text(monkeypatch, "import os; os.kill(os.getpid(), 11)").error == "the process was killed by SIGSEGV"


def test_a_probe_that_hangs_is_killed(monkeypatch):
    assert run_text(monkeypatch, "import time; time.sleep(60)", timeout_s=0.2).error == "no answer within 0.2 s"


def test_a_probe_gets_its_environment_and_its_log_is_kept(monkeypatch):
    text = "import os, sys; print(os.environ['KVRELAY_X'], file=sys.stderr); print('{}')"
    probed = run_text(monkeypatch, text, environment={"KVRELAY_X": "seen"})
    assert (probed.error, probed.log) == ("", "seen\n")


def test_findings_of_what_is_well_need_no_advice():
    assert ok("python", "fine").advice == ""
