"""Two layouts, packs and rows: one gradient."""
import dataclasses
import math
import random

import pytest
import torch

import nano_rlvr as nr
import runtime.model
from conftest import close, fixed_rollouts, float64, make_config
from runtime import ranks
from runtime.batch import fill_rows

LENGTHS = {  # of completions, a draw from a random generator
    "equal": lambda rng: 300,
    "ragged": lambda rng: min(3000, 1 + int(rng.lognormvariate(5, 1))),
    "two kinds": lambda rng: rng.choice([40, 2000]) + rng.randint(0, 30),
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_rows_of_similar_length_have_little_padding_and_keep_the_budget(kind):
    """512 completions of 64 prompts, as in a step of the defaults."""
    rng = random.Random(0)
    rollouts = []
    for i in range(512):
        n = LENGTHS[kind](rng)
        prompt = [i // 8] * (50 + i // 8)
        rollouts.append(nr.Rollout(prompt, [0] * n, str(i), False, [0.0] * n))
    lists = fill_rows(rollouts, 32768)
    assert sorted(r.text for rows in lists for r in rows) == sorted(r.text for r in rollouts)
    padded = 0
    for rows in lists:
        size = len(rows) * max(map(len, rows))
        assert size <= 32768 or len(rows) == 1
        padded += size
    assert padded < 1.1 * sum(map(len, rollouts))


@pytest.mark.numeric
@pytest.mark.parametrize("algo", nr.ALGOS)
def test_rows_have_the_loss_and_the_gradient_of_packs(group, tokenizer, algo):
    """Also with tokens that the policy did not sample, and with log-probs before the update."""
    changes = {name: x for name, x in nr.ALGOS[algo].items() if name not in ("prompts", "samples")}
    with float64():
        cfg = make_config(**changes | dict(samples=4, pack_tokens=150, minibatches=2))
        model = runtime.model.load_model(cfg)
        model.model.layers = model.model.layers[:1]
        policy = nr.TokenLogps(model)
        losses = []
        gradients = []
        for layout in ("packed", "rows"):
            rollouts = fixed_rollouts(tokenizer)
            for r in rollouts:
                n = len(r.completion)
                r.loss_mask = [i % 3 != 1 for i in range(n)]
            groups = [rollouts[i:i + 4] for i in range(0, 16, 4)]
            cfg = dataclasses.replace(cfg, layout=layout)
            model.set_attn_implementation("packed" if layout == "packed" else "sdpa")
            nr.assign_advantages(groups, cfg, math.nan)
            policy.zero_grad()
            total = 0.0
            for pack in nr.make_packs(groups, cfg):
                logp, _ = policy(pack)
                old = pack.vllm_logps
                ref = pack.vllm_logps - 0.1 if cfg.kl_coef else None
                loss, _ = nr.policy_loss(logp, old, ref, pack, cfg)
                loss.backward()
                total += loss.item()
            losses.append(total)
            gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
        assert gradients[0].any()
        close(losses[0], losses[1])
        close(*gradients)


@pytest.mark.parametrize("layout", ["packed", "rows"])
def test_a_rank_with_fewer_packs_adds_one_that_has_the_columns_of_all_ranks(layout, monkeypatch):
    """As if another rank had two packs and a column of its own."""
    answers = iter([[1, 2], ["mine", "theirs"]])
    monkeypatch.setattr(ranks, "all_gather", lambda values: next(answers))
    r = nr.Rollout([5], [6, 7, 8], "", False, [0.0] * 3, extra={"mine": [1.0] * 3}, weight=1.0)
    lists = nr.pack_evenly([r], 100, layout)
    assert lists[0] == [r] and len(lists) == 2
    pack = nr.collate(lists[1], layout=layout)
    assert pack.extra.keys() == {"mine", "theirs"}
    assert pack.weight.tolist() == [0.0, 0.0] == pack.extra["mine"].tolist()
