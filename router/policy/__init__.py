"""Routing policies: pure functions filter -> score -> pick. See README.md in this folder."""
