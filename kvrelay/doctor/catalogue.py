"""The checks that there are, in the order in which they are shown."""

from typing import Final

CHECKS: Final = {
    "python": "version of Python against the supported range",
    "packages": "packages of the base install against their supported ranges",
    "worker packages": "packages that replicas need, likewise",
    "torch": "torch imports, and sees the GPU that is there",
    "flash-attn": "flash-attn imports (with a GPU)",
    "nixl": "NIXL imports, has its plugins, opens an agent with UCX",
    "ucx libraries": "no process has loaded two UCX libraries",
    "nixl bandwidth": "READ bandwidth between two processes of this machine, its transport, against memcpy",
    "rdma": "RDMA ports: state, rate, settings that hide them from UCX",
    "memlock": "limit on locked memory (with RDMA)",
    "peermem": "RDMA reaches the memory of GPUs (with both)",
    "nics": "network interfaces and their speed, `UCX_NET_DEVICES`",
    "shared memory": "room in `/dev/shm`",
    "open files": "limit on open files",
    "cma": "whether processes may copy from each other's memory: ptrace scope, PID namespace, container",
    "cores": "cores and CPU quota against the compute threads of replicas",
    "advertise": "the address that a process with these `--bind` and `--advertise` would tell others",
    "redis": "round trip of 50 PINGs, version",
    "redis memory": "eviction policy, memory used",
    "router": "a router answers and is in order",
    "registry": "the registry is healthy and tells its directory",
    "replicas": "each replica's state and its health through its advertised address",
    "addresses": "advertised addresses can be connected to, and none is loopback while others are not",
    "heartbeats": "a heartbeat of each replica arrives",
    "skew": "replicas agree in protocol, weights, tokenizer, blocks, pages",
}
"""Name of each check and what it looks at; `docs/operating.md` is checked against it by a test."""
