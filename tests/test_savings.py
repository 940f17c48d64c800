"""What the training path does faster than the obvious way equals the obvious way."""
import random
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nano_rlvr as nr
from conftest import close, fixed_rollouts, float64, make_config
from runtime import stats
from runtime.batch import fill_packs

PROMPTS = [[1], [1, 2], [2, 1], [1, 2, 3, 4, 5], [7] * 9]  # one is the beginning of another


@pytest.mark.exercise_8
@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(PROMPTS), st.integers(1, 12)), min_size=1, max_size=12),
       st.integers(0, 1000))
def test_collate_stores_each_prompt_once_and_says_where_each_sequence_is(sequences, seed):
    rng = random.Random(seed)
    rollouts = [nr.Rollout(list(prompt), [rng.randrange(200_000) for _ in range(n)], "", False,
                           [-rng.random() for _ in range(n)], weight=rng.random(),
                           loss_mask=[True, *(rng.random() < 0.7 for _ in range(n - 1))],
                           advantages=[rng.gauss(0, 1) for _ in range(n)])
                for prompt, n in sequences]
    pack = nr.collate(rollouts)
    row, positions = pack.input_ids[0], pack.position_ids[0]  # (T,), (T,)
    prompts = {tuple(r.prompt) for r in rollouts}
    tokens = sum(map(len, [*prompts, *(r.completion for r in rollouts)]))
    for name, yours, expected in (
            ("tokens", len(row), tokens), ("max_seqlen", pack.max_seqlen, max(map(len, rollouts))),
            ("cu_seqlens_q", pack.cu_seqlens_q[[0, -1]].tolist(), [0, tokens]),
            ("cu_seqlens_k", pack.cu_seqlens_k[[0, -1]].tolist(), [0, len(pack.kv_index)]),
            ("lengths", pack.lengths.tolist(), [sum(r.loss_mask) for r in rollouts])):
        assert yours == expected, f"{name} of {sequences}: yours {yours}, wanted {expected}"
    wanted = []  # of each sampled token
    for i, r in enumerate(rollouts):
        start, end = pack.cu_seqlens_k[i:i + 2]
        keys = pack.kv_index[start:end]  # positions of the sequence in the row
        assert row[keys].tolist() == r.prompt + r.completion and pack.old is pack.ref is None
        assert positions[keys].tolist() == [*range(len(r))]
        queries = torch.arange(*pack.cu_seqlens_q[i:i + 2])
        assert len(queries) >= len(r.completion) and torch.equal(keys[-len(queries):], queries)
        wanted += [(i, keys[len(r.prompt) + j - 1].item(), r.completion[j],
                    *map(np.float32, (r.vllm_logps[j], r.advantages[j], r.weight)))
                   for j, kept in enumerate(r.loss_mask) if kept]
    assert wanted == [*zip(*(x.tolist() for x in (
        pack.sequence_ids, pack.predictors, pack.targets, pack.vllm_logps, pack.advantage,
        pack.weight)), strict=True)]


def test_after_a_sync_no_prompt_is_taken_from_the_cache(llm):
    """On a GPU sleeping empties the cache."""
    from vllm import SamplingParams
    prompt, once = [{"prompt_token_ids": list(range(200))}], SamplingParams(max_tokens=1)
    cached = []
    for sync in (False, False, True):
        if sync:
            llm.sleep()
            nr.sync_weights(nr.make_policy(make_config()), llm)
        cached.append(llm.generate(prompt, once, use_tqdm=False)[0].num_cached_tokens)
    assert cached[1] > 0 == cached[2]


@pytest.mark.parametrize("changes", [
    dict(delta=2.0), dict(ratio="sequence", correction="token_mask", surrogate="cispo"),
    dict(ratio="product", correction="sequence_mask", surrogate="sapo")])
def test_no_value_is_read_between_the_first_forward_and_the_last_backward(
        model, tokenizer, monkeypatch, changes):
    """On the device "meta" tensors have no values: .item(), .tolist(), .cpu(), bool() and shapes
    that depend on values raise an error. The engine stands in for DeepSpeed."""
    monkeypatch.setattr(stats, "token_means", mock.Mock(side_effect=KeyboardInterrupt))
    lists, packs = fill_packs(fixed_rollouts(tokenizer), 200), []
    for rollouts in lists:
        pack, on_cpu = nr.collate(rollouts, "meta"), nr.collate(rollouts)
        pack.old = pack.ref = pack.vllm_logps
        # read only where attention runs on a CPU
        pack.cu_seqlens_q, pack.cu_seqlens_k = on_cpu.cu_seqlens_q, on_cpu.cu_seqlens_k
        packs.append(pack)
    engine = mock.Mock(side_effect=nr.TokenLogps(model.to("meta")))
    engine.backward.side_effect = torch.Tensor.backward
    with pytest.raises(KeyboardInterrupt):  # all packs have run, their metrics would be read
        nr.update(engine, packs, make_config(**changes))
    assert engine.backward.call_count == len(lists) > 1
    assert all(x.is_meta for sums in stats.token_means.call_args[0][0] for x in sums.values())


@pytest.mark.parametrize("changes, passes", [
    (dict(aggregate="sequence"), 8), (dict(aggregate="token", surrogate="cispo"), 8),
    (dict(aggregate="constant", ratio="sequence"), 8), (dict(kl_coef=0.1), 16),
    (dict(surrogate="kimi"), 16)], ids=str)
def test_without_a_kl_a_sequence_with_advantage_0_needs_no_pass(group, tokenizer, changes, passes):
    """The gradient of a step is the same as with all 16 passes, in float64 and to rounding."""
    with float64():
        cfg = make_config(**dict(kl_coef=0.0, pack_tokens=300) | changes)
        module = nr.TokenLogps(nr.load_model(cfg))

        def gradient(zero, skip):
            rollouts = fixed_rollouts(tokenizer)
            for r in rollouts[:zero]:
                r.advantages = [0.0] * len(r.completion)
            packs = nr.make_packs([rollouts], cfg, skip)
            module.zero_grad()
            for pack in packs:
                old = pack.vllm_logps + 0.01 if cfg.surrogate == "kimi" else None
                ref = pack.vllm_logps if cfg.kl_coef else None
                nr.policy_loss(module(pack)[0], old, ref, pack, cfg)[0].backward()
            sequences = sum(len(pack.lengths) for pack in packs)
            assert sequences == sum(r.weight > 0 for r in rollouts)
            return sequences, torch.cat([p.grad.flatten() for p in module.parameters()])

        some, ours = gradient(8, True)
        every, wanted = gradient(8, False)  # as for a loss with a gradient at advantage 0
        assert (some, every) == (passes, 16)
        close(ours, wanted)
        if passes == 8:  # AdamW's step with momentum is taken all the same
            one, nothing = gradient(16, True)
            assert one == 1 and not nothing.any()
