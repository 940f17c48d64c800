"""From flag to function: the value of every flag of Config reaches what it names.

Functions have tests of their own. Here is what lies between the command line and them: WIRES has a
row per flag with two or more values and what is seen where the value arrives. Values of flags that
arrive at one place differ, so that two swapped flags show."""
import contextlib
import dataclasses
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import vllm
from transformers import AutoModelForCausalLM, AutoTokenizer

import data
import nano_rlvr as nr
import rewards
from conftest import ROOT, judged, make_config, write_rows
from examples import tensor_parallel
from runtime import evaluation, memory, model, ranks, sync

TINY = str(ROOT / "models/tiny")


@contextlib.contextmanager
def patched(*replacements):
    """A MonkeyPatch with (object, name, replacement) ... in place."""
    with pytest.MonkeyPatch.context() as patch:
        for replacement in replacements:
            patch.setattr(*replacement)
        yield patch


# ---- places where a flag arrives: functions of a Config


def llm_args(cfg, gpu=False):
    """The keyword arguments of vllm.LLM."""
    engine = mock.Mock()
    engine.apply_model.return_value = [[]]  # no layer of experts
    with patched((vllm, "LLM", llm := mock.Mock(return_value=engine)),
                 (torch.cuda, "is_available", lambda: gpu),
                 (torch.cuda, "mem_get_info", lambda: (80 * memory.GIB, 80 * memory.GIB))):
        nr.Sampler(cfg)
    return llm.call_args.kwargs


def arrival(function, *patch):
    """The call with which a function is reached; what would follow it is left out."""
    with patched((*patch, arrived := mock.Mock(side_effect=KeyboardInterrupt))):
        with pytest.raises(KeyboardInterrupt):
            function()
    return arrived.call_args


def loaded(cfg):
    """The call that reads the trainer's model."""
    return arrival(lambda: model.load_model(cfg), AutoModelForCausalLM, "from_pretrained")


all_right = judged(lambda texts, columns: [1.0] * len(texts))


def recorded(calls):
    """A stand-in for rollout() that keeps what it is asked for."""
    def sample(llm, prompts, n, temperature, max_tokens, seeds=None, **sampling):
        calls.append(dict(prompts=prompts, n=n, temperature=temperature, max_tokens=max_tokens,
                          seeds=seeds, **sampling))
        return [nr.Rollout(p, [65], "1", False, [0.0]) for p in prompts for _ in range(n)]
    return sample


LLM = SimpleNamespace(get_tokenizer=lambda: None)
EXAMPLES = [{"question": str(i), "answer": str(i), "prompt_ids": [i]} for i in range(1000)]


def recorded_run(cfg):
    """A run of which only the rollouts are asked for, and the list of what is asked."""
    calls = []
    run = SimpleNamespace(cfg=cfg, llm=LLM, train_set=EXAMPLES, eval_set=EXAMPLES[:3],
                          verifier=all_right, metrics={}, rollout=recorded(calls))
    return run, calls


def collected(cfg, step=3):
    """What the rollouts of a step are asked for, a dict per draw. All rewards are equal."""
    run, calls = recorded_run(cfg)
    nr.collect_rollouts(run, step)
    return calls


def training(name):
    """An argument of the first draw."""
    return lambda cfg: collected(cfg)[0][name]


def evaluated(cfg):
    """What an evaluation of 3 examples asks rollout() for: greedy completions, then samples."""
    run, calls = recorded_run(cfg)
    evaluation.evaluate(run, nr.score)
    return calls


def setting(name):
    """An argument of the Verifier; "spec" is --rewards."""
    def observe(cfg):
        with patched((rewards, "Verifier", verifier := mock.Mock())):
            rewards.start_verifier(cfg, EXAMPLES[:1], EXAMPLES[:1])
        [spec], others = verifier.call_args
        return (others | {"spec": spec})[name]
    return observe


def splits(cfg):
    """Training and held-out examples; of a generated task at most 64 each."""
    rows = data.function_rows
    with patched((data, "function_rows", lambda make, split, size, seed: rows(
            make, split, min(size, 64), seed))):
        tokenizer = AutoTokenizer.from_pretrained(TINY)
        return data.load_splits(cfg, tokenizer, notify=lambda text: None)


