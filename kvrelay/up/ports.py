"""Free ports that stay free until a child binds them."""

import random
import socket

from kvrelay.errors import ResourceExhausted

FIRST_PORT = 20_000
LAST_PORT = 32_000
"""Below the range from which Linux gives ports to outgoing connections (32768 on): none is taken in between."""

TRIES_MAX = 200


class FreePorts:
    """Gives ports that nobody listens on, never the same one twice."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._given: set[int] = set()
        # From the operating system's entropy: fleets that start at once on one machine must not try the same ports.
        self._random = random.SystemRandom()

    def next(self) -> int:
        """Return the next one.

        Raises:
            ResourceExhausted: none was found.
        """
        for _ in range(TRIES_MAX):
            port = self._random.randrange(FIRST_PORT, LAST_PORT)
            if port not in self._given and is_free(self._host, port):
                self._given.add(port)
                return port
        raise ResourceExhausted(f"no free port between {FIRST_PORT} and {LAST_PORT} on {self._host}")


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier run that still fade away are no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
