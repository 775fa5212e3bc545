"""The front side of a replica: engine bridge, membership, lease service, process."""