def prompts_around(cfg):
    """The texts of all prompts, with "?" for the question."""
    decode = AutoTokenizer.from_pretrained(TINY).decode
    return {decode(e["prompt_ids"]).replace(e["question"], "?") for e in sum(splits(cfg), [])}


def group_timeout(cfg):
    """What main() gives to init_process_group."""
    with patched((nr, "parse_config", lambda argv: cfg)):
        return arrival(lambda: nr.main([]), ranks, "init_process_group").args


def torch_seed(cfg):
    """The seed of torch when the policy, with its adapters, is made."""
    arrival(lambda: nr.make_policy(cfg), nr, "load_model")
    return torch.initial_seed()


FILES = {  # values name them as {tmp}/...
    "one.jsonl": [{"question": f"{i}+1", "answer": "1"} for i in range(20)],
    "columns.jsonl": [{"q": f"{i}+1", "p": f"{i}-1", "a": f"{i}", "b": f"-{i}"} for i in range(20)],
    "other.jsonl": [{"q": "q", "p": "p", "a": "a", "b": "b"}],
}
COLUMNS = dict(data="{tmp}/columns.jsonl", eval_data="{tmp}/other.jsonl", question_key="q",
               answer_key="a")
ELSEWHERE = {  # flags whose values are compared in another file
    "test_config": "algo config", "test_cuda_dry_run": "model dtype memory_gb offload",
    "test_data": "data eval_data max_prompt", "test_evaluation": "eval_size",
    "test_engines": "mismatch_bound beta2 weight_decay", "test_report": "keep_rollouts",
    "test_resume": "name out resume resume_force keep wandb", "test_tools": "rollout",
    "test_trl": "max_grad_norm",
    "test_variants": "steps prompts samples filter_groups resample epochs minibatches lr lr_end "
    "warmup pack_tokens eval_every save_every"}

