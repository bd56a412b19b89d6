"""``python -m predictor.accuracy``: the command in predictor.accuracy.command."""

import sys

from predictor.accuracy.command import main

if __name__ == "__main__":
    sys.exit(main())
