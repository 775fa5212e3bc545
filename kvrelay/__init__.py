"""kvrelay: a large language model served as a fleet of gRPC microservices."""

__version__ = "0.1.0"
