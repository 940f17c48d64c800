"""What the training path does faster than the obvious way equals the obvious way."""
import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nano_rlvr as nr
from conftest import fixed_rollouts, make_config
from runtime import stats
from runtime.batch import attend_in_groups, flash_attention, pack

# ---- collate


def naive_collate(rollouts):
    """collate() one token at a time, as its docstring says it."""
    input_ids, position_ids, kv_index, predictors = [], [], [], []
    cu_seqlens_q, cu_seqlens_k, prompt_at = [0], [0], {}
    for r in rollouts:
        key = tuple(r.prompt)
        if key not in prompt_at:  # the first completion of a prompt stores it
            prompt_at[key] = range(len(input_ids), len(input_ids) + len(r.prompt))
            input_ids += r.prompt
            position_ids += range(len(r.prompt))
        prompt = prompt_at[key]
        completion = range(len(input_ids), len(input_ids) + len(r.completion))
        input_ids += r.completion
        position_ids += range(len(r.prompt), len(r))
        kv_index += [*prompt, *completion]
        before = [prompt[-1], *completion[:-1]]
        predictors += [position for position, sampled in zip(before, r.sampled) if sampled]
        cu_seqlens_q.append(len(input_ids))
        cu_seqlens_k.append(len(kv_index))
    lengths = torch.tensor([sum(r.sampled) for r in rollouts])  # (B,)
    sequence_ids = torch.arange(len(rollouts)).repeat_interleave(lengths)  # (R,)

    def of_sampled(name):
        return torch.tensor(
            [x for r in rollouts for x, kept in zip(getattr(r, name), r.sampled) if kept])

    return dict(
        input_ids=torch.tensor([input_ids]),  # (1, T)
        position_ids=torch.tensor([position_ids]),  # (1, T)
        kv_index=torch.tensor(kv_index), predictors=torch.tensor(predictors),  # (K,), (R,)
        cu_seqlens_q=torch.tensor(cu_seqlens_q).int(),  # (B+1,)
        cu_seqlens_k=torch.tensor(cu_seqlens_k).int(),  # (B+1,)
        targets=of_sampled("completion"), sequence_ids=sequence_ids,  # (R,), (R,)
        lengths=lengths,  # (B,)
        advantage=of_sampled("advantages"),  # (R,)
        weight=torch.tensor([r.weight for r in rollouts])[sequence_ids],  # (R,)
        vllm_logps=of_sampled("vllm_logps"),  # (R,)
        old=None, ref=None, max_seqlen=max(map(len, rollouts)))


PROMPTS = [[1], [1, 2], [2, 1], [1, 2, 3, 4, 5], [7] * 9]  # one is the beginning of another


@pytest.mark.exercise_8
@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(PROMPTS), st.integers(1, 12)), min_size=1, max_size=12),
       st.integers(0, 1000))
def test_collate_equals_one_token_at_a_time_bit_for_bit(sequences, seed):
    rng = random.Random(seed)
    rollouts = [nr.Rollout(list(prompt), [rng.randrange(200_000) for _ in range(n)], "", False,
                           [-rng.random() for _ in range(n)], weight=rng.random(),
                           sampled=[True, *(rng.random() < 0.7 for _ in range(n - 1))],
                           advantages=[rng.gauss(0, 1) for _ in range(n)])
                for prompt, n in sequences]
    got, wanted = vars(nr.collate(rollouts)), naive_collate(rollouts)
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        if torch.is_tensor(x):
            assert got[name].dtype == x.dtype and torch.equal(got[name], x), name
        else:
            assert got[name] == x, name


# ---- attention on a GPU


def test_flash_attention_passes_on_what_one_kernel_for_all_sequences_needs(monkeypatch):
    """The stand-in has the signature of torch 2.13, and the dense attention as kernel."""
    rollouts = [nr.Rollout([1, 2, 3], [4] * n, "", False, [0.0] * n) for n in (2, 5, 5)]
    batch = nr.collate(rollouts)
    q = torch.randn(batch.input_ids.shape[1], 6, 8)  # (T, heads, d)
    k, v = torch.randn(2, len(batch.kv_index), 2, 8)  # (K, kv heads, d) twice

    def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size,
               enable_gqa=False):
        assert window_size == (-1, 0) and (max_q, max_k) == (8, 8) and enable_gqa
        assert cu_seq_q is batch.cu_seqlens_q and cu_seq_k is batch.cu_seqlens_k
        return attend_in_groups(query, key, value, batch, scale)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    assert torch.equal(flash_attention(q, k, v, batch, 0.3), attend_in_groups(q, k, v, batch, 0.3))


