"""From flag to function: the value of every flag of Config reaches what it names.

Functions have tests of their own. Here is what lies between the command line and them: WIRES has a row per
flag with two or more values and what differs where the value arrives. Values of flags that arrive at the same
place differ from each other, so that two swapped flags show. A flag without a row fails, and so does a flag
whose class for --resume is not the one in its row.
"""
import contextlib
import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import transformers
import vllm

import data
import nano_rlvr as nr
import rewards
from conftest import EPS, ROOT, close, fixed_rollouts, judged_by, make_config
import runtime.flags
import runtime.log
import runtime.model
import runtime.shape
import runtime.trainer
from runtime import checkpoint, dist, evaluation, folder, log, memory
from runtime.checkpoint import Progress
from runtime.dist import RunError

TINY = str(ROOT / "models/tiny")
SAME_MODEL = str(ROOT / "tests/../models/tiny")  # another text for the same folder
LOG2 = math.log(2)


class Arrived(Exception):
    """Raised instead of the work that would follow: the arguments are known."""


# ---- places where a flag arrives: functions of a Config


def llm_args(cfg, gpu=False):
    """The keyword arguments of vllm.LLM."""
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "LLM", lambda **args: seen.update(args))
        patch.setattr(dist, "share_engine", lambda ranks: None)
        patch.setattr(runtime.trainer, "SharedLLM", lambda llm: llm)
        patch.setattr(torch.cuda, "is_available", lambda: gpu)
        patch.setattr(torch.cuda, "mem_get_info", lambda: (80 * memory.GIB, 80 * memory.GIB))
        nr.Sampler(cfg)
    return seen


def loaded(cfg):
    """(what is loaded, trust_remote_code) of each call of transformers that reads a model or a tokenizer."""
    seen = []

    def record(kind, function):
        def call(name, *args, **kwargs):
            if isinstance(name, str):
                seen.append((kind, name, kwargs.get("trust_remote_code", False)))
            return function(name, *args, **kwargs)
        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"):
            cls = getattr(transformers, kind)
            patch.setattr(cls, "from_pretrained", record(kind, cls.from_pretrained))
        patch.setattr(runtime.shape, "_empty_models", {})
        runtime.flags.load_tokenizer(cfg)
        runtime.model.load_model(cfg)
    own = [x for x in seen if "tiny" in x[1]]
    assert {kind for kind, *_ in own} == {"AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"}
    return {(name, trusted) for _, name, trusted in own} | {
        (args["model"], args["trust_remote_code"]) for args in [llm_args(cfg)]}


def collected(cfg, step=3, rank=0, world=1):
    """What the training rollouts of a step are asked for: the arguments of rollout(), a dict per draw; and
    the groups that are trained. All rewards are equal."""
    seen = []

    def sample(llm, prompts, n, temperature, max_tokens, seeds=None, **sampling):
        seen.append(dict(prompts=prompts, n=n, temperature=temperature, max_tokens=max_tokens, seeds=seeds,
                         **sampling))
        return [nr.Rollout(p, [1], "", False, [0.0]) for p in prompts for _ in range(n)]

    examples = [{"question": str(i), "prompt_ids": [i]} for i in range(1000)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nr, "rollout", sample)
        patch.setattr(dist, "rank", lambda: rank)
        patch.setattr(dist, "world_size", lambda: world)
        patch.setattr(dist, "all_sum", lambda *values: list(map(float, values)))
        patch.setattr(dist, "all_gather", lambda items, group=None: items)
        parts, _ = nr.collect_rollouts(cfg, None, examples, all_right, step, {})
    return seen, sum(parts, [])


def training(name):
    """An argument of the first draw."""
    return lambda cfg: collected(cfg)[0][0][name]


@judged_by("x")
def all_right(texts, **columns):
    return [1.0] * len(texts), {"x": [1.0] * len(texts)}, {}


EVALUATED = [{"question": f"{i}+1", "answer": str(i + 1), "prompt_ids": [i]} for i in range(3)]


def evaluated(cfg, examples=EVALUATED, selector=None):
    """What an evaluation asks rollout() for: positional and keyword arguments of each call. The completions
    have 20 tokens."""
    calls = []

    def sample(llm, prompts, n, *args, **kwargs):
        calls.append((prompts, n, *args, kwargs))
        return [nr.Rollout(p, [65] * 20, "1", False, [0.0] * 20) for p in prompts for _ in range(n)]

    tokenizer = SimpleNamespace(encode=lambda text, **_: [66] * len(text), decode=lambda ids, **_: "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nr, "rollout", sample)
        metrics, _ = nr.evaluate(SimpleNamespace(get_tokenizer=lambda: tokenizer), examples, all_right, cfg,
                                 selector)
    return calls, metrics


def verifiers(cfg):
    """(spec, keyword arguments) of the Verifier of --rewards and of that of --eval_select."""
    seen = []

    def verifier(spec, **args):
        seen.append((spec, args))
        return SimpleNamespace(check_columns=lambda *_: None, count_unreadable=lambda *_: None)

    evaluation.start_verifiers(cfg, verifier, EVALUATED, EVALUATED)
    return seen


def setting(name):
    """Where a setting of the rewards arrives: at both Verifiers, --eval_select's too."""
    def observe(cfg):
        both = verifiers(dataclasses.replace(cfg, eval_select="steps"))
        [value] = {args[name] for _, args in both}
        assert len(both) == 2
        return value
    return observe


def splits(cfg):
    """Training and held-out examples; of a generated task at most 64 each."""
    tokenizer, generate = transformers.AutoTokenizer.from_pretrained(TINY), data.generate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "generate", lambda make, split, size, seed: generate(
            make, split, min(size, 64), seed))
        return data.load_splits(cfg, tokenizer, notify=lambda text: None)