# flag -> values, where they arrive, what is seen there for each (None: the values), other flags
WIRES = {
    # model and data
    "trust_remote_code": ((False, True), lambda cfg: {
        x["trust_remote_code"] for x in (loaded(cfg).kwargs, llm_args(cfg))}, ({False}, {True})),
    "compile": (("off", "on"), lambda cfg: getattr(nr.load_model(cfg), "is_compiled", False),
                (False, True)),
    "task": (("arithmetic", "countdown"),
             lambda cfg: [{"terms", "target"} & part[0].keys() for part in splits(cfg)],
             ([{"terms"}] * 2, [{"target"}] * 2), dict(max_prompt=400, eval_size=4)),
    "question_key": (("q", "p"), lambda cfg: [part[0]["question"] for part in splits(cfg)],
                     (["0+1", "q"], ["0-1", "p"]), COLUMNS),
    "answer_key": (("a", "b"), lambda cfg: [part[0]["answer"] for part in splits(cfg)],
                   (["0", "a"], ["-0", "b"]), COLUMNS),
    "template": (("none", "Q: {question}!", "chat"),
                 lambda cfg: (prompts_around(cfg), setting("messages")(cfg)),
                 (({"?"}, False), ({"Q: ?!"}, False), ({"<|user|>?<|assistant|>"}, True)),
                 dict(data="{tmp}/one.jsonl")),
    "rewards": (("gsm8k:1", "random:0.5"), setting("spec")),
    "reward_timeout": ((2.0, 3.0), setting("timeout")),
    # rollout
    "temperature": ((0.5, 1.5), lambda cfg: [
        *(call["temperature"] for call in evaluated(cfg)), training("temperature")(cfg),
        nr.make_policy(cfg).module.temperature, nr.make_reference(cfg).temperature],
        ([0, *[0.5] * 4], [0, *[1.5] * 4]), dict(eval_n=2)),
    # vLLM's log-probs: with the temperature, as the trainer's; top-p would renormalise them
    "top_p": ((1.0, 0.5), lambda cfg: (training("top_p")(cfg), llm_args(cfg)["logprobs_mode"]),
              ((1.0, "processed_logprobs"), (0.5, "raw_logprobs")), dict(correction="none")),
    "max_tokens": ((90, 110), lambda cfg: [
        training("max_tokens")(cfg), evaluated(cfg)[0]["max_tokens"], setting("max_tokens")(cfg),
        llm_args(cfg)["max_model_len"] - 64], ([90] * 4, [110] * 4)),
    # algorithm
    "overlong_buffer": ((0.0, 0.25), lambda cfg: (
        setting("overlong_buffer")(cfg), setting("spec")(cfg)),
        ((None, "gsm8k:1"), (24, "gsm8k:1,overlong:1"))),
    # engines and memory
    "lora_rank": ((2, 4), lambda cfg: {
        p.shape[0] for name, p in nr.make_policy(cfg).module.named_parameters()
        if ".lora_A." in name}, ({2}, {4})),
    "layout": (("packed", "rows"), lambda cfg: nr.load_model(cfg).config._attn_implementation,
               ("packed", "sdpa")),
    "zero_stage": ((1, 2), lambda cfg: (
        (policy := nr.make_policy(cfg)).zero_optimization_stage(),
        policy.get_data_types()[1],  # in which the gradients of packs are summed
        policy._config.zero_config.reduce_bucket_size),
        ((1, torch.float32, memory.BUCKET), (2, torch.float32, memory.BUCKET)),
        dict(dtype="bfloat16")),
    "gradient_checkpointing": (("on", "off"), lambda cfg: (
        nr.make_policy(cfg).module.model.is_gradient_checkpointing), (True, False)),
    "gpu_memory_utilization": ((0.5, 0.7), lambda cfg: (
        llm_args(cfg, gpu=True)["gpu_memory_utilization"])),
    "timeout": ((1.0, 2.0), group_timeout, ((1.0,), (2.0,))),
    # evaluation and files
    "eval_n": ((2, 4), lambda cfg: (
        evaluated(cfg)[1]["n"], llm_args(cfg, gpu=True)["max_num_seqs"]), ((2, 65), (4, 129))),
    "eval_temperature": ((0.25, 0.5), lambda cfg: [x["temperature"] for x in evaluated(cfg)],
                         ([0, 0.25], [0, 0.5]), dict(eval_n=2)),
    "eval_top_p": ((0.75, 0.5), lambda cfg: evaluated(cfg)[1]["top_p"], None, dict(eval_n=2)),
    "seed": ((1, 2), lambda cfg: {
        torch_seed(cfg), llm_args(cfg)["seed"], setting("random_seed")(cfg)}, ({1}, {2})),
}


def test_every_flag_has_a_row_or_is_compared_elsewhere():
    cases = json.loads((ROOT / "tests/vectors/cases.json").read_text())  # of test_vectors.py
    elsewhere = {*cases[0]["options"], *" ".join(ELSEWHERE.values()).split()} - {"kl_in"}
    assert WIRES.keys() | elsewhere == {f.name for f in dataclasses.fields(nr.Config)}


@pytest.mark.parametrize("flag", WIRES)
def test_the_value_of_a_flag_reaches_what_it_names(flag, group, tmp_path):
    values, arrives, wanted, base = (*WIRES[flag], None, None)[:4]
    seen = []
    for i, value in enumerate(values):
        part = tmp_path / str(i)  # a folder of its own
        part.mkdir()
        for name, rows in FILES.items():
            write_rows(part / name, rows)
        changes = {"out": "{tmp}"} | (base or {}) | {flag: value}
        changes = {name: x.replace("{tmp}", str(part)) if isinstance(x, str) else x
                   for name, x in changes.items()}
        seen.append(arrives(make_config(**changes)))
    assert seen == list(wanted or values)


