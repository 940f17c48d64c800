"""Runs the script with one of the planted faults of tests/faults.txt: see it_learns.py.

    python -m learn.lab.with_fault --fault "loss: wrong sign" --steps 30
"""
import argparse
import sys
import tempfile
from pathlib import Path

from tests import mutations


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--fault", required=True)
    args, flags = parser.parse_known_args(argv)
    found = [fault for fault in mutations.planted() if fault[0] == args.fault]
    if not found:
        sys.exit(f"tests/faults.txt has no fault {args.fault!r}")
    [(_, file, text)] = found
    with tempfile.TemporaryDirectory() as folder:
        mutations.copy(folder)
        (Path(folder) / file).write_text(text)
        sys.path.insert(0, folder)  # the copy's nano_rlvr is imported, in vLLM's process as well
        import nano_rlvr
        nano_rlvr.main(flags)


if __name__ == "__main__":
    main(sys.argv[1:])
