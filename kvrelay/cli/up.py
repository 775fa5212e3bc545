"""`kvrelay up`: a whole fleet on this machine."""

import argparse
import asyncio
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from kvrelay import config
from kvrelay.cli.demonstration import demonstrate, next_steps
from kvrelay.cli.screen import LogScreen
from kvrelay.config import RegistryConfig, ReplicaConfig, RouterConfig, UpConfig, env_name
from kvrelay.errors import InvalidArgument
from kvrelay.model.files import MOCK_MODEL, resolve
from kvrelay.up.plan import PLANNED_FIELDS, Plan, Surroundings, make_plan
from kvrelay.up.ports import FreePorts
from kvrelay.up.run import Run, run_fleet, wait_known
from kvrelay.up.store import StoreFolder, store_spec, store_url

CHILD_CONFIGS = (ReplicaConfig, RouterConfig, RegistryConfig)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the fleet's own flags, then those that its processes get."""
    config.add_flags(parser, UpConfig)
    parser.add_argument(
        "--demo", action="store_true", help="ask two questions when the fleet is ready, show the answers"
    )
    parser.add_argument(
        "--exit", action="store_true", help="with --demo: end then; non-zero if it did not show its point"
    )
    parser.add_argument(
        "--metrics-port", type=int, help="Prometheus port of the router; the others get the following ones"
    )
    known = PLANNED_FIELDS | {field.name for field in dataclasses.fields(UpConfig)}
    for child in CHILD_CONFIGS:
        config.add_flags(parser, child, skip=frozenset(known))
        known |= {field.name for field in dataclasses.fields(child)}


def run(args: argparse.Namespace) -> int:
    """Run a fleet until a signal, a failure, or the end of the demonstration."""
    given = vars(args)
    if args.exit and not args.demo:
        raise InvalidArgument("exit", "it ends a demonstration; give --demo, too")
    wishes = config.build(UpConfig, given)
    screen = LogScreen(as_json=wishes.log_format == "json")
    replica = config.build(ReplicaConfig, given)
    passed = passed_fields(given, replica, demo=args.demo)
    resolve(passed.get("model", replica.model), progress=screen.say)
    with StoreFolder() as folder:
        store = [] if wishes.redis_url else [store_spec(folder)]
        around = Surroundings(
            redis_url=wishes.redis_url or store_url(store[0]),
            passed=passed,
            cores=len(os.sched_getaffinity(0)),
            metrics_port=replica.metrics_port,
            free_port=FreePorts().next,
            debug=args.debug,
        )
        plan = make_plan(wishes, around)
        what = Run(
            config=wishes,
            children=(*store, *plan.children),
            router=plan.router.address,
            registry=plan.registry.address,
            redis_url=around.redis_url,
            drain_timeout_s=replica.drain_timeout_s,
        )
        session = Session(plan, wishes, demo=args.demo, leave=args.exit)
        return asyncio.run(run_fleet(what, screen, session))


def passed_fields(
    given: Mapping[str, Any], replica: ReplicaConfig, *, demo: bool, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the fields that children get as flags; what the environment says they read themselves.

    Two defaults differ in a fleet: the mock engine serves the mock model, and a demonstration's answers are not drowned
    in logs.
    """
    env = os.environ if env is None else env
    names = {field.name for child in CHILD_CONFIGS for field in dataclasses.fields(child)} - PLANNED_FIELDS
    passed = {name: given[name] for name in sorted(names) if given.get(name) is not None}
    for name in ("threads", "bind"):  # planned with, so the plan must see them wherever they come from
        if name not in passed and env_name(name) in env:
            passed[name] = getattr(replica, name)
    if replica.engine == MOCK_MODEL and "model" not in passed and env_name("model") not in env:
        passed["model"] = MOCK_MODEL
    if demo and "log_level" not in passed and env_name("log_level") not in env:
        passed["log_level"] = "warning"
    return passed


@dataclasses.dataclass(frozen=True)
class Session:
    """What happens while the fleet is up."""

    plan: Plan
    wishes: UpConfig
    demo: bool
    leave: bool

    async def __call__(self) -> int:
        """Tell that the fleet is ready, demonstrate it if wanted, then wait for ever or leave."""
        await wait_known(self.plan, self.wishes.start_timeout_s)
        print(self.ready_line(), flush=True)
        if self.demo:
            code = await demonstrate(self.plan.router.address)
            if self.leave:
                return code
            print(next_steps(self.wishes.state_dir), flush=True)
        await asyncio.Event().wait()
        raise AssertionError("only a signal or a failure ends this wait")

    def ready_line(self) -> str:
        """Return the line that tells where the fleet is."""
        replicas = ", ".join(spec.name for spec in self.plan.replicas)
        return f"fleet ready: router {self.plan.router.address} | registry {self.plan.registry.address} | {replicas}"