def prompts_around(cfg):
    """The texts of all prompts, with "?" for the question."""
    decode = transformers.AutoTokenizer.from_pretrained(TINY).decode
    return {decode(e["prompt_ids"]).replace(e["question"], "?") for examples in splits(cfg) for e in examples}


def first(name):
    """A column of the first training and the first held-out example."""
    return lambda cfg: tuple(examples[0][name] for examples in splits(cfg))


def advantages(cfg):
    """Of the groups (1, 0) and (3, 1), whose completions have 1 and 2 tokens; the running mean is 0.5."""
    groups = [[nr.Rollout([0], [1] * n, "", False, [0.0] * n, reward=r) for n, r in ((1, a), (2, b))]
              for a, b in ((1.0, 0.0), (3.0, 1.0))]
    nr.assign_advantages(groups, dataclasses.replace(cfg, samples=2), 0.5)
    return [r.advantages[0] for g in groups for r in g]


def weights(cfg):
    """Of a token of a completion of 1 token, and of a truncated one of 3."""
    rollouts = [nr.Rollout([0], [1] * n, "", n == 3, [0.0] * n, reward=1.0) for n in (1, 3)]
    nr.assign_token_weights(rollouts, cfg)
    return [r.weight for r in rollouts]


def loss(*tokens, lengths=None, ref=None):
    """The loss of tokens (ratio, advantage, pi / pi_vllm): sequences of one token, or of `lengths` tokens.
    ref: log pi_ref - log pi."""
    def observe(cfg):
        ratio, advantage, mismatch = torch.tensor(tokens, dtype=torch.float64).T  # (R,) each
        n = torch.tensor(lengths or [1] * len(tokens))
        batch = SimpleNamespace(
            lengths=n, sequence_ids=torch.arange(len(n)).repeat_interleave(n), advantage=advantage,
            weight=torch.ones_like(ratio), vllm_logps=-mismatch.log())
        old, logp = torch.zeros_like(ratio), ratio.log()
        value, _ = nr.policy_loss(logp, old, None if ref is None else logp + ref, batch, cfg)
        return value.item()
    return observe


def k3_of(d):
    return math.exp(d) - d - 1


class Trainer:
    """Stands in for the DeepSpeed engine: log-probs of 0, and the learning rate of each step taken."""

    def __init__(self, events):
        self.events, self.packs, self.module = events, 0, SimpleNamespace(model=None)
        self.optimizer = SimpleNamespace(param_groups=[{"lr": None}])

    def __call__(self, batch):
        self.packs += 1
        logp = torch.zeros(len(batch.targets), requires_grad=True)
        return logp, torch.zeros_like(logp)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.events.append(("update", self.optimizer.param_groups[0]["lr"]))

    def get_global_grad_norm(self):
        return 1.0

    def was_step_applied(self):
        return True


def events(cfg):
    """What train() does, in its order, as (name, value); engines, sampling and files are replaced."""
    seen = []
    policy = Trainer(seen)

    def rollouts(cfg, llm, train_set, verifier, step, metrics):
        metrics["seconds/rollout"] = 1.0
        groups = [[nr.Rollout([i], [1] * 60, "", False, [0.0] * 60, reward=float(j)) for j in range(2)]
                  for i in range(4)]
        seen.append(("rollout", step))
        return [groups[i::cfg.minibatches] for i in range(cfg.minibatches)], groups

    def fixed(policy, ref, batches, cfg):
        seen.append(("packs", len(batches)))
        for batch in batches:
            batch.old = batch.vllm_logps

    ref = SimpleNamespace(model=SimpleNamespace(load_state_dict=lambda x: seen.append(("reset", None))))
    logged = SimpleNamespace(
        folder=Path("none"), say=lambda text: None, trace=lambda step: None, close=lambda: None,
        write=lambda step, metrics, *_, **__: seen.append(("lr", metrics.get("lr"))),
        token_numbers=lambda *_: contextlib.nullcontext())
    saved = SimpleNamespace(
        restore=lambda *_: Progress(), check=lambda: None, wait=lambda: None,
        save=lambda final: seen.append(("save", Ellipsis if final else len(steps("rollout")))))

    def steps(name):
        return [value for event, value in seen if event == name]

    with pytest.MonkeyPatch.context() as patch:
        for name, replacement in (
                ("sync_weights", lambda *_: None), ("collect_rollouts", rollouts),
                ("named_weights", lambda _: ()),
                ("store_fixed_logps", fixed), ("summary", lambda *_: {}),
                ("evaluate", lambda *_: seen.append(("evaluate", len(steps("rollout")))) or ({}, []))):
            patch.setattr(nr, name, replacement)
        patch.setattr(runtime.trainer, "store_kl", lambda *_: seen.append(("store_kl", None)) or {})
        cfg = dataclasses.replace(cfg, samples=2, mismatch_bound=1e9, correction="none")
        nr.train(cfg, None, policy, ref if cfg.kl_coef else None, [], [], None, logged, saved)
    return seen


def at(name):
    """Values of the events of one kind: the steps of evaluations, checkpoints ..."""
    return lambda cfg: [value for event, value in events(cfg) if event == name]


def files(cfg, tmp=None):
    """The folder of a run's files."""
    cfg = folder.claim_folder(cfg)
    return str(log.Log(cfg, None).folder)


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
    fake = SimpleNamespace(init=lambda mode, **_: seen.append(mode), errors=SimpleNamespace(Error=OSError))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.log, "check_wandb", seen.append)
        patch.setitem(__import__("sys").modules, "wandb", fake)
        log.Log(cfg, None)
    return seen


def profiled(cfg):
    """The steps that are traced."""
    run, steps = log.Log(cfg, transformers.AutoTokenizer.from_pretrained(TINY)), []
    for step in range(3):
        run.trace(step)
        if run.profiler:
            steps.append(step)
            run.profiler.stop()
            run.profiler = None
    return steps


