"""What running needs. A module imports only modules of a lower floor: tests/test_house.py."""
import os
import sysconfig

__version__ = "0.4.0"  # the newest heading of CHANGELOG.md

# torch reads these when it is imported
os.environ |= {
    "OMP_WAIT_POLICY": "PASSIVE",  # idle threads do not spin
    "THP_MEM_ALLOC_ENABLE": "1",  # large arrays on a CPU get 2 MB pages
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # no warning about NUMA
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # pack sizes vary
} | os.environ  # what the user has set counts
os.environ["PATH"] = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"  # pip's ninja first


