"""A fleet on one machine: embedded store, registry, router and replicas as supervised child processes."""
