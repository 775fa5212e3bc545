"""Lower tiers of the KV cache: where pages go on living when the device's pool needs their room."""
