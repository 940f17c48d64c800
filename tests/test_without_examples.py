"""A default flag needs nothing in examples/, which a user may delete."""
import json
import subprocess
import sys

import rewards
from conftest import ENV, ROOT

PROGRAM = """
import json, sys
import rewards
columns = dict(answer=["5", "5"], numbers=[[2, 3]] * 2, target=[5, 5], completion_ids=[[1]] * 2)
texts = ["<think>2 + 3</think><answer>2 + 3</answer>", "<think></think><answer>5</answer>"]
with rewards.Verifier(sys.argv[1], workers=1, timeout=60, max_tokens=9) as verify:
    print(json.dumps(verify(texts, prompts=["q", "q"], **columns)))
"""


def test_every_known_reward_works_in_a_copy_without_examples(tmp_path):
    for name in "rewards.py", "runtime":
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, "-c", PROGRAM, ",".join(rewards.KNOWN)]
    printed = subprocess.run(command, cwd=tmp_path, env=ENV, check=True, capture_output=True)
    _, values, metrics = json.loads(printed.stdout)
    assert values.keys() == rewards.KNOWN.keys() and not any(metrics.values())
    assert values["gsm8k"] == [0.0, 1.0] and values["math"] == [1.0, 1.0]
    assert values["countdown"] == [1.0, 0.0] and values["format"] == [1.0, 1.0]
    assert values["right"] == [0.0, 1.0] and values["overlong"] == [0.0, 0.0]
    assert set(values["random"]) <= {0.0, 1.0}
