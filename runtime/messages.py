"""What a run says when something is wrong: RunError, and errors as one line. Quick to import."""
import functools
import os
from textwrap import shorten


class RunError(RuntimeError):
    """Ends a run. Its text is the line that main() prints: what happened and what to do."""


def plain(text):
    """Text for the screen: control characters, which may come from a data set, become codes."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


@functools.cache
def hub_answers():
    """Whether the Hugging Face hub answers within 3 s. If not, its libraries use their local cache
    from now on: each of them would try again and again, for half a minute and a dozen lines."""
    from huggingface_hub import constants, get_session
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=3)
        except Exception:  # any of them means "not reached"
            constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"
    return not constants.HF_HUB_OFFLINE


def first_line(error, name=""):
    """An error in one line. `name`: the model or data set that the hub was asked for."""
    if name and not hub_answers():
        return f"the hub is offline or not reachable, and {name} is not in the local cache"
    return shorten(f"{type(error).__name__}: {error}", 500, placeholder=" ...")
