"""Predict which parallel layout trains a language model fastest, how fast, whether it fits, how sure, and why."""

import sys

from solver.command_line import main

if __name__ == "__main__":
    sys.exit(main())
