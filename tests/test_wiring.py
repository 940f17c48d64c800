"""From flag to function: the value of every flag of Config reaches what it names.

Functions have tests of their own. Here is what lies between the command line and them: WIRES has a
row per flag with two or more values and what is seen where the value arrives. Values of flags that
arrive at one place differ, so that two swapped flags show. A flag without a row fails, unless
test_vectors.py or test_resume.py compares what its values do.
"""
import contextlib
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
import vllm

import data
import nano_rlvr as nr
import rewards
import runtime.flags
import runtime.log
import runtime.model
import runtime.shape
from conftest import ROOT, close, fixed_rollouts, judged, make_config
from models import shape_of
from runtime import dist, evaluation, folder, log, memory, trainer
from runtime.checkpoint import Checkpoints, Progress

TINY = str(ROOT / "models/tiny")
SAME_MODEL = str(ROOT / "tests/../models/tiny")  # another text for the same folder


@contextlib.contextmanager
def patched(*replacements):
    """A MonkeyPatch with (object, name, replacement) ... in place."""
    with pytest.MonkeyPatch.context() as patch:
        for replacement in replacements:
            patch.setattr(*replacement)
        yield patch


def nothing(*_, **__):
    """Stands in for what is not looked at."""
    return []


# ---- places where a flag arrives: functions of a Config


def llm_args(cfg, gpu=False):
    """The keyword arguments of vllm.LLM."""
    seen = {}
    with patched((vllm, "LLM", lambda **args: seen.update(args)),
                 (dist, "share_engine", lambda ranks: None),
                 (torch.cuda, "is_available", lambda: gpu),
                 (torch.cuda, "mem_get_info", lambda: (80 * memory.GIB, 80 * memory.GIB))):
        nr.Sampler(cfg)
    return seen


def loaded(cfg):
    """(model, trust_remote_code) of each call that reads a model or tokenizer, vLLM's included."""
    readers = {cls: mock.Mock(wraps=cls.from_pretrained) for cls in (
        transformers.AutoConfig, transformers.AutoTokenizer, transformers.AutoModelForCausalLM)}
    with patched((runtime.shape, "_empty_models", {}),
                 *((cls, "from_pretrained", reader) for cls, reader in readers.items())):
        runtime.flags.load_tokenizer(cfg)
        runtime.model.load_model(cfg)
    args, seen = llm_args(cfg), set()
    for reader in readers.values():
        calls = [call for call in reader.call_args_list if "tiny" in str(call.args[0])]
        assert calls
        seen |= {(x.args[0], x.kwargs.get("trust_remote_code", False)) for x in calls}
    return seen | {(args["model"], args["trust_remote_code"])}


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


def run_of(cfg):
    """A Run for collect_rollouts."""
    return SimpleNamespace(cfg=cfg, llm=LLM, train_set=EXAMPLES, verifier=all_right, metrics={})


def as_rank(rank, world):
    """Patches: this process is one of several ranks, which have the same values."""
    return ((dist, "rank", lambda: rank), (dist, "world_size", lambda: world),
            (dist, "all_sum", lambda *values: list(map(float, values))),
            (dist, "all_gather", lambda items, group=None: items))


def collected(cfg, step=3, rank=0, world=1):
    """What the rollouts of a step are asked for, a dict per draw, and the groups that are trained.
    All rewards are equal."""
    calls = []
    with patched((nr, "rollout", recorded(calls)), *as_rank(rank, world)):
        parts, _ = nr.collect_rollouts(run_of(cfg), step)
    return calls, sum(parts, [])


def training(name):
    """An argument of the first draw."""
    return lambda cfg: collected(cfg)[0][0][name]


def evaluated(cfg, *patches):
    """What an evaluation of 3 examples asks rollout() for: greedy completions, then samples."""
    calls = []
    with patched((nr, "rollout", recorded(calls)), *patches):
        nr.evaluate(LLM, EXAMPLES[:3], all_right, cfg)
    return calls


def setting(name):
    """An argument of the Verifier; "spec" is --rewards."""
    def observe(cfg):
        seen = {}
        fake = SimpleNamespace(check_columns=nothing, count_unreadable=nothing)
        with patched((rewards, "Verifier", lambda spec, **a: seen.update(a, spec=spec) or fake)):
            evaluation.start_verifier(cfg, EXAMPLES[:1], EXAMPLES[:1])
        return seen[name]
    return observe