def kept(cfg):
    """The checkpoints that are left when step-9 is complete."""
    for step in (3, 5, 7, 9):
        (Path(cfg.out) / f"step-{step}").mkdir()
    itself = SimpleNamespace(folder=Path(cfg.out), cfg=cfg, log=SimpleNamespace(rows=[]))
    checkpoint.Checkpoints._delete_old(itself)
    return [path.name for path in checkpoint.on_disk(Path(cfg.out)).values()]


def group_timeout(cfg):
    """What main() gives to init_process_group."""
    def arrived(*args):
        raise Arrived(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Arrived) as e:
        patch.setattr(nr, "parse_config", lambda argv: cfg)
        patch.setattr(dist, "init_process_group", arrived)
        nr.main([])
    return e.value.args


def stops(cfg):
    """Whether a step is refused whose log-probs differ from vLLM's by 0.5."""
    batch = nr.collate([nr.Rollout([0], [1], "", False, [0.5], reward=1.0, weight=1.0)])
    taken = []
    try:
        nr.update(Trainer(taken), [batch], dataclasses.replace(cfg, kl_coef=0.0))
    except RunError:
        return not taken
    return False


def resumed(saved):
    """The value of a flag of the run after --resume with more flags."""
    def observe(cfg):
        run = Path(cfg.out) / "saved"
        run.mkdir()
        values = dataclasses.asdict(cfg) | {"name": "saved", "lr": 0.25, "resume": "", "resume_force": False}
        (run / "config.json").write_text(json.dumps({"config": values}))
        resume = ["--resume", str(run)] if cfg.resume else ["--name", "new", "--out", cfg.out]
        argv = [*resume, *saved, *["--resume_force"] * cfg.resume_force]
        try:
            return nr.parse_config(argv).lr
        except ValueError as e:
            return str(e).partition(": ")[2]
    return observe


def sampled_by(cfg):
    """Who samples, in training and in the evaluation."""
    names = []

    def mine(llm, prompts, n, *_, **__):
        names.append("ours")
        return [nr.Rollout(p, [1], "", False, [0.0]) for p in prompts for _ in range(n)]

    examples = [{"question": str(i), "prompt_ids": [i]} for i in range(50)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nr, "rollout", mine)
        for call in (lambda: nr.collect_rollouts(cfg, None, examples, all_right, 0, {}),
                     lambda: nr.evaluate(None, EVALUATED, all_right, cfg)):
            try:
                call()
            except RuntimeError as e:
                names.append("mine" if "RuntimeError: mine" in str(e) else str(e))
    return names


def plan(cfg, gib=80):
    """The memory plan for a GPU with a model that nearly fills it."""
    shape = runtime.shape.ModelShape(parameters=1_500_000_000, hidden=1536, layers=28, attention=1536, mlp=8960,
                             vocab=151936, kv_cache=14336, kv_heads=2, qk_norms=False)
    device = memory.Device(True, gib * memory.GIB, gib * memory.GIB)
    cfg = dataclasses.replace(cfg, dtype="bfloat16", max_prompt=1024, max_tokens=3000)
    return memory.plan(cfg, device, shape), shape


def torch_seed(cfg):
    """The seed of torch when the policy, with its adapters, is made."""
    def arrived(cfg):
        raise Arrived(torch.initial_seed())

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Arrived) as e:
        patch.setattr(runtime.model, "load_model", arrived)
        nr.make_policy(cfg)
    return e.value.args[0]


def adamw(cfg):
    """The arguments of AdamW in the real DeepSpeed engine."""
    return nr.make_policy(cfg).optimizer.param_groups[0]


def reads_reference(cfg):
    """Whether the log-probs of the reference are computed for the loss."""
    ref = torch.nn.Identity()
    ref.forward = lambda batch: (torch.zeros(1), None)
    batch = nr.collate([nr.Rollout([0], [1], "", False, [0.0])])
    nr.store_fixed_logps(None, ref, [batch], cfg)
    return batch.ref is not None


# ---- the table

FREE, ROUNDING, RESULT = "free", "rounding", "result"  # what may differ in a resumed run: folder.py


class Wire(NamedTuple):
    """Two or more values of a flag, where they arrive, and what is seen there for each.

    at: a function of a Config. wanted: one per value; None: the values themselves. base: other flags.
    """
    resume: str
    values: tuple
    at: object
    wanted: tuple | None = None
    base: dict = {}


ANSWER = [{"q": f"{i}+1", "p": f"{i}-1", "a": f"{i}", "b": f"-{i}"} for i in range(20)]
TEXTS = {  # files that values name as {tmp}/...
    "one.jsonl": "\n".join(json.dumps({"question": f"{i}+1", "answer": "1"}) for i in range(20)),
    "two.jsonl": "\n".join(json.dumps({"question": f"{i}+2", "answer": "2"}) for i in range(20)),
    "columns.jsonl": "\n".join(map(json.dumps, ANSWER)),
    "other.jsonl": json.dumps({"q": "q", "p": "p", "a": "a", "b": "b"}),
    "long.jsonl": "\n".join(json.dumps({"question": "x" * n, "answer": "1"}) for n in (9, 63, 64, 65)),
    "mine.py": "def mine(*args, **sampling):\n    raise RuntimeError('mine')\n",
}
COLUMNS = dict(data="{tmp}/columns.jsonl", eval_data="{tmp}/other.jsonl", question_key="q", answer_key="a")
OFF = dict(correction="none", kl_coef=0.0)
STEPS = dict(prompts=4, steps=6, eval_every=100, save_every=0, kl_coef=0.0, lr=1.0)

