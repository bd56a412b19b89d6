"""The only error that users are meant to see, and the one about a missing torch."""

from __future__ import annotations

import importlib.util


class InputError(ValueError):
    """Error for user input that cannot be used.

    The message is one sentence for the user: what is wrong, where, and what would be right. Entry points print it and exit with
    status 2; it never reaches the user as a traceback.
    """


def require_torch(purpose: str) -> None:
    """Raise InputError if torch is not installed; reading profiles and predicting do not need it."""
    if importlib.util.find_spec("torch") is None:
        raise InputError(f"{purpose} needs torch, which is missing here; run `make setup-measure` or pip install torch==2.13.0")
