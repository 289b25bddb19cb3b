"""One module per command: `NAME.py` defines `NAME_command`, which parses options, calls the library and prints.

To add a command, add its file, run `python -m atoll.cli.write_help`, and describe it in docs/cli.md; tests check both.
"""