WIRES = {
    # model and data
    "model": Wire(RESULT, (TINY, SAME_MODEL), lambda cfg: {name for name, _ in loaded(cfg)},
                  ({TINY}, {SAME_MODEL})),
    "trust_remote_code": Wire(RESULT, (False, True), lambda cfg: {trusted for _, trusted in loaded(cfg)},
                              ({False}, {True})),
    "algo": Wire(RESULT, ("dapo", "dr_grpo"), lambda cfg: {
        name: getattr(nr.parse_config(["--algo", cfg.algo]), name) for name in nr.ALGOS[cfg.algo]},
        (nr.ALGOS["dapo"], nr.ALGOS["dr_grpo"])),
    "task": Wire(RESULT, ("arithmetic", "countdown"),
                 lambda cfg: [{"terms", "target"} & examples[0].keys() for examples in splits(cfg)],
                 ([{"terms"}] * 2, [{"target"}] * 2), dict(max_prompt=400, eval_size=4)),
    "data": Wire(FREE, ("{tmp}/one.jsonl", "{tmp}/two.jsonl"),
                 lambda cfg: {e["answer"] for examples in splits(cfg) for e in examples}, ({"1"}, {"2"})),
    "eval_data": Wire(FREE, ("{tmp}/one.jsonl", "{tmp}/two.jsonl"),
                      lambda cfg: {e["answer"] for e in splits(cfg)[1]}, ({"1"}, {"2"})),
    "question_key": Wire(RESULT, ("q", "p"), first("question"), (("0+1", "q"), ("0-1", "p")), COLUMNS),
    "answer_key": Wire(RESULT, ("a", "b"), first("answer"), (("0", "a"), ("-0", "b")), COLUMNS),
    "template": Wire(RESULT, ("none", "Q: {question}!"), prompts_around, ({"?"}, {"Q: ?!"}),
                     dict(data="{tmp}/one.jsonl")),
    "rewards": Wire(RESULT, ("gsm8k:1", "random:0.5"), lambda cfg: verifiers(cfg)[0][0]),
    "reward_timeout": Wire(RESULT, (2.0, 3.0), setting("timeout")),
    "allow_unsafe_code": Wire(RESULT, (False, True), setting("allow_unsafe_code")),
    "judge_url": Wire(FREE, ("http://a", "http://b"), setting("judge_url")),
    "judge_model": Wire(RESULT, ("a", "b"), setting("judge_model")),
    # rollout
    "rollout": Wire(RESULT, ("", "{tmp}/mine.py:mine"), sampled_by, (["ours"] * 2, ["mine"] * 2)),
    "steps": Wire(RESULT, (2, 4), at("lr"), ([1.0, 0.5, None], [1.0, 0.75, 0.5, 0.25, None]),
                  STEPS | dict(lr_end=0.0)),
    "prompts": Wire(RESULT, (4, 6), lambda cfg: len(training("prompts")(cfg))),
    "samples": Wire(RESULT, (2, 3), training("n")),
    "temperature": Wire(RESULT, (0.5, 1.5), lambda cfg: {
        training("temperature")(cfg), evaluated(dataclasses.replace(cfg, eval_n=2))[0][1][2],
        nr.make_policy(cfg).module.temperature, nr.make_reference(cfg).temperature}, ({0.5}, {1.5})),
    "top_p": Wire(RESULT, (0.9, 0.5), training("top_p"), None, dict(correction="none")),
    "top_k": Wire(RESULT, (7, 9), training("top_k"), None, dict(correction="none")),
    "max_prompt": Wire(RESULT, (64, 80), lambda cfg: (llm_args(cfg)["max_model_len"], len(splits(cfg)[1])),
                       ((64 + 96, 3), (80 + 96, 4)), dict(eval_data="{tmp}/long.jsonl", template="none")),
    "max_tokens": Wire(RESULT, (90, 110), lambda cfg: [
        training("max_tokens")(cfg), evaluated(cfg)[0][0][3], llm_args(cfg)["max_model_len"] - 64,
        setting("max_tokens")(cfg), 0.5 / weights(dataclasses.replace(cfg, aggregate="constant"))[0]],
        ([90] * 5, [110] * 5)),
    # algorithm
    "baseline": Wire(RESULT, ("group", "leave_one_out", "batch", "running", "none"), advantages, (
        [0.5, -0.5, 1, -1], [1, -1, 2, -2], [-0.25, -1.25, 1.75, -0.25], [0.5, -0.5, 2.5, 0.5],
        [1, 0, 3, 1]), dict(scale="none")),
    "scale": Wire(RESULT, ("group", "batch", "mean", "none"), advantages, (
        [0.5 / 0.75, -0.5 / 0.75, 1 / 1.25, -1 / 1.25],
        [x / (math.sqrt(1.1875) + 0.25) for x in (0.5, -0.5, 1, -1)],
        [0.5 / 0.75, -0.5 / 0.75, 1 / 2.25, -1 / 2.25], [0.5, -0.5, 1, -1]), dict(eps=0.25)),
    "eps": Wire(RESULT, (0.5, 1.0), advantages,
                ([0.5, -0.5, 1 / 1.5, -1 / 1.5], [0.5 / 1.5, -0.5 / 1.5, 0.5, -0.5])),
    "decorrelate_length": Wire(RESULT, (False, True), advantages, ([0.5, -0.5, 1, -1], [0.0] * 4),
                               dict(scale="none")),
    "aggregate": Wire(RESULT, ("sequence", "token", "constant"), weights,
                      ([1 / 2, 1 / 6], [1 / 4, 1 / 4], [1 / 16, 1 / 16]), dict(max_tokens=8)),
    "mask_truncated": Wire(RESULT, (False, True), weights, ([1 / 2, 1 / 6], [1 / 2, 0])),
    "ratio": Wire(RESULT, ("token", "sequence", "product"),
                  loss((math.exp(0.1), 1, 1), (math.exp(0.3), 1, 1), lengths=[2]),
                  (-math.exp(0.1) - math.exp(0.3), -2 * math.exp(0.2), -2 * math.exp(0.4)),
                  OFF | dict(clip_high=9.0)),
    "gate": Wire(RESULT, ("clip", "detach", "soft", "squared"), loss((2, 1, 1)),
                 (-1.2, -1.2 * LOG2, -4 / (1 + math.exp(-1)), -LOG2 + 0.05 * LOG2**2), OFF),
    "clip_low": Wire(RESULT, (0.2, 0.4), loss((0.5, -1, 1)), (0.8, 0.6), OFF | dict(clip_high=0.7)),
    "clip_high": Wire(RESULT, (0.2, 0.4), loss((2, 1, 1)), (-1.2, -1.4), OFF | dict(clip_low=0.7)),
    "delta": Wire(RESULT, (0.0, 3.0), loss((5, -1, 1)), (5.0, 3.0), OFF),
    "soft_tau_pos": Wire(RESULT, (0.5, 2.0), loss((2, 1, 1)),
                         (-8 / (1 + math.exp(-0.5)), -2 / (1 + math.exp(-2))), OFF | dict(gate="soft")),
    "soft_tau_neg": Wire(RESULT, (0.5, 2.0), loss((2, -1, 1)),
                         (8 / (1 + math.exp(-0.5)), 2 / (1 + math.exp(-2))), OFF | dict(gate="soft")),
    "squared_tau": Wire(RESULT, (0.5, 2.0), loss((2, 1, 1)), (-LOG2 + 0.25 * LOG2**2, -LOG2 + LOG2**2),
                        OFF | dict(gate="squared")),
    "kl_coef": Wire(RESULT, (0.5, 2.0), loss((1, 0, 1), ref=LOG2), (0.5 * k3_of(LOG2), 2 * k3_of(LOG2)),
                    dict(correction="none")),
    "kl_in": Wire(RESULT, ("loss", "reward"), lambda cfg: (reads_reference(cfg), len(at("store_kl")(cfg))),
                  ((True, 0), (False, 1)), STEPS | dict(steps=1, kl_coef=0.1)),
    "ref_reset_every": Wire(RESULT, (2, 3), lambda cfg: [
        step for step, (name, _) in enumerate(e for e in events(cfg) if e[0] in ("rollout", "reset"))
        if name == "reset"], ([3, 6], [4]), STEPS | dict(kl_coef=0.1)),
    "correction": Wire(RESULT, ("none", "token_truncate", "token_mask", "sequence_mask"),
                       loss((1, 1, 3), (1, 1, 1.5)), (-2, -3.5, -1.5, -1), dict(kl_coef=0.0)),
    "correction_cap": Wire(RESULT, (2.0, 2.5), loss((1, 1, 3)), (-2, -2.5), dict(kl_coef=0.0)),
    "drop_flat_groups": Wire(RESULT, (False, True),
                             lambda cfg: len(collected(cfg)[1]), (4, 0)),
    "resample": Wire(RESULT, (1, 3), lambda cfg: len(collected(cfg)[0]), (2, 4), dict(drop_flat_groups=True)),
    "overlong_buffer": Wire(RESULT, (0.0, 0.25), setting("overlong_buffer"), (None, 24)),
    "overlong": Wire(RESULT, ("soft", "hard"), setting("overlong"), None, dict(overlong_buffer=0.2)),
    "epochs": Wire(RESULT, (1, 3), lambda cfg: len(at("update")(cfg)), (1, 3), STEPS | dict(steps=1)),
    "minibatches": Wire(RESULT, (1, 2), lambda cfg: len(at("update")(cfg)), (1, 2), STEPS | dict(steps=1)),
    # optimizer
    "lr": Wire(RESULT, (0.25, 0.5), lambda cfg: {*at("update")(cfg), *at("lr")(cfg)[:-1], adamw(cfg)["lr"]},
               ({0.25}, {0.5}), STEPS | dict(lr_end=1.0, steps=1)),
    "lr_end": Wire(RESULT, (0.5, 0.0), at("update"), ([1, 0.75], [1, 0.5]), STEPS | dict(steps=2)),
    "warmup": Wire(RESULT, (2, 4), at("update"), ([0.5, 1, 1], [0.25, 0.5, 0.75]),
                   STEPS | dict(steps=3, lr_end=1.0)),
    "beta2": Wire(RESULT, (0.95, 0.8), lambda cfg: adamw(cfg)["betas"], ((0.9, 0.95), (0.9, 0.8))),
    "weight_decay": Wire(RESULT, (0.125, 0.375), lambda cfg: adamw(cfg)["weight_decay"]),
    "max_grad_norm": Wire(RESULT, (0.5, 2.0), lambda cfg: nr.make_policy(cfg).gradient_clipping()),
    # engines and memory
    "dtype": Wire(RESULT, ("float32", "bfloat16"), lambda cfg: [
        next(nr.make_policy(cfg).module.parameters()).dtype, next(nr.make_reference(cfg).parameters()).dtype,
        getattr(torch, llm_args(cfg)["dtype"]), nr.make_policy(cfg).bfloat16_enabled()],
        ([torch.float32] * 3 + [False], [torch.bfloat16] * 3 + [True])),
    "lora_rank": Wire(RESULT, (2, 4), lambda cfg: {
        p.shape[0] for name, p in nr.make_policy(cfg).module.named_parameters() if ".lora_A." in name},
        ({2}, {4})),
    "memory_gb": Wire(ROUNDING, (24.0, 40.0), lambda cfg: [
        memory.peak_bytes(*plan(cfg), gpu=True) <= 0.9 * 24 * memory.GIB, plan(cfg)[0].offload],
        ([True, "optimizer"], [False, "none"])),
    "pack_tokens": Wire(ROUNDING, (65, 130), at("packs"), ([8], [4]), STEPS | dict(steps=1)),
    "checkpointing": Wire(ROUNDING, ("on", "off"), lambda cfg: [
        nr.make_policy(cfg).module.model.is_gradient_checkpointing, plan(cfg)[0].checkpointing],
        ([True, "on"], [False, "off"])),
    "offload": Wire(ROUNDING, ("none", "optimizer"), lambda cfg: [
        type(nr.make_policy(cfg).optimizer.optimizer).__name__, plan(cfg)[0].offload],
        (["AdamW", "none"], ["DeepSpeedCPUAdam", "optimizer"])),
    "vllm_memory": Wire(ROUNDING, (0.5, 0.7), lambda cfg: [
        llm_args(cfg, gpu=True)["gpu_memory_utilization"], plan(cfg)[0].vllm_memory], ([0.5] * 2, [0.7] * 2)),
    "compile": Wire(ROUNDING, ("off", "on"), lambda cfg: [
        nr.make_policy(cfg).module.fuse, nr.make_reference(cfg).fuse,
        any(m._compiled_call_impl for m in nr.make_policy(cfg).module.modules())],
        ([False] * 3, [True] * 3)),
    "tp": Wire(ROUNDING, (1, 2), lambda cfg: llm_args(cfg)["tensor_parallel_size"]),
    "zero_stage": Wire(ROUNDING, (1, 3), lambda cfg: nr.make_policy(cfg).zero_optimization_stage()),
    "timeout": Wire(FREE, (1.0, 2.0), group_timeout, ((1.0,), (2.0,))),
    "mismatch_bound": Wire(RESULT, (0.4, 0.6), stops, (True, False)),
    # evaluation and files
    "eval_every": Wire(RESULT, (2, 4), at("evaluate"), ([0, 2, 4, 6], [0, 4, 6]), STEPS),
    "eval_size": Wire(RESULT, (5, 9), lambda cfg: [
        len(splits(dataclasses.replace(cfg, eval_data=source))[1])
        for source in ("", f"{cfg.out}/two.jsonl")],
        ([5, 5], [9, 9])),
    "eval_n": Wire(RESULT, (2, 4), lambda cfg: evaluated(cfg)[0][1][1]),
    "eval_select": Wire(RESULT, ("steps", "random"), lambda cfg: verifiers(cfg)[1][0]),
    "eval_budget": Wire(RESULT, ("6", "8,4"), lambda cfg: sorted(
        {len(p) for p in evaluated(cfg)[0][-1][0]}), ([1 + 6 + 5], [1 + 4 + 5, 1 + 8 + 5]),
        dict(template="{question}{opener}abcde")),
    "name": Wire(FREE, ("x", "y"), lambda cfg: Path(files(cfg)).name),
    "out": Wire(FREE, ("{tmp}/x", "{tmp}/y"), lambda cfg: str(Path(files(cfg)).parent)),
    "save_every": Wire(FREE, (2, 0), at("save"), ([0, 2, 4, ...], [...]), STEPS | dict(steps=5)),
    "keep": Wire(FREE, (1, 3), kept, (["step-9"], ["step-5", "step-7", "step-9"])),
    "resume": Wire(FREE, ("", "yes"), resumed(["--lr_end", "0.1"]), (1e-4, 0.25)),
    "resume_force": Wire(FREE, (False, True), resumed(["--lr", "0.5"]), (
        "other results with --lr 0.5 (was 0.25). --resume_force continues nevertheless", 0.5),
        dict(resume="yes")),
    "keep_rollouts": Wire(RESULT, (4, 9), lines_kept, (4, 12), dict(name="r")),
    "wandb": Wire(FREE, ("offline", "online"), wandb_modes, (["offline"] * 2, ["online"] * 2),
                  dict(name="w")),
    "profile": Wire(FREE, (False, True), profiled, ([], [1]), dict(name="p")),
    "seed": Wire(RESULT, (1, 2), lambda cfg: [
        torch_seed(cfg), llm_args(cfg)["seed"], setting("random_seed")(cfg)], ([1] * 3, [2] * 3)),
}


