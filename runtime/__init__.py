"""What running needs. A module imports only modules of a lower floor: tests/test_house.py."""
import os

__version__ = "0.4.0"  # the newest heading of CHANGELOG.md

# torch reads these when it is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads do not spin
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large arrays on a CPU get 2 MB pages
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warning about NUMA
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # pack sizes vary


def plain(text):
    """Text for the screen. A model, a data set or a server may have written parts of it: a control
    character, which could begin an escape sequence, becomes its code, as one for right to left."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
