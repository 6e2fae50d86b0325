"""The one exception that bad input raises: it names the file, the position and the fix."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input from a user: a configuration, a data file, a path or a command line.

    Entry points catch it, print its message without a traceback and exit with status 2.

    Args:
        where: File and position, for example ``"chat.json: sessions[2].messages[0].speaker"``.
        what: What is wrong, with the offending value.
        fix: What to change.

    Example:
        >>> str(InputError("a.json: members", "the list is empty", "name at least one member"))
        'a.json: members: the list is empty; name at least one member'
    """

    def __init__(self, where: str, what: str, fix: str) -> None:
        super().__init__(f"{where}: {what}; {fix}")
        self.where, self.what, self.fix = where, what, fix
