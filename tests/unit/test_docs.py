"""What the documentation says is what the code does."""

import re
from pathlib import Path

import pytest

from docs import generate
from kvrelay import config

ROOT = Path(__file__).parents[2]
OPERATING = ROOT / "docs/operating.md"
PATH_IN_TEXT = re.compile(r"`((?:[a-z_0-9.]+/)*[a-z_A-Z0-9.-]+(?:\.(?:py|proto|lua|md|yml|toml)|/))`")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", generate.GENERATED)
def test_generated_parts_are_up_to_date(name):
    text = (ROOT / name).read_text()
    assert generate.spliced(text, generate.GENERATED[name]()) == text, "run `make gen`"


def test_every_module_says_in_one_line_what_it_is():
    for line in generate.modules().splitlines():
        assert re.fullmatch(r"- `[^`]+\.py`: .{10,}[.!:;)]", line), line


def test_ports_in_the_documentation_are_those_of_the_code():
    rows = dict(re.findall(r"^\| (\w+) \| (\d{5})", OPERATING.read_text(), flags=re.MULTILINE))
    assert rows == {
        "router": str(config.ROUTER_PORT),
        "registry": str(config.REGISTRY_PORT),
        "prefill": str(config.PREFILL_PORT),
        "decode": str(config.DECODE_PORT),
    }


def test_metrics_in_the_documentation_are_those_of_the_code():
    documented = set(re.findall(r"^\| `((?:gen_ai|kvrelay|rpc)\.[a-z_.]+)`", OPERATING.read_text(), flags=re.MULTILINE))
    source = "".join(path.read_text() for package in generate.PACKAGES for path in (ROOT / package).rglob("*.py"))
    in_code = set(re.findall(r'\.create_\w+\(\s*"([a-z_.]+)"', source))
    assert documented == in_code


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_in_the_documentation_exist(document):
    named = PATH_IN_TEXT.findall(document.read_text())
    missing = [name for name in named if not _exists(name, document)]
    assert missing == []


def _exists(name: str, document: Path) -> bool:
    places = (ROOT / name, document.parent / name)
    return any(place.exists() for place in places) or any(ROOT.glob(f"*/{name}")) or any(ROOT.glob(f"kvrelay/*/{name}"))


def test_make_targets_named_in_the_documentation_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"`make ([a-z-]+)", document.read_text()))
        assert named <= targets, document


def test_flags_named_in_the_documentation_exist():
    known = {config.flag_name(name) for cls in generate.PROCESSES.values() for name in cls.__dataclass_fields__}
    cli = "".join(path.read_text() for folder in ("kvrelay", "bench", "ops") for path in (ROOT / folder).rglob("*.py"))
    known |= set(re.findall(r'"(--[a-z][a-z-]+)"', cli))
    elsewhere = {"--build", "--file", "--target", "--tag"}  # docker's
    for document in DOCUMENTS:
        named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", document.read_text()))
        assert named <= known | elsewhere, document
