"""What running needs. A module imports only modules of a lower floor: tests/test_house.py."""
import os
import sys
import sysconfig

__version__ = "0.5.0"  # the newest heading of docs/changelog.md

# torch reads these when it is imported
os.environ |= {
    "OMP_WAIT_POLICY": "PASSIVE",  # idle threads do not spin
    "THP_MEM_ALLOC_ENABLE": "1",  # large arrays on a CPU get 2 MB pages
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # no warning about NUMA
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # pack sizes vary
} | os.environ  # what the user has set counts
if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
    # DeepSpeed compiles its operators into a folder of this environment. In a shared folder, two
    # environments would compile them again and again, because each has another ninja or torch
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))
os.environ["PATH"] = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"  # pip's ninja first
