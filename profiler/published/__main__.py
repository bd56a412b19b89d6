"""``python -m profiler.published``: the command in profiler.published.command."""

import sys

from profiler.published.command import main

if __name__ == "__main__":
    sys.exit(main())
