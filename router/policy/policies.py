"""The policies by name, as `--policy` gives them."""

from typing import Final

from router.policy.least_loaded import least_loaded
from router.policy.prefix_aware import prefix_aware
from router.policy.random_choice import random_choice
from router.policy.round_robin import round_robin
from router.policy.values import Policy

POLICIES: Final[dict[str, Policy]] = {
    "prefix_aware": prefix_aware,
    "round_robin": round_robin,
    "random": random_choice,
    "least_loaded": least_loaded,
}
