"""One module per command: `NAME.py` holds `NAME_command`. They are thin: options in, library call, `Output` out.

To add one: add the file, run `python -m atoll.cli.write_help`, and give it a section in docs/cli.md; tests check both.
"""
