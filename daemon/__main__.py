"""The `colibrid` command's way in, also `python -m colibri.daemon`.

Loads the command inside a `try`, so that Ctrl-C during the imports ends it as quietly as later: exit code 130.
"""

import sys


def main() -> int:
    """Runs the command; returns its exit code."""
    try:
        from colibri.daemon.cli import main as command

        return command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
