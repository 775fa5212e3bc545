"""The command line: one module a command, with `add_flags(parser)` and `run(args) -> exit code`.

Only the chosen command's module is imported: `kvrelay status` needs no torch, and starts at once.
"""
