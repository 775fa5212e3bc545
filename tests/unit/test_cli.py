import argparse
import subprocess
import sys
import threading

import pytest

from kvrelay import __version__
from kvrelay.cli import main as entry
from kvrelay.cli.asking import add_request_flags, request_options, summary
from kvrelay.cli.demonstration import find_faults
from kvrelay.cli.status import make_table
from kvrelay.cli.target import router_addresses
from kvrelay.cli.up import passed_fields
from kvrelay.client import Answer, Decision, Finish, FinishReason, FleetStatus, ReplicaStatus, Usage
from kvrelay.config import ReplicaConfig
from kvrelay.errors import InvalidArgument, PeerLost
from kvrelay.types import Peer, Role
from kvrelay.up.processes import start_ticks
from kvrelay.up.state import FleetRecord, StateFile

RUN_TIMEOUT_S = 60.0
DECODE = Peer("decode-0", "i", "h:1")
PREFILL = Peer("prefill-0", "i", "h:2")
LIGHT_COMMANDS = ("up", "demo", "chat", "generate", "status", "kill", "doctor", "health", "version")


def answer(*, prefill=PREFILL, attempts=1, **usage):
    decision = Decision(
        request_id="r",
        attempt=0,
        model="m",
        decode=DECODE,
        prefill=prefill,
        reason="cold",
        decider_reason="always",
        policy="prefix_aware",
        prompt_tokens=412,
        available_tokens=0,
        prefill_cached_tokens=0,
        decode_cached_tokens=0,
        seed=1,
        queue_s=0.0,
        holder=None,
    )
    finish = Finish(
        reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=412, output_tokens=20, **usage),
        attempts=attempts,
        ttft_s=0.812,
        tpot_s=0.0481,
        prefill=prefill,
    )
    return Answer(text="x", decision=decision, finish=finish)


def request_args(*words):
    parser = argparse.ArgumentParser()
    add_request_flags(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("command", sorted(entry.COMMANDS))
def test_every_command_shows_its_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        entry.main([command, "--help"])
    assert caught.value.code == 0
    assert command in capsys.readouterr().out


def test_the_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        entry.main(["--help"])
    shown = capsys.readouterr().out
    assert [name for name in entry.COMMANDS if f"    {name} " not in shown] == []


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["status", "--nonsense"], ["--debug"]])
def test_what_is_no_command_ends_with_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        entry.main(arguments)
    assert caught.value.code == 2
    assert "usage: kvrelay" in capsys.readouterr().err


def test_version(capsys):
    assert entry.main(["version"]) == 0
    assert capsys.readouterr().out == f"kvrelay {__version__}\n"


