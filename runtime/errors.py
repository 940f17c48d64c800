"""Failures of a run that its user must see as one line, without a traceback."""


class RunError(RuntimeError):
    """Ends a run. Its text is the line that main() prints: what happened and what to do."""
