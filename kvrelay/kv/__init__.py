"""KV that travels: block keys, leases, and the transfer of pages between replicas."""
