"""Adds the prefill service to a replica."""

from kvrelay.replica.process import ReplicaProcess
from kvrelay.v1 import prefill_pb2_grpc
from prefill_svc.service import PrefillService

SERVICE = "kvrelay.v1.Prefill"


def register(replica: ReplicaProcess) -> None:
    """Have a replica serve `Prefill`; call it before the replica starts."""
    replica.add_service(SERVICE, _install)


def _install(replica: ReplicaProcess) -> None:
    prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillService(replica), replica.server.grpc)
