"""Functions in a user's file: a reward, a rollout, rows. Their errors are one line."""
import functools
import importlib.util
import sys
import traceback
from pathlib import Path


def user_error(e, spec):
    """An exception in "my_file.py:function", in one line with the last line number in this file."""
    path = str(Path(spec.rpartition(":")[0]).resolve())
    frames = traceback.extract_tb(e.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    at = f" (line {lines[-1]})" if lines else ""  # a SyntaxError names its line itself
    return " ".join(f"{type(e).__name__}: {e}".split())[:500] + at


@functools.cache
def run_file(path, version):
    """The module of a user's file, which is executed once per version: its time of change."""
    sys.path.append(str(path.parent))  # the file may import its neighbours
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def load(spec, kind="reward"):
    """The function of "my_file.py:function" or "installed.module:function"; a one-line ValueError
    if there is none. The functions of one file share its variables."""
    module, _, name = spec.rpartition(":")
    path = Path(module).resolve() if module.endswith(".py") else None
    if not module or path and not path.is_file():
        raise ValueError(f"{kind} file {module!r} does not exist (it is named my_file.py:{name})")
    try:
        if path:
            imported = run_file(path, path.stat().st_mtime_ns)
        else:
            imported = importlib.import_module(module)
        return getattr(imported, name)
    except (Exception, SystemExit) as e:  # a user's file: any type
        raise ValueError(f"{kind} {spec}: {user_error(e, spec)}") from None
