"""Proves that the KV hand-off is never wrong and never stuck: `python -m ops.chaos.kv`, or `make chaos-kv`.

First random schedules over simulated replicas, then rounds over a real fleet whose processes are killed and stopped.
A failure prints its seed, and the command that runs it again.
"""

import argparse
import logging
import sys
import time
from collections import Counter

from ops.chaos import rounds, schedule

SCHEDULES = 2000
ROUNDS = 200
TOLD_EVERY = 200


def run_schedules(first: int, count: int) -> int:
    """Run schedules from seed `first` on, and say what they saw; return how many failed."""
    ended, legs, seen = Counter[str](), Counter[str](), Counter[str]()
    failed, slowest_s, start_s = 0, 0.0, time.monotonic()
    for seed in range(first, first + count):
        try:
            outcome = schedule.run(seed)
        except AssertionError as error:
            failed += 1
            print(f"schedule {seed} FAILED: {error}")
            print(f"  again: python -m ops.chaos.kv --schedules 1 --rounds 0 --seed {seed}", flush=True)
            continue
        ended += outcome.ended
        legs += outcome.legs
        seen += outcome.seen
        slowest_s = max(slowest_s, outcome.settled_s)
        if (seed - first + 1) % TOLD_EVERY == 0:
            print(f"{seed - first + 1} schedules, {failed} failed, {time.monotonic() - start_s:.0f} s", flush=True)
    print(f"{count} schedules, {failed} failed, {time.monotonic() - start_s:.0f} s")
    for what, counter in (("requests", ended), ("tries at prefill replicas", legs), ("events", seen)):
        print(f"  {what}: {', '.join(f'{count} {name}' for name, count in counter.most_common())}")
    print(f"  longest way back to the baseline: {slowest_s:.1f} s of simulated time")
    return failed


def main() -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ops.chaos.kv", description=__doc__)
    parser.add_argument("--schedules", type=int, default=SCHEDULES, help="simulated schedules (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds with real processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="first seed of either (default: %(default)s)")
    arguments = parser.parse_args()
    # Engines log each step that fails, and here they are meant to.
    logging.disable(logging.CRITICAL)
    failed = run_schedules(arguments.seed, arguments.schedules) if arguments.schedules else 0
    if arguments.rounds:
        failed += rounds.run(arguments.seed, arguments.rounds)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
