"""The router: owns text, knows the fleet, sends each request where its prefix lies."""
