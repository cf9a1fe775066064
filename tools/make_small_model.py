#!/usr/bin/env python3
"""Makes the small real MoE model that the demo and the tests use. The work is in the package smallmodel beside it."""

import sys

from smallmodel.cli import main

if __name__ == "__main__":
    sys.exit(main())
