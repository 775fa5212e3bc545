"""Generated from proto/kvrelay/v1 by `make gen`."""