@pytest.mark.parametrize("command", LIGHT_COMMANDS)
def test_commands_that_compute_nothing_load_neither_torch_nor_the_engine(command):
    script = f"""
import importlib, sys
importlib.import_module("kvrelay.cli.main")
importlib.import_module("kvrelay.cli.{command}")
print([name for name in ("torch", "redis", "nixl", "nixl_cu12", "kvrelay.engine.core") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=RUN_TIMEOUT_S, check=False)
    assert (done.stdout, done.stderr) == (b"[]\n", b"")


def test_an_error_is_one_line_and_an_exit_code(capsys):
    assert entry.main(["chat", "hi", "--address", "127.0.0.1:1"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("kvrelay: router 127.0.0.1:1:")
    assert shown.err.count("\n") == 1
    assert [thread.name for thread in threading.enumerate() if thread.name == "kvrelay-client"] == []


def test_tracebacks_are_for_those_who_ask(capsys):
    assert entry.main(["--debug", "status", "--address", "127.0.0.1:1"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_is_told_apart_from_an_error():
    assert entry.describe(InvalidArgument("prompt", "empty")) == "prompt: empty"
    assert "kvrelay up" in entry.describe(PeerLost("router h:1: away"))
    assert entry.describe(ZeroDivisionError("x")).startswith("internal error: ZeroDivisionError")


def test_a_base_install_that_is_asked_for_a_replica_says_what_to_install():
    assert "pip install 'kvrelay[worker]'" in entry.describe(ModuleNotFoundError("x", name="torch"))
    assert "internal error" in entry.describe(ModuleNotFoundError("x", name="router.nonsense"))


def test_only_given_options_are_sent():
    assert request_options(request_args()) == {}
    args = request_args("--max-tokens", "5", "--stop", "a", "--stop", "b", "--temperature", "0.5", "--model", "m")
    assert request_options(args) == {"max_tokens": 5, "stop_strings": ("a", "b"), "temperature": 0.5, "model": "m"}


def test_the_router_is_found_by_flag_then_environment_then_state_file_then_default(tmp_path):
    nothing = request_args("--state-dir", str(tmp_path))
    assert router_addresses(nothing, {}) == ["127.0.0.1:50050"]
    ticks = start_ticks(1)
    StateFile(tmp_path).write(FleetRecord(pid=1, start_ticks=ticks, router="h:9", registry="h:8", redis_url=""))
    assert router_addresses(nothing, {}) == ["h:9"]
    assert router_addresses(nothing, {"KVRELAY_ADDRESS": "h:7"}) == ["h:7"]
    assert router_addresses(request_args("--address", "h:5, h:6"), {"KVRELAY_ADDRESS": "h:7"}) == ["h:5", "h:6"]


def test_the_summary_says_where_from_how_much_and_how_fast():
    text = summary(answer(pulled_tokens=384, cached_tokens=28, pulled_bytes=8_850_000, pull_s=0.01))
    assert text == (
        "prefill-0 → decode-0 (cold, always) | prompt 412 tokens: 28 cached, 384 pulled, 0 computed | "
        "KV 8.8 MB over NIXL at 0.89 GB/s | TTFT 812 ms, TPOT 48.1 ms | 20 tokens written (stop)"
    )


def test_the_summary_of_a_local_prefill_names_one_replica():
    text = summary(answer(prefill=None, computed_tokens=412, attempts=2))
    assert text.startswith("decode-0 (cold, always) | ")
    assert "no KV moved" in text
    assert text.endswith("2 attempts")


@pytest.mark.parametrize(
    ("first", "second", "faults"),
    [
        ({"pulled_bytes": 1}, {"cached_tokens": 32}, 0),
        ({"pulled_bytes": 1}, {"prefill_cached_tokens": 32}, 0),
        ({"pulled_bytes": 0}, {"cached_tokens": 32}, 1),
        ({"pulled_bytes": 1}, {}, 1),
        ({}, {}, 2),
    ],
)
def test_a_demonstration_that_moved_or_cached_nothing_is_at_fault(first, second, faults):
    assert len(find_faults(answer(**first), answer(**second))) == faults


def test_only_what_was_given_is_passed_to_children():
    given = {"kv_mib": 64, "policy": None, "prefill": 2, "port": None, "demo": False}
    assert passed_fields(given, ReplicaConfig(), demo=False, env={}) == {"kv_mib": 64}


def test_the_mock_engine_serves_the_mock_model_unless_told_otherwise():
    mock = ReplicaConfig(engine="mock")
    assert passed_fields({"engine": "mock"}, mock, demo=False, env={})["model"] == "mock"
    assert passed_fields({"engine": "mock", "model": "m"}, mock, demo=False, env={})["model"] == "m"
    assert "model" not in passed_fields({}, mock, demo=False, env={"KVRELAY_MODEL": "m"})


def test_a_demonstration_is_not_drowned_in_logs_unless_they_are_wanted():
    assert passed_fields({}, ReplicaConfig(), demo=True, env={}) == {"log_level": "warning"}
    assert passed_fields({"log_level": "debug"}, ReplicaConfig(), demo=True, env={}) == {"log_level": "debug"}
    assert passed_fields({}, ReplicaConfig(), demo=True, env={"KVRELAY_LOG_LEVEL": "info"}) == {}


def test_threads_from_the_environment_are_planned_with():
    replica = ReplicaConfig(threads=3)
    assert passed_fields({}, replica, demo=False, env={"KVRELAY_THREADS": "3"}) == {"threads": 3}


def test_the_status_table_has_a_row_a_replica():
    replica = ReplicaStatus(
        peer=PREFILL,
        role=Role.PREFILL,
        model="m",
        state="ready",
        prefill_load_s=0.0,
        decode_sequences=0,
        decode_tokens=0,
        blocks=3,
        pages_total=9,
        pages_free=6,
        pages_quarantined=1,
        leases=0,
        running=0,
        waiting=0,
        steps=1,
        heartbeat_age_s=0.1,
    )
    status = FleetStatus(state="ready", policy="random", disaggregate="auto", block_tokens=32, replicas=(replica,) * 2)
    assert make_table(status).row_count == 2