def test_each_seed_gives_other_examples_another_order_and_other_noise_and_the_same_seed_the_same(
        tmp_path):
    file = write_rows(tmp_path / "one.jsonl", FILES["one.jsonl"])

    def decided(seed):
        cfg = make_config(seed=seed, eval_n=2)
        return [training("prompts")(cfg), training("seeds")(cfg), evaluated(cfg)[1]["seeds"],
                splits(cfg)[0]]

    one, again, two = map(decided, (1, 1, 2))
    assert one == again and all(a != b for a, b in zip(one, two, strict=True))
    # all seeds are compared on the same examples
    for name in "", file, f"{ROOT}/examples/mixed_tasks.py:make":
        one, two = (splits(make_config(data=name, seed=seed, max_prompt=400)) for seed in (1, 2))
        assert one[1] == two[1]


def test_every_request_has_a_seed_of_its_own_and_no_two_draws_of_an_epoch_share_a_prompt():
    cfg = make_config(prompts=4, filter_groups=True, resample=2, eval_n=2)  # 3 draws
    calls = sum((collected(c, step) for c, step in (
        (cfg, 0), (cfg, 3), (cfg, 4), (dataclasses.replace(cfg, seed=1), 3))), [])
    prompts = sum((call["prompts"] for call in calls[:9]), [])  # of the first seed
    assert len(set(map(str, prompts))) == 3 * 3 * 4
    seeds = sorted(sum((call["seeds"] for call in calls + evaluated(cfg)[1:]), []))
    assert len(seeds) == 4 * 3 * 4 + 3
    assert min(b - a for a, b in zip(seeds, seeds[1:])) > 16384  # sample j has the seed + j


def test_what_reaches_vllm_and_the_end_of_a_chatml_turn_stops_a_completion(llm, monkeypatch):
    monkeypatch.setattr(llm.get_tokenizer(), "get_vocab", lambda: {"<|im_end|>": 7})
    with mock.patch.object(llm, "generate", wraps=llm.generate) as generate:
        nr.rollout(llm, [[65, 66], [67]], 3, 0.5, 4, [5, 6], top_p=0.75)
    for p, seed in zip(generate.call_args.args[1], (5, 6), strict=True):
        assert (p.n, p.temperature, p.top_p, p.max_tokens, p.seed) == (3, 0.5, 0.75, 4, seed)
        assert (p.logprobs, p.flat_logprobs, p.detokenize) == (0, True, False)
        assert not p.ignore_eos and not p.stop and p.stop_token_ids == [7]


def test_a_completion_that_stops_with_its_last_allowed_token_is_not_truncated(llm):
    free = nr.rollout(llm, [[60, 61, 62]], 16, 1.0, 96, [5])
    i, r = min(enumerate(free), key=lambda pair: len(pair[1]))
    for tokens, truncated in ((r.length, False), (r.length - 1, True)):
        again = nr.rollout(llm, [[60, 61, 62]], 16, 1.0, tokens, [5])[i]
        assert (again.completion, again.truncated) == (r.completion[:tokens], truncated)


def test_an_engine_has_the_sequences_and_the_cache_of_its_ranks(monkeypatch):
    """By hand: 4 ranks share 8 * 16 samples; a rank of a shared engine has half of the weights."""
    cfg = make_config(prompts=8, samples=16, gpu_memory_utilization=0.5, max_tokens=10**6)
    kv_cache = 40 * 2**30 - 4 * 822_272 - 3 * 2**30
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = llm_args(cfg, gpu=True)
    assert (args["max_num_seqs"], args["kv_cache_memory_bytes"]) == (33, kv_cache)
    shared = tensor_parallel.SharedEngine
    with patched((torch.distributed, "new_subgroups", lambda n: (None, None)),
                 (shared, "gather", lambda self, item: [item] * 2), (sync, "vllm_checksums", 0),
                 (nr, "Sampler", lambda cfg: shared(cfg, 2)),
                 (memory, "step_bytes", memory.step_bytes),  # to be restored
                 (memory, "kv_cache_bytes", memory.kv_cache_bytes)):
        tensor_parallel.plan_shards(2)
        args = llm_args(cfg, gpu=True)
    assert (args["max_num_seqs"], args["kv_cache_memory_bytes"]) == (66, kv_cache + 2 * 822_272)