def config(tmp, flag, value):
    """A checked Config with a value of a row's flag and the row's other flags."""
    changes = {"out": "{tmp}"} | WIRES[flag].base | {flag: value}
    changes = {name: x.replace("{tmp}", str(tmp)) if isinstance(x, str) else x for name, x in changes.items()}
    tp = changes.pop("tp", 1)  # more ranks than this process would be refused
    return dataclasses.replace(make_config(**changes), tp=tp)


def test_every_flag_has_a_row():
    assert WIRES.keys() == {f.name for f in dataclasses.fields(nr.Config)}


@pytest.mark.parametrize("flag", WIRES)
def test_the_value_of_a_flag_reaches_what_it_names(flag, group, tmp_path):
    row = WIRES[flag]
    assert len(set(map(str, row.values))) == len(row.values) >= 2
    for value, wanted in zip(row.values, row.wanted or row.values, strict=True):
        part = tmp_path / str(row.values.index(value))  # a folder of its own
        part.mkdir()
        for name, text in TEXTS.items():
            (part / name).write_text(text)
        cfg = config(part, flag, value)
        got, wanted = row.at(cfg), wanted.replace("{tmp}", str(part)) if isinstance(wanted, str) else wanted
        numbers = wanted if isinstance(wanted, list) else [wanted]
        if any(isinstance(x, float) for x in numbers) and not any(x is None for x in numbers):
            close(got, wanted, 10 * EPS)
        else:
            assert got == wanted, value


