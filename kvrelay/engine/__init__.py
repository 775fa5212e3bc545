"""The engine side of a replica: weights, KV pool, prefix cache, leases, scheduler. Knows nothing of grpc or redis."""
