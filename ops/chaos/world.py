"""A simulated fleet in one thread: a clock that is turned by hand, and messages that take their time or get lost."""

import heapq
import itertools
import random
from collections.abc import Callable

from kvrelay.engine.protocol import CallId, Command, LeaseReply
from ops.chaos.host import Action, Host

TICK_S = 0.01
"""One step of every engine."""
DELAY_S = 0.03
"""Usual longest time that a message takes."""
SLOW_DELAY_S = 3.0
"""Longest time that a slow message takes: longer than leases live."""
SLOW_SHARE = 0.02
KEEPALIVE_S = 4.0
"""After this long without an answer the other end of a connection counts as lost."""
CALL_TIMEOUT_S = 1.0
"""Longest wait for one answer about a lease."""


class World:
    """Hosts, time, and the network between their fronts.

    Args:
        rng: draws everything that is random.
        lost_share: share of calls about leases that get lost, either way.
    """

    def __init__(self, rng: random.Random, *, lost_share: float) -> None:
        self.rng = rng
        self.now_s = 1000.0
        self.hosts: dict[str, Host] = {}
        self._lost_share = lost_share
        self._due: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count(1)

    def clock(self) -> float:
        """Return the time, s."""
        return self.now_s

    def delay_s(self) -> float:
        """Draw how long a message takes."""
        return self.rng.random() * (SLOW_DELAY_S if self.rng.random() < SLOW_SHARE else DELAY_S)

    @property
    def quiet(self) -> bool:
        """True while no message is under way and no timer is set."""
        return not self._due

    def holder(self, host: Host, block_keys: bytes) -> Host:
        """Return the other host that holds most of a prompt, as a router that knows the directory does."""
        others = [other for other in self.hosts.values() if other is not host]
        return max(others, key=lambda other: other.held_pages(block_keys) if other.alive else 0)

    def after(self, delay_s: float, action: Action) -> None:
        """Do something later, whoever lives then."""
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._numbers), action))

    def on(self, host: Host, incarnation: str, delay_s: float, action: Action, *, lost: Action | None = None) -> None:
        """Do something later at a host; a stopped one does it when it goes on, and one that is gone has `lost` it."""

        def arrive() -> None:
            if not host.alive or host.incarnation != incarnation:
                if lost is not None:
                    lost()
            elif host.stopped:
                host.inbox.append(arrive)
            else:
                action()

        self.after(delay_s, arrive)

    def call(
        self,
        caller: Host,
        owner: Host,
        incarnation: str,
        command: Callable[[CallId], Command],
        done: Callable[[LeaseReply | None], None],
    ) -> None:
        """Ask an owner about a lease; `done` gets the reply, or None when none came in time."""
        call_id = next(self._numbers)
        home = caller.incarnation
        answered = False

        def answer(reply: LeaseReply | None) -> None:
            nonlocal answered
            if not answered:
                answered = True
                done(reply)

        def reply_arrives(reply: LeaseReply) -> None:
            if self.rng.random() >= self._lost_share:
                self.on(caller, home, self.delay_s(), lambda: answer(reply))

        def arrive() -> None:
            owner.calls[call_id] = reply_arrives
            owner.handle(command(call_id))

        def gone() -> None:
            self.on(caller, home, self.delay_s(), lambda: answer(None))

        self.on(caller, home, CALL_TIMEOUT_S, lambda: answer(None))
        if self.rng.random() >= self._lost_share:
            self.on(owner, incarnation, self.delay_s(), arrive, lost=gone)

    def tick(self) -> None:
        """Let time pass: deliver what is due, land what lands now, and have every engine make a step."""
        self.now_s += TICK_S
        while self._due and self._due[0][0] <= self.now_s:
            heapq.heappop(self._due)[2]()
        for host in self.hosts.values():
            if host.alive:
                host.transfer.poll_all()
            if host.running:
                host.step()

    # ------------------------------------------------------------ processes

    def kill(self, host: Host) -> None:
        """End a host in the midst of what others read from it."""
        for other in self.hosts.values():
            if other is not host and other.alive:
                other.transfer.kill_peer(host.incarnation)
        host.kill()

    def boot(self, host: Host) -> None:
        """Start a killed host again."""
        host.boot()
        for other in self.hosts.values():
            if other.alive and other.stopped:
                host.transfer.stop_peer(other.incarnation)

    def stop(self, host: Host) -> None:
        """Stop a host as SIGSTOP does; who reads from it waits."""
        host.stopped = True
        for other in self.hosts.values():
            if other is not host and other.alive:
                other.transfer.stop_peer(host.incarnation)

    def resume(self, host: Host) -> None:
        """Let a stopped host go on, with what has arrived meanwhile."""
        host.stopped = False
        for other in self.hosts.values():
            if other is not host and other.alive:
                other.transfer.resume_peer(host.incarnation)
        waiting, host.inbox = host.inbox, []
        for action in waiting:
            action()