def test_a_flag_is_in_the_class_for_resume_that_its_row_says():
    """FREE: it changes no result, or its result is compared by checksum. ROUNDING: only the order of sums."""
    for flag, row in WIRES.items():
        found = [name for name, flags in ((FREE, folder.FREE), (ROUNDING, folder.ROUNDING)) if flag in flags]
        assert (found or [RESULT]) == [row.resume], flag
    assert folder.FREE | folder.ROUNDING <= WIRES.keys()


# ---- the seed


def test_each_seed_gives_other_examples_another_order_and_other_noise_and_the_same_seed_the_same(group):
    def decided(cfg):
        calls, _ = evaluated(dataclasses.replace(cfg, eval_n=2))
        return [training("prompts")(cfg), training("seeds")(cfg), calls[1][4],
                [example["question"] for example in splits(cfg)[0]]]

    one, again, two = (decided(make_config(seed=seed)) for seed in (1, 1, 2))
    assert one == again and all(a != b for a, b in zip(one, two, strict=True))
    held_out = [splits(make_config(seed=seed))[1] for seed in (1, 2)]
    assert held_out[0] == held_out[1]  # all seeds are compared on the same examples


def test_the_examples_that_are_held_out_of_a_file_depend_on_the_seed(group, tmp_path):
    (tmp_path / "one.jsonl").write_text(TEXTS["one.jsonl"])
    held_out = [[e["question"] for e in splits(make_config(data=str(tmp_path / "one.jsonl"), seed=seed))[1]]
                for seed in (1, 1, 2)]
    assert held_out[0] == held_out[1] != held_out[2]


