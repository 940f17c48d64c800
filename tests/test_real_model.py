"""Runs real_model.py in a process of its own: it takes gigabytes, which end with the process."""
import re
import subprocess
import sys

import pytest

from conftest import ENV, ROOT


def test_a_pretrained_model_with_its_own_tokenizer():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist",
         ROOT / "tests/real_model.py"], capture_output=True, text=True, env=ENV, cwd=ROOT)
    assert not done.returncode, done.stdout[-5000:]
    if skipped := re.search(r"^SKIPPED .*", done.stdout, re.M):
        pytest.skip(f"the tests of a real model: {skipped[0]}")
    assert re.search(r"\b3 passed", done.stdout), done.stdout[-1000:]