# ---- vLLM


def test_flat_log_probs_are_those_of_the_sampled_tokens_and_only_their_seeds_draw_noise(
        llm, monkeypatch):
    """vLLM's forward_cpu draws noise for all requests first and overwrites it."""
    from vllm import LLM
    prompts, seen, generate = [[5, 6, 7], [8, 9]], [], LLM.generate
    drawn, exponential = [], torch.Tensor.exponential_

    def with_and_without(self, requests, params, use_tqdm):
        for flat in (False, True):
            for p in params:
                p.flat_logprobs = flat
            drawn.clear()
            seen.append(generate(self, requests, params, use_tqdm=use_tqdm))
        return seen[-1]

    def counted(self, *args, generator=None):
        drawn.append(generator)
        return exponential(self, *args, generator=generator)

    monkeypatch.setattr(LLM, "generate", with_and_without)
    monkeypatch.setattr(torch.Tensor, "exponential_", counted)
    rollouts = nr.rollout(llm, prompts, 3, 1.0, 20, seeds=[11, 12])
    assert len(drawn) == sum(len(r.completion) for r in rollouts) and None not in drawn
    samples = [s for request in seen[0] for s in request.outputs]
    assert [r.completion for r in rollouts] == [list(s.token_ids) for s in samples]
    assert [r.vllm_logps for r in rollouts] == [
        [logprobs[token].logprob for logprobs, token in zip(s.logprobs, s.token_ids)]
        for s in samples]
    assert len({tuple(r.vllm_logps) for r in rollouts}) > 1


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


# ---- nothing is read back from the device before the last pack


class Engine:
    """Stands in for DeepSpeed, whose own work is not looked at."""

    def __init__(self, module):
        self.module, self.batches = module, 0

    def __call__(self, batch):
        return self.module(batch)

    def backward(self, loss):
        self.batches += 1
        loss.backward()

    def step(self):
        self.module.zero_grad()

    def get_global_grad_norm(self):
        return 0.0

    def was_step_applied(self):
        return True


class LastPack(Exception):
    """All packs have run and update() wants to read the metrics."""


@pytest.mark.parametrize("changes", [
    dict(), dict(ratio="sequence", correction="token_mask", gate="detach"), dict(delta=2.0),
    dict(ratio="product", correction="sequence_mask", gate="soft"), dict(correction="none")])
def test_no_value_is_read_between_the_first_forward_and_the_last_backward(
        model, tokenizer, monkeypatch, changes):
    """On the device "meta" tensors have no values: .item(), .tolist(), .cpu(), bool() and shapes
    that depend on values raise an error."""
    def stop(sums):
        raise LastPack(sums)

    monkeypatch.setattr(stats, "token_means", stop)
    packs, batches = pack(fixed_rollouts(tokenizer), 200), []
    for rollouts in packs:
        batch, on_cpu = nr.collate(rollouts, "meta"), nr.collate(rollouts)
        batch.old = batch.ref = batch.vllm_logps
        # read only where attention runs on a CPU
        batch.cu_seqlens_q, batch.cu_seqlens_k = on_cpu.cu_seqlens_q, on_cpu.cu_seqlens_k
        batches.append(batch)
    engine = Engine(nr.TokenLogps(model.to("meta")))
    with pytest.raises(LastPack) as stopped:
        nr.update(engine, batches, make_config(**changes))
    assert engine.batches == len(packs) > 1
    assert all(x.is_meta for sums in stopped.value.args[0] for x in sums.values())


def test_a_filler_changes_no_metric(model, tokenizer):
    rollouts, cfg = fixed_rollouts(tokenizer), make_config(kl_coef=0.0, mismatch_bound=1e9)

    (filler,) = nr.pack_evenly([dataclasses.replace(rollouts[0], weight=0.0)], rollouts[0], 400)
    alone, both = (nr.update(Engine(nr.TokenLogps(model)), [nr.collate(p) for p in packs], cfg)
                   for packs in ([rollouts], [rollouts, filler]))
    assert alone == both