def test_every_request_of_training_has_a_seed_of_its_own_by_run_step_draw_and_prompt():
    cfg = make_config(prompts=4, drop_flat_groups=True, resample=2)  # all groups are flat: three draws

    def seeds(cfg, **where):
        return [call["seeds"] for call in collected(cfg, **where)[0]]

    one = seeds(cfg)
    others = [seeds(cfg, step=4), seeds(dataclasses.replace(cfg, seed=1))]
    flat = sum(sum([one, *others], []), [])
    assert len(one) == 3 and len(flat) == 3 * 3 * 4 == len(set(flat))
    far = sorted(flat)  # sample j of a request has the seed + j
    assert min(b - a for a, b in zip(far, far[1:])) > 16384
    evaluation = evaluated(dataclasses.replace(cfg, eval_n=2))[0][1][4]
    assert not set(flat) & set(evaluation)


def test_ranks_draw_the_prompts_and_the_seeds_that_one_process_would_draw():
    cfg = make_config(prompts=4)
    [whole], *parts = (collected(cfg, **ranks)[0] for ranks in (
        {}, dict(rank=0, world=2), dict(rank=1, world=2)))
    for name in ("prompts", "seeds"):
        assert whole[name] == parts[0][0][name] + parts[1][0][name]


def test_ranks_evaluate_with_the_seeds_that_one_process_would_use(monkeypatch):
    cfg = make_config(eval_n=2)
    whole = evaluated(cfg)[0][1]
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_sum", lambda *values: list(map(float, values)))
    monkeypatch.setattr(dist, "all_gather", lambda items, group=None: items)
    for rank in (0, 1):
        monkeypatch.setattr(dist, "rank", lambda: rank)
        part = evaluated(cfg)[0][1]
        assert (part[0], part[4]) == (whole[0][rank::2], whole[4][rank::2])


# ---- the engines


@pytest.mark.parametrize("stage, dtype", [(1, "bfloat16"), (2, "bfloat16"), (2, "float32")])
def test_gradients_of_packs_are_summed_in_float32_and_in_buckets_of_the_planned_size(group, stage, dtype):
    policy = nr.make_policy(make_config(zero_stage=stage, dtype=dtype))
    assert policy.get_data_types()[1] is torch.float32
    assert policy._config.zero_config.reduce_bucket_size == memory.BUCKET
    assert policy.gradient_accumulation_steps() == 1 and policy.train_micro_batch_size_per_gpu() == 1
    assert all(w.dtype is torch.float32 for group in policy.optimizer.param_groups for w in group["params"])


@pytest.mark.parametrize("changes, mode", [
    ({}, "processed"), (dict(temperature=0.5), "processed"), (dict(top_p=0.9), "raw"), (dict(top_k=5), "raw"),
    (dict(top_p=0.9, top_k=5), "raw")])
def test_log_probs_are_processed_unless_tokens_are_cut_off(changes, mode, group):
    """Processed: with the temperature, as the trainer's. With top-p or top-k they would be renormalised."""
    changes = changes | dict(correction="none")
    assert llm_args(make_config(**changes))["logprobs_mode"] == f"{mode}_logprobs"


def test_a_gpu_gets_the_planned_share_and_room_for_the_sequences_of_the_largest_call(group):
    """8 prompts of 16 samples; 32 examples, alone or with 5 samples each."""
    cfg = make_config(prompts=8, samples=16, vllm_memory=0.5, max_prompt=64, max_tokens=96)
    for changes, sequences in (({}, 129), (dict(eval_n=5), 161), (dict(eval_size=200), 201)):
        args = llm_args(dataclasses.replace(cfg, **changes), gpu=True)
        assert args["max_num_seqs"] == sequences
        shape = runtime.shape.ModelShape.of(cfg.model)
        assert args["kv_cache_memory_bytes"] == sequences * (64 + 96) * 4 * shape.kv_cache
    assert args["enable_sleep_mode"] and args["enable_prefix_caching"] and "enforce_eager" not in args
    assert args["distributed_executor_backend"] == "external_launcher"
    on_cpu = llm_args(cfg)
    assert "gpu_memory_utilization" not in on_cpu and on_cpu["max_num_seqs"] == 129


@pytest.fixture
def asked(llm, monkeypatch):
    """The SamplingParams of each call of the real engine, a list per call."""
    calls, generate = [], llm.generate

    def record(prompts, params, **kwargs):
        calls.append(params)
        return generate(prompts, params, **kwargs)
    monkeypatch.setattr(llm, "generate", record)
    return calls


