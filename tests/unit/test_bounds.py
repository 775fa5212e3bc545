"""Every queue has a bound and every wait a deadline: what shows in the source is checked for the whole tree."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvrelay", "router", "prefill_svc", "decode_svc", "kv_registry", "bench")
QUEUES = {"Queue", "LifoQueue", "PriorityQueue", "JoinableQueue"}
NEVER_BOUNDED = {"SimpleQueue"}
WAITS_WITH_TIMEOUT = {"run", "check_output", "check_call", "communicate"}
ENDLESS_RPCS = {"Watch"}


def _sources() -> list[Path]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [path for path in files if "v1" not in path.parts]


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _owner(call: ast.Call) -> str:
    """Return the last name before the called attribute: "stub" of `self._client.stub.Start(…)`."""
    value = call.func.value if isinstance(call.func, ast.Attribute) else None
    return value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")


def _given(call: ast.Call, keyword: str) -> bool:
    return any(argument.arg in (keyword, None) for argument in call.keywords)


def faults(source: str) -> list[str]:
    """Return what is unbounded in a source text, as "line: what"."""
    found = []
    for call in _calls(ast.parse(source)):
        name, owner = _name(call), _owner(call)
        if name in NEVER_BOUNDED:
            found.append(f"{call.lineno}: {name} cannot be bounded")
        elif name in QUEUES and not call.args and not _given(call, "maxsize"):
            found.append(f"{call.lineno}: {name} without maxsize")
        elif owner == "subprocess" and name in WAITS_WITH_TIMEOUT and not _given(call, "timeout"):
            found.append(f"{call.lineno}: subprocess.{name} without timeout")
        elif (
            "stub" in owner.lower() and name[:1].isupper() and name not in ENDLESS_RPCS and not _given(call, "timeout")
        ):
            found.append(f"{call.lineno}: RPC {name} without timeout")
        elif name == "join" and "thread" in owner.lower() and not call.args and not _given(call, "timeout"):
            found.append(f"{call.lineno}: thread join without timeout")
    return found


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_queues_are_bounded_and_waits_have_deadlines(path):
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "queue.Queue()",
        "asyncio.Queue()",
        "queue.SimpleQueue()",
        "multiprocessing.Queue()",
        "subprocess.run(['true'])",
        "self._stub.Start(request)",
        "self._thread.join()",
    ],
)
def test_the_check_sees_what_it_is_for(source):
    assert len(faults(source)) == 1


@pytest.mark.parametrize(
    "source", ["asyncio.Queue(8)", "queue.Queue(maxsize=8)", "stub.Watch(x)", "stub.Start(x, timeout=1)"]
)
def test_the_check_lets_bounded_things_pass(source):
    assert faults(source) == []
