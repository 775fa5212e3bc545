"""Adds the decode service to a replica."""

from decode_svc.peers import Peers
from decode_svc.service import DecodeService
from kvrelay.replica.process import ReplicaProcess
from kvrelay.v1 import decode_pb2_grpc

SERVICE = "kvrelay.v1.Decode"


def register(replica: ReplicaProcess) -> None:
    """Have a replica serve `Decode`; call it before the replica starts."""
    replica.add_service(SERVICE, _install)


def _install(replica: ReplicaProcess) -> None:
    peers = Peers(
        replica.channels, me=lambda: replica.peer, agent=replica.bridge.started.agent, identity=replica.identity
    )
    replica.on_stop(peers.settle)
    decode_pb2_grpc.add_DecodeServicer_to_server(DecodeService(replica, peers), replica.server.grpc)