def test_what_reaches_vllm_in_training_and_evaluation(llm, asked, tokenizer):
    cfg = make_config(prompts=2, samples=3, temperature=1.0, top_p=0.75, top_k=7, correction="none", seed=5,
                      max_tokens=40, eval_n=2, eval_size=3, eval_budget="4", max_prompt=256)
    train_set, eval_set = splits(cfg)
    nr.collect_rollouts(cfg, llm, train_set, all_right, 6, {})
    [training] = asked
    assert [(p.n, p.temperature, p.top_p, p.top_k, p.max_tokens) for p in training] == [
        (3, 1.0, 0.75, 7, 40)] * 2
    assert [p.seed for p in training] == [data.request_seed(5, 6, 0, i) for i in range(2)]
    asked.clear()
    cfg = dataclasses.replace(cfg, temperature=0.5)
    for _ in range(2):  # the same in every evaluation
        nr.evaluate(llm, eval_set, all_right, cfg)
    greedy, samples, answers = asked[:3]
    assert [(p.n, p.temperature, p.max_tokens) for p in greedy] == [(1, 0.0, 40)] * 3
    assert [(p.n, p.temperature, p.max_tokens) for p in samples] == [(2, 0.5, 40)] * 3
    opener = tokenizer.encode("</think><answer>", add_special_tokens=False)
    assert [(p.n, p.temperature, p.max_tokens) for p in answers] == [(1, 0.0, 40 - 4 - len(opener))] * 3
    seeds = [p.seed for p in samples]
    assert len(set(seeds)) == 3 and seeds == [p.seed for p in asked[4]]
    assert seeds == [data.request_seed(5, "eval", i) for i in range(3)]
    for p in sum(asked, training):
        assert (p.logprobs, p.flat_logprobs, p.detokenize, p.min_p, p.min_tokens) == (0, True, False, 0, 0)
        assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1, 0, 0)
        assert not p.ignore_eos and not p.stop and p.logit_bias is None


def test_the_end_of_a_chatml_turn_stops_a_completion_and_other_models_have_none(asked, llm, monkeypatch):
    tokenizer = llm.get_tokenizer()
    for vocabulary, stops in (({"<|im_end|>": 7}, [7]), ({}, [])):
        fake = SimpleNamespace(get_vocab=lambda: vocabulary, batch_decode=tokenizer.batch_decode)
        monkeypatch.setattr(llm, "get_tokenizer", lambda: fake)
        nr.rollout(llm, [[65, 66]], 1, 0.0, 4)
        assert asked[-1][0].stop_token_ids == stops


# ---- rewards


def judged(cfg, completions, **columns):
    """(rewards, parts) of the real Verifier that a run starts."""
    examples = [{"question": "1+1", "answer": "2"}]
    verifier, _ = evaluation.start_verifiers(cfg, rewards.Verifier, examples, examples)
    with verifier:
        return verifier(completions, **columns)[:2]


@pytest.mark.parametrize("argv, penalties", [
    ([], [0, 0, -1 / 16, -0.5, -1, -1]),  # the preset's buffer is 0.2 of 80: 64 tokens are free
    (["--overlong", "hard"], [0, 0, -1, -1, -1, -1]),
    (["--overlong_buffer", "0.5"], [0, -0.6, -0.625, -0.8, -1, -1]),
    (["--overlong_buffer", "0"], None),
])
def test_dapo_adds_the_penalty_for_long_completions_with_weight_1(argv, penalties):
    cfg = nr.parse_config(["--algo", "dapo", "--max_tokens", "80", *argv])
    ids = [[0] * n for n in (40, 64, 65, 72, 80, 81)]
    values, parts = judged(cfg, ["2"] * 6, completion_ids=ids, answer=["2", "2", "2", "2", "3", "2"],
                           prompts=["1+1"] * 6)
    assert list(parts) == ["gsm8k"] + ["overlong"] * (penalties is not None)
    close(values, [a + b for a, b in zip([1, 1, 1, 1, 0, 1], penalties or [0] * 6)])


def test_random_rewards_depend_on_the_seed_of_the_run_on_the_step_and_on_the_number_of_the_sample():
    columns = dict(prompts=["1+1"] * 64, sample_index=list(range(64)))
    values = [judged(make_config(rewards="random", seed=seed), ["2"] * 64, step=step, **columns)[0]
              for seed, step in ((0, 0), (0, 0), (1, 0), (0, 1))]
    assert values[0] == values[1] and len({tuple(v) for v in values}) == 3 and len(set(values[0])) == 2


@pytest.mark.parametrize("template, kind", [("chat", "list"), ("none", "str"), ("r1", "str")])
def test_rewards_get_messages_with_the_chat_template_and_else_text(template, kind, tmp_path):
    (tmp_path / "kind.py").write_text(
        f"def is_right(completions, **_):\n    return [float(type(c) is {kind}) for c in completions]\n")
    cfg = make_config(rewards=f"{tmp_path}/kind.py:is_right", template=template)
    assert judged(cfg, ["2"])[0] == [1.0]


def test_a_reward_gets_the_limits_and_settings_of_the_run(tmp_path):
    (tmp_path / "echo.py").write_text(
        "def echo(completions, timeout, max_tokens, allow_unsafe_code, judge_url, judge_model, **_):\n"
        "    return [float([timeout, max_tokens, allow_unsafe_code, judge_url, judge_model] == \n"
        "                  [3.5, 77, False, 'u', 'm'])] * len(completions)\n")
    cfg = make_config(rewards=f"{tmp_path}/echo.py:echo", reward_timeout=3.5, max_tokens=77, judge_url="u",
                      judge_model="m")
    assert judged(cfg, ["2"])[0] == [1.0]
