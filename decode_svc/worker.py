"""Adds the decode service to a replica."""

from decode_svc.service import DecodeService
from kvrelay.replica.process import ReplicaProcess
from kvrelay.v1 import decode_pb2_grpc

SERVICE = "kvrelay.v1.Decode"


def register(replica: ReplicaProcess) -> None:
    """Have a replica serve `Decode`; call it before the replica starts."""
    replica.add_service(SERVICE, _install)


def _install(replica: ReplicaProcess) -> None:
    decode_pb2_grpc.add_DecodeServicer_to_server(DecodeService(replica), replica.server.grpc)
