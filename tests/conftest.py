"""What the tests share: the bundled model, one real vLLM engine for the session, real DeepSpeed engines, fixed rollouts."""
import dataclasses
import os
import random
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import nano_rlvr as nr  # noqa: E402

# for child processes: not the group that this one has joined
ENV = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
SHARED = ROOT.parent / "shared" / "data"  # GSM8K, MATH-500 ... as jsonl, where the machine has them


def make_config(**changes):
    """The default configuration of the bundled model with small sizes, checked like a command line's."""
    base = dataclasses.replace(nr.Config(), model=str(ROOT / "models/tiny"), **nr.MODELS["models/tiny"])
    small = dict(prompts=4, samples=4, steps=2, max_prompt=64, eval_size=32, kl_coef=0.001, pack_tokens=4096)
    return nr.check(dataclasses.replace(base, **{**small, **changes}))


def fixed_rollouts(tokenizer, groups=4, n=4, seed=0):
    """Ragged completions with made-up rewards' advantages, off-policy log-probs and weights: no engine needed."""
    rng, out = random.Random(seed), []
    for g in range(groups):
        prompt = tokenizer(f"<|user|>{rng.randint(1, 20)}+{rng.randint(1, 20)}<|assistant|>", add_special_tokens=False)["input_ids"]
        for _ in range(n):
            length = rng.randint(1, 40)
            completion = [rng.randrange(256) for _ in range(length)]
            logps = [-rng.expovariate(1.0) for _ in range(length)]
            out.append(nr.Rollout(prompt, completion, "", False, logps, reward=float(rng.random() < 0.5), advantage=rng.gauss(0, 1),
                                  weight=rng.random() / 100))
    return out


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(ROOT / "models/tiny")


@pytest.fixture(scope="session")
def group():
    nr.launch()


@pytest.fixture(scope="session")
def llm(group):
    """One vLLM engine holding the bundled weights; a test that syncs others into it must put them back (fresh_llm)."""
    return nr.make_llm(make_config(max_prompt=256, prompts=16, samples=8, eval_size=64))


@pytest.fixture
def fresh_llm(llm):
    yield llm
    engine = nr.make_policy(make_config())
    nr.sync_weights(engine, llm)


@pytest.fixture
def model(group):
    """The bundled model as the trainer loads it."""
    torch.manual_seed(0)
    return nr.load_model(make_config())
