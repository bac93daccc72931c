"""The one exception of the recorder."""

from kvtrace_tools.errors import ToolError


class RecordError(ToolError):
    """A recording that cannot be made. Its text is one line: what was found, what was expected."""
