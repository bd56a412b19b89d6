"""Predict which parallel layout trains a language model fastest: speed, memory, uncertainty, and the reasons."""

import sys

from solver.commands.command_line import main

if __name__ == "__main__":
    sys.exit(main())
