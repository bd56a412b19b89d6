"""``python -m profiler.train``: the command in profiler.train.command."""

import sys

from profiler.train.command import main

if __name__ == "__main__":
    sys.exit(main())
