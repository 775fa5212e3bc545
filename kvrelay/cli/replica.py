"""`kvrelay replica`: one process that serves the roles it is given."""

import argparse

import decode_svc.worker
import prefill_svc.worker
from kvrelay import config
from kvrelay.config import ReplicaConfig
from kvrelay.replica.process import ReplicaProcess
from kvrelay.types import Role


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a replica's flags."""
    config.add_flags(parser, ReplicaConfig)


def run(args: argparse.Namespace) -> int:
    """Run a replica until a signal ends it."""
    settings = config.build(ReplicaConfig, vars(args))
    role = Role(settings.role)
    replica = ReplicaProcess(settings)
    if role.prefills:
        prefill_svc.worker.register(replica)
    if role.decodes:
        decode_svc.worker.register(replica)
    return replica.run()
