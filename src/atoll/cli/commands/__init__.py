"""One module per command: `NAME.py` holds `NAME_command`. They are thin: options in, library call, `Output` out."""
