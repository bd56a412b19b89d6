"""The only error that users are meant to see."""


class InputError(ValueError):
    """Error for user input that cannot be used.

    The message is one sentence for the user: what is wrong, where, and what would be right. Entry points print it and exit with
    status 2; it never reaches the user as a traceback.
    """
