"""The one exception that the command line turns into a line on stderr and exit code 1."""


class ToolError(Exception):
    """An input that cannot be used. Its text is one line naming file, found and expected."""
