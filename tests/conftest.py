"""Fixtures that all tests share."""

from collections.abc import Iterator

import pytest
from support.valkey import Valkey


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """A fresh Valkey server; fails the test that leaves a key without TTL, or that walks the store."""
    server = Valkey()
    try:
        yield server
        server.check()
    finally:
        server.close()


@pytest.fixture
def valkey_url(valkey: Valkey) -> str:
    """URL of a fresh Valkey server."""
    return valkey.url