def splits(cfg):
    """Training and held-out examples; of a generated task at most 64 each."""
    generate = data.generate
    with patched((data, "generate", lambda make, split, size, seed: generate(
            make, split, min(size, 64), seed))):
        tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
        return data.load_splits(cfg, tokenizer, notify=lambda text: None)


def prompts_around(cfg):
    """The texts of all prompts, with "?" for the question."""
    decode = transformers.AutoTokenizer.from_pretrained(TINY).decode
    return {decode(e["prompt_ids"]).replace(e["question"], "?") for e in sum(splits(cfg), [])}


def first(name):
    """A column of the first training and the first held-out example."""
    return lambda cfg: tuple(examples[0][name] for examples in splits(cfg))


def at(name):
    """What train() does of one kind; engines, sampling and files are replaced.

    update, lr: learning rates; packs: their number; evaluate, save: steps; kl: that store_kl ran.
    """
    def observe(cfg):
        seen, progress = [], Progress()

        def note(event, value, result=None):
            seen.append((event, value))
            return result

        def collect(run, step):
            groups = [[nr.Rollout([i], [1] * 60, "", False, [0.0] * 60, reward=float(j))
                       for j in range(2)] for i in range(4)]
            return [groups[i::cfg.minibatches] for i in range(cfg.minibatches)], groups

        def update(policy, batches, cfg, policy_loss):
            note("packs", len(batches))
            return note("update", policy.optimizer.param_groups[0]["lr"], {"skipped": 0.0,
                                                                           "tokens": 1.0})

        fake_log = mock.MagicMock(
            write=lambda step, metrics, *_, **__: note("lr", metrics.get("lr")))
        checkpoints = SimpleNamespace(
            progress=progress, save=lambda final: note("save", ... if final else progress.step))
        policy = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{}]))
        with patched((nr, "store_fixed_logps", nothing), (nr, "sync_weights", nothing),
                     (trainer, "place_frozen_weights", nothing),
                     (trainer, "token_logps", nothing), (nr, "summary", lambda *_: {}),
                     (nr, "update", update), (trainer, "store_kl", lambda *_: note("kl", 1, {})),
                     (nr, "evaluate", lambda *_: note("evaluate", progress.step, ({}, [])))):
            nr.train(nr.Run(dataclasses.replace(cfg, samples=2), [], [], None, fake_log,
                            checkpoints, mock.Mock(), policy,
                            "reference" if cfg.kl_coef else None), collect_rollouts=collect)
        return [value for event, value in seen if event == name]
    return observe


def run_folder(cfg):
    """The folder of a run's files."""
    return log.Log(folder.claim_folder(cfg), None).folder


def lines_kept(cfg):
    """Lines of rollouts.jsonl after a step of 5 groups of 4."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    rollouts = fixed_rollouts(tokenizer, groups=5)
    written = log.Log(cfg, tokenizer)
    written.write(0, {}, [rollouts[i:i + 4] for i in range(0, 20, 4)])
    return len((written.folder / "rollouts.jsonl").read_text().splitlines())


def wandb_modes(cfg):
    """The value that is checked, and the mode of wandb.init."""
    seen = []
    fake = SimpleNamespace(init=lambda mode, **_: seen.append(mode),
                           errors=SimpleNamespace(Error=OSError))
    with patched((runtime.log, "check_wandb", seen.append)) as patch:
        patch.setitem(__import__("sys").modules, "wandb", fake)
        log.Log(cfg, None)
    return seen


def kept(cfg):
    """The checkpoints that are left of four."""
    for step in (3, 5, 7, 9):
        Path(cfg.out, f"step-{step}").mkdir()
    run = SimpleNamespace(cfg=cfg, folder=Path(cfg.out), log=SimpleNamespace(rows=[]))
    Checkpoints._delete_old(run)
    return sorted(path.name for path in Path(cfg.out).glob("step-?"))


def arrival(function, *patch):
    """The arguments with which a function is called; what would follow it is left out."""
    def arrived(*args):
        raise KeyboardInterrupt(*args)

    with patched((*patch, arrived)), pytest.raises(KeyboardInterrupt) as e:
        function()
    return e.value.args


def group_timeout(cfg):
    """What main() gives to init_process_group."""
    with patched((nr, "parse_config", lambda argv: cfg)):
        return arrival(lambda: nr.main([]), dist, "init_process_group")


def bound(cfg):
    """What update() gives to check_step."""
    batch = nr.collate([nr.Rollout([0], [1], "", False, [0.0], weight=1.0)])
    policy = mock.Mock(return_value=(torch.zeros(1), torch.zeros(1)))
    cfg = dataclasses.replace(cfg, kl_coef=0.0)
    return arrival(lambda: nr.update(policy, [batch], cfg), nr.guard, "check_step")[1]


def samplers(cfg):
    """The functions that training and the evaluation ask for."""
    calls = (lambda: nr.collect_rollouts(run_of(cfg), 0),
             lambda: nr.evaluate(LLM, EXAMPLES[:3], all_right, cfg))
    return [arrival(call, nr, "rollout_function")[0] for call in calls]


def plan(cfg, gib=80):
    """The memory plan of a GPU with a model that nearly fills it."""
    cfg = dataclasses.replace(cfg, dtype="bfloat16", max_prompt=1024, max_tokens=3000)
    device = memory.Device(True, gib * memory.GIB, gib * memory.GIB)
    return memory.plan(cfg, device, shape_of("1.5B"))[0]


def torch_seed(cfg):
    """The seed of torch when the policy, with its adapters, is made."""
    arrival(lambda: nr.make_policy(cfg), nr, "load_model")
    return torch.initial_seed()


def adamw(name):
    """An argument of AdamW in the real DeepSpeed engine."""
    return lambda cfg: nr.make_policy(cfg).optimizer.param_groups[0][name]


def reads_reference(cfg):
    """Whether the log-probs of the reference are computed for the loss."""
    ref = torch.nn.Identity()
    ref.forward = lambda batch: (torch.zeros(1), None)
    batch = nr.collate([nr.Rollout([0], [1], "", False, [0.0])])
    nr.store_fixed_logps(None, ref, [batch], cfg)
    return batch.ref is not None


# ---- the table

ROWS = [{"q": f"{i}+1", "p": f"{i}-1", "a": f"{i}", "b": f"-{i}"} for i in range(20)]
TEXTS = {  # files that values name as {tmp}/...
    "one.jsonl": "\n".join(json.dumps({"question": f"{i}+1", "answer": "1"}) for i in range(20)),
    "two.jsonl": "\n".join(json.dumps({"question": f"{i}+2", "answer": "2"}) for i in range(20)),
    "columns.jsonl": "\n".join(map(json.dumps, ROWS)),
    "other.jsonl": json.dumps({"q": "q", "p": "p", "a": "a", "b": "b"}),
    "long.jsonl": "\n".join(json.dumps({"question": "x" * n, "answer": "1"})
                            for n in (9, 63, 64, 65)),
}
SETS = ("{tmp}/one.jsonl", "{tmp}/two.jsonl")
COLUMNS = dict(data="{tmp}/columns.jsonl", eval_data="{tmp}/other.jsonl", question_key="q",
               answer_key="a")
STEPS = dict(prompts=4, steps=6, eval_every=100, save_every=0, kl_coef=0.0, lr=1.0)
ONE_STEP = STEPS | dict(steps=1)

# flag -> values, where they arrive, what is seen there for each (None: the values), other flags
WIRES = {
    # model and data
    "model": ((TINY, SAME_MODEL), lambda cfg: {name for name, _ in loaded(cfg)},
              ({TINY}, {SAME_MODEL})),
    "trust_remote_code": ((False, True), lambda cfg: {t for _, t in loaded(cfg)},
                          ({False}, {True})),
    "algo": (("dapo", "dr_grpo"), lambda cfg: {
        name: getattr(nr.parse_config(["--algo", cfg.algo]), name) for name in nr.ALGOS[cfg.algo]},
        (nr.ALGOS["dapo"], nr.ALGOS["dr_grpo"])),
    "task": (("arithmetic", "countdown"),
             lambda cfg: [{"terms", "target"} & part[0].keys() for part in splits(cfg)],
             ([{"terms"}] * 2, [{"target"}] * 2), dict(max_prompt=400, eval_size=4)),
    "data": (SETS, lambda cfg: {e["answer"] for part in splits(cfg) for e in part}, ({"1"}, {"2"})),
    "eval_data": (SETS, lambda cfg: {e["answer"] for e in splits(cfg)[1]}, ({"1"}, {"2"})),
    "question_key": (("q", "p"), first("question"), (("0+1", "q"), ("0-1", "p")), COLUMNS),
    "answer_key": (("a", "b"), first("answer"), (("0", "a"), ("-0", "b")), COLUMNS),
    "template": (("none", "Q: {question}!", "chat"),
                 lambda cfg: (prompts_around(cfg), setting("messages")(cfg)),
                 (({"?"}, False), ({"Q: ?!"}, False), ({"<|user|>?<|assistant|>"}, True)),
                 dict(data=SETS[0])),
    "rewards": (("gsm8k:1", "random:0.5"), setting("spec")),
    "reward_timeout": ((2.0, 3.0), setting("timeout")),
    "allow_unsafe_code": ((False, True), setting("allow_unsafe_code")),
    # rollout
    "rollout": (("", "a.py:f"), samplers, ([""] * 2, ["a.py:f"] * 2)),
    "steps": ((2, 4), at("lr"), ([1.0, 0.5, None], [1.0, 0.75, 0.5, 0.25, None]),
              STEPS | dict(lr_end=0.0)),
    "prompts": ((4, 6), lambda cfg: len(training("prompts")(cfg))),
    "samples": ((2, 3), training("n")),
    "temperature": ((0.5, 1.5), lambda cfg: [
        *(call["temperature"] for call in evaluated(cfg)), training("temperature")(cfg),
        nr.make_policy(cfg).module.temperature, nr.make_reference(cfg).temperature],
        ([0, *[0.5] * 4], [0, *[1.5] * 4]), dict(eval_n=2)),
    # vLLM's log-probs: with the temperature, as the trainer's; top-p would renormalise them
    "top_p": ((1.0, 0.5), lambda cfg: (training("top_p")(cfg), llm_args(cfg)["logprobs_mode"]),
              ((1.0, "processed_logprobs"), (0.5, "raw_logprobs")), dict(correction="none")),
    "max_prompt": ((64, 80), lambda cfg: (llm_args(cfg)["max_model_len"], len(splits(cfg)[1])),
                   ((64 + 96, 3), (80 + 96, 4)), dict(eval_data="{tmp}/long.jsonl",
                                                      template="none")),
    "max_tokens": ((90, 110), lambda cfg: [
        training("max_tokens")(cfg), evaluated(cfg)[0]["max_tokens"], setting("max_tokens")(cfg),
        llm_args(cfg)["max_model_len"] - 64], ([90] * 4, [110] * 4)),
    # algorithm
    "kl_in": (("loss", "reward"), lambda cfg: (reads_reference(cfg), len(at("kl")(cfg))),
              ((True, 0), (False, 1)), ONE_STEP | dict(kl_coef=0.1)),
    "drop_flat_groups": ((False, True), lambda cfg: len(collected(cfg)[1]), (4, 0)),
    "resample": ((1, 3), lambda cfg: len(collected(cfg)[0]), (2, 4), dict(drop_flat_groups=True)),
    "overlong_buffer": ((0.0, 0.25), setting("overlong_buffer"), (None, 24)),
    "epochs": ((1, 3), lambda cfg: len(at("update")(cfg)), None, ONE_STEP),
    "minibatches": ((1, 2), lambda cfg: len(at("update")(cfg)), None, ONE_STEP),
    # optimizer
    "lr": ((0.25, 0.5), lambda cfg: {*at("update")(cfg), *at("lr")(cfg)[:-1], adamw("lr")(cfg)},
           ({0.25}, {0.5}), ONE_STEP | dict(lr_end=1.0)),
    "lr_end": ((0.5, 0.0), at("update"), ([1, 0.75], [1, 0.5]), STEPS | dict(steps=2)),
    "warmup": ((2, 4), at("update"), ([0.5, 1, 1], [0.25, 0.5, 0.75]),
               STEPS | dict(steps=3, lr_end=1.0)),
    "beta2": ((0.95, 0.8), adamw("betas"), ((0.9, 0.95), (0.9, 0.8))),
    "weight_decay": ((0.125, 0.375), adamw("weight_decay")),
    "max_grad_norm": ((0.5, 2.0), lambda cfg: nr.make_policy(cfg).gradient_clipping()),
    # engines and memory
    "dtype": (("float32", "bfloat16"), lambda cfg: {
        *(str(next(m.parameters()).dtype) for m in (nr.make_policy(cfg).module,
                                                    nr.make_reference(cfg))),
        f"torch.{llm_args(cfg)['dtype']}"}, ({"torch.float32"}, {"torch.bfloat16"})),
    "lora_rank": ((2, 4), lambda cfg: {
        p.shape[0] for name, p in nr.make_policy(cfg).module.named_parameters()
        if ".lora_A." in name}, ({2}, {4})),
    "memory_gb": ((24.0, 40.0), lambda cfg: plan(cfg).offload, ("optimizer", "none")),
    "pack_tokens": ((65, 130), at("packs"), ([8], [4]), ONE_STEP),
    "checkpointing": (("on", "off"), lambda cfg: (
        nr.make_policy(cfg).module.model.is_gradient_checkpointing, plan(cfg).checkpointing),
        ((True, "on"), (False, "off"))),
    "offload": (("none", "optimizer"), lambda cfg: (
        type(nr.make_policy(cfg).optimizer.optimizer).__name__, plan(cfg).offload),
        (("AdamW", "none"), ("DeepSpeedCPUAdam", "optimizer"))),
    "vllm_memory": ((0.5, 0.7), lambda cfg: {
        llm_args(cfg, gpu=True)["gpu_memory_utilization"], plan(cfg).vllm_memory}, ({0.5}, {0.7})),
    "tp": ((1, 2), lambda cfg: llm_args(cfg)["tensor_parallel_size"]),
    "zero_stage": ((1, 3), lambda cfg: nr.make_policy(cfg).zero_optimization_stage()),
    "timeout": ((1.0, 2.0), group_timeout, ((1.0,), (2.0,))),
    "mismatch_bound": ((0.4, 0.6), bound),
    # evaluation and files
    "eval_every": ((2, 4), at("evaluate"), ([0, 2, 4, 6], [0, 4, 6]), STEPS),
    "eval_size": ((5, 9), lambda cfg: {
        len(splits(dataclasses.replace(cfg, eval_data=source))[1])
        for source in ("", f"{cfg.out}/two.jsonl")}, ({5}, {9})),
    "eval_n": ((2, 4), lambda cfg: (
        evaluated(cfg)[1]["n"], llm_args(cfg, gpu=True)["max_num_seqs"]), ((2, 65), (4, 129))),
    "name": (("x", "y"), lambda cfg: run_folder(cfg).name),
    "out": (("{tmp}/x", "{tmp}/y"), lambda cfg: str(run_folder(cfg).parent)),
    "save_every": ((2, 0), at("save"), ([0, 2, 4, ...], [...]), STEPS | dict(steps=5)),
    "keep": ((1, 3), kept, (["step-9"], ["step-5", "step-7", "step-9"])),
    "keep_rollouts": ((4, 9), lines_kept, (4, 12), dict(name="r")),
    "wandb": (("offline", "online"), wandb_modes, (["offline"] * 2, ["online"] * 2),
              dict(name="w")),
    "seed": ((1, 2), lambda cfg: {
        torch_seed(cfg), llm_args(cfg)["seed"], setting("random_seed")(cfg)}, ({1}, {2})),
}


def test_every_flag_has_a_row():
    cases = json.loads((ROOT / "tests/vectors/cases.json").read_text())  # of test_vectors.py
    elsewhere = cases[0]["options"].keys() | {"resume", "resume_force"}
    assert WIRES.keys() | elsewhere == {f.name for f in dataclasses.fields(nr.Config)}


@pytest.mark.parametrize("flag", WIRES)
def test_the_value_of_a_flag_reaches_what_it_names(flag, group, tmp_path):
    values, arrives, wanted, base = (*WIRES[flag], None, None)[:4]
    seen = []
    for i, value in enumerate(values):
        part = tmp_path / str(i)  # a folder of its own
        part.mkdir()
        for name, text in TEXTS.items():
            (part / name).write_text(text)
        changes = {"out": "{tmp}"} | (base or {}) | {flag: value}
        changes = {name: x.replace("{tmp}", str(part)) if isinstance(x, str) else x
                   for name, x in changes.items()}
        tp = changes.pop("tp", 1)  # more ranks than this process would be refused
        got = arrives(dataclasses.replace(make_config(**changes), tp=tp))
        seen.append(got.replace(str(part), "{tmp}") if isinstance(got, str) else got)
    assert seen == list(wanted or values)


# ---- the seed


def test_each_seed_gives_other_examples_another_order_and_other_noise_and_the_same_seed_the_same(
        tmp_path):
    (tmp_path / "one.jsonl").write_text(TEXTS["one.jsonl"])

    def decided(seed):
        cfg = make_config(seed=seed, eval_n=2)
        of_file = dataclasses.replace(cfg, data=f"{tmp_path}/one.jsonl")
        questions = [[e["question"] for e in part] for part in (splits(cfg)[0], splits(of_file)[1])]
        return [training("prompts")(cfg), training("seeds")(cfg), evaluated(cfg)[1]["seeds"],
                *questions]

    one, again, two = map(decided, (1, 1, 2))
    assert one == again and all(a != b for a, b in zip(one, two, strict=True))
    held_out = [splits(make_config(seed=seed))[1] for seed in (1, 2)]
    assert held_out[0] == held_out[1]  # of a task, all seeds are compared on the same examples


def test_every_request_has_a_seed_of_its_own_and_no_two_draws_of_an_epoch_share_a_prompt():
    cfg = make_config(prompts=4, drop_flat_groups=True, resample=2, eval_n=2)  # 3 draws
    calls = sum((collected(c, step)[0] for c, step in (
        (cfg, 0), (cfg, 3), (cfg, 4), (dataclasses.replace(cfg, seed=1), 3))), [])
    prompts = sum((call["prompts"] for call in calls[:9]), [])  # of the first seed
    assert len(set(map(str, prompts))) == 3 * 3 * 4
    seeds = sorted(sum((call["seeds"] for call in calls + evaluated(cfg)[1:]), []))
    assert len(seeds) == 4 * 3 * 4 + 3
    assert min(b - a for a, b in zip(seeds, seeds[1:])) > 16384  # sample j has the seed + j


def test_ranks_ask_for_the_prompts_and_seeds_that_one_process_would_ask_for():
    cfg = make_config(prompts=4, eval_n=2)
    [whole], [one], [two] = (collected(cfg, **ranks)[0] for ranks in (
        {}, dict(rank=0, world=2), dict(rank=1, world=2)))
    for name in ("prompts", "seeds"):
        assert whole[name] == one[name] + two[name]
        for rank in (0, 1):
            part = evaluated(cfg, *as_rank(rank, 2))[1][name]
            assert part == evaluated(cfg)[1][name][rank::2]


# ---- the engines


@pytest.mark.parametrize("stage, dtype", [(1, "bfloat16"), (2, "bfloat16"), (2, "float32")])
def test_gradients_of_packs_are_summed_in_float32_and_in_buckets_of_the_planned_size(
        group, stage, dtype):
    policy = nr.make_policy(make_config(zero_stage=stage, dtype=dtype))
    assert policy.get_data_types()[1] is torch.float32
    assert policy._config.zero_config.reduce_bucket_size == memory.BUCKET
    assert policy.gradient_accumulation_steps() == policy.train_micro_batch_size_per_gpu() == 1
    assert all(w.dtype is torch.float32 for group in policy.optimizer.param_groups
               for w in group["params"])


@pytest.mark.parametrize("vocabulary, ends", [({}, []), ({"<|im_end|>": 7}, [7])])
def test_what_reaches_vllm_and_the_end_of_a_chatml_turn_stops_a_completion(
        llm, monkeypatch, vocabulary, ends):
    asked, decode, generate = [], llm.get_tokenizer().batch_decode, llm.generate
    fake = SimpleNamespace(get_vocab=lambda: vocabulary, batch_decode=decode)
    monkeypatch.setattr(llm, "get_tokenizer", lambda: fake, raising=False)
    monkeypatch.setattr(llm, "generate", lambda prompts, params, **others: (
        asked.extend(params) or generate(prompts, params, **others)), raising=False)
    nr.rollout(llm, [[65, 66], [67]], 3, 0.5, 4, [5, 6], top_p=0.75)
    assert [p.seed for p in asked] == [5, 6]
    for p in asked:
        assert (p.n, p.temperature, p.top_p, p.max_tokens) == (3, 0.5, 0.75, 4)
        assert (p.logprobs, p.flat_logprobs, p.detokenize) == (0, True, False)
        assert (p.top_k, p.min_p, p.min_tokens, p.logit_bias) in ((0, 0, 0, None), (-1, 0, 0, None))
        assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1, 0, 0)
        assert not p.ignore_eos and not p.stop and p.stop_token_ids == ends


def test_dapo_adds_the_penalty_for_long_completions_with_weight_1():
    cfg = nr.parse_config(["--algo", "dapo", "--max_tokens", "80"])  # 64 tokens are free
    ids = [[0] * n for n in (40, 64, 65, 72, 80, 81)]
    examples = [{"question": "1+1", "answer": "2"}]
    with evaluation.start_verifier(cfg, examples, examples) as verifier:
        values, parts, _ = verifier(["2"] * 6, completion_ids=ids, prompts=["1+1"] * 6,
                                    answer=["2", "2", "2", "2", "3", "2"])
    assert list(parts) == ["gsm8k", "overlong"]
    close(values, [1, 1, 1 - 1 / 16, 0.5, -1, 0])
