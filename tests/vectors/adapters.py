"""Runs the cases through the functions of other projects.

    python tests/vectors/adapters.py trl FOLDER      writes FOLDER/TRL 1.16.0.json, for check.py
    python tests/vectors/adapters.py table FOLDER    counts what agrees: docs/conformance.md

The first command needs torch and the project; ADAPTERS has their names. An adapter gets a case and
returns the results that the project has an option for. Losses get the advantages that the case
expects, so a difference has one place. float64, as far as the project keeps it."""
import importlib.util
import json
import math
import sys
import types
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.utils.rnn import pad_sequence

from check import difference
from make import all_in

ROOT = Path(__file__).resolve().parents[2]
CASES = json.loads(Path(__file__).with_name("cases.json").read_text())
PAGE = ROOT / "docs/conformance.md"
TOLERANCE = 1e-6  # some projects add 1e-8 to a divisor, or use float32 in places


def padded(rows):
    """(N, C) from a list of numbers per completion."""
    return pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def tensors(case):
    """logp (a leaf), old, vllm, ref, advantages, mask (tokens with a weight): each (N, C).

    kl_coef: of the KL in the loss. rewards (N,): None if a completion has another reward than one
    at its end. index: the number of the group of each completion."""
    o, completions = case["options"], all_in(case["groups"])
    b = SimpleNamespace(**{name: padded([c[name] or [] for c in completions])
                           for name in ("logp", "old", "vllm", "ref", "loss_mask")})
    b.logp.requires_grad_()
    if not completions[0]["old"]:
        b.old = b.logp.detach()
    b.advantages = padded(all_in(case["expected"]["advantages"]))
    masked = [c["truncated"] * o["mask_truncated"] for c in completions]
    b.mask = b.loss_mask * (1 - torch.tensor(masked)[:, None])
    b.kl_coef = o["kl_coef"] if o["kl_in"] == "loss" else 0.0
    b.rewards, b.index = None, [g for g, group in enumerate(case["groups"]) for _ in group]
    ends = [[end for end, _ in c["rewards"]] for c in completions]
    if ends == [[len(c["logp"])] for c in completions] and o["kl_in"] == "loss":
        b.rewards = torch.tensor([c["rewards"][0][1] for c in completions], dtype=torch.float64)
    return b


def nested(rows, case):
    """(N, C) as a list [group][completion][token], without the padding."""
    rows = iter(rows.tolist())
    return [[next(rows)[:len(c["logp"])] for c in group] for group in case["groups"]]


def of_loss(loss, b, case):
    """The fields loss and gradient."""
    loss.backward()
    return {"loss": loss.item(), "gradient": nested(b.logp.grad, case)}


def without_init(*packages):
    """Makes these packages importable without running their __init__.py, which needs a GPU library
    or a cluster. Their modules are the project's own."""
    for name in packages:
        if name in sys.modules:
            continue
        parent, _, last = name.rpartition(".")
        where = (sys.modules[parent].__path__[0] + "/" + last if parent else
                 importlib.util.find_spec(name).submodule_search_locations[0])
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [where]


TRL_LOSSES = {  # aggregate, surrogate -> TRL's loss_type
    ("sequence", "ppo"): "grpo", ("token", "ppo"): "dapo", ("constant", "ppo"): "dr_grpo",
    ("token", "cispo"): "cispo", ("sequence", "sapo"): "sapo"}


def trl(case, bias_correction=False):
    """GRPOTrainer's and RLOOTrainer's _compute_loss, with log-probs instead of a model."""
    from trl import GRPOTrainer, RLOOTrainer
    o, b = case["options"], tensors(case)
    no_rloo = o["kl_coef"] or o["delta"] or (o["aggregate"], o["surrogate"]) != ("sequence", "ppo")
    loss_type = TRL_LOSSES.get((o["aggregate"], o["surrogate"]))
    if (not loss_type or o["correction"] == "sequence_mask"
            or o["ratio"] == "product" and (no_rloo or o["correction"] != "none")):
        return {}
    ratio = (b.old - b.vllm).exp()  # (N, C)
    inputs = {
        "prompt_ids": torch.zeros(len(b.mask), 1), "prompt_mask": torch.ones(len(b.mask), 1),
        "completion_ids": torch.ones_like(b.mask), "completion_mask": b.mask,
        "old_per_token_logps": b.old, "ref_per_token_logps": b.ref, "advantages": b.advantages,
        "num_items_in_batch": b.mask.sum(),
        "importance_sampling_ratio": {
            "none": None, "token_truncate": ratio.clamp(max=o["correction_cap"]),
            "token_mask": ratio.masked_fill(ratio > o["correction_cap"], 0.0)}[o["correction"]]}
    trainer = RLOOTrainer if o["ratio"] == "product" else GRPOTrainer
    if trainer is RLOOTrainer:
        inputs |= {"advantages": b.advantages.sum(1) / b.loss_mask.sum(1),  # equal in each token
                   "old_logps": (b.old * b.mask).sum(1)}
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            b.logp, torch.zeros_like(b.logp), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        loss_type=loss_type, importance_sampling_level=o["ratio"],
        beta=b.kl_coef,
        epsilon_low=o["clip_low"], epsilon_high=o["clip_high"] + (loss_type == "cispo"),
        use_vllm=o["correction"] != "none", vllm_importance_sampling_correction=True,
        max_completion_length=o["max_tokens"], current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False, model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=o["delta"] or None, use_bias_correction_kl=bias_correction,
            steps_per_generation=1, sapo_temperature_pos=o["tau"],
            sapo_temperature_neg=o["tau_neg"]),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"train": defaultdict(list)})
    return of_loss(trainer._compute_loss(fake, None, inputs), b, case)


def verl(case):
    """The registered policy losses, agg_loss, kl_penalty and advantage estimators."""
    import numpy as np
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.workers.config import ActorConfig
    o, b, found = case["options"], tensors(case), {}
    estimator = {  # baseline, scale -> estimator, its options
        ("group", "group"): ("grpo", dict(epsilon=1e-4)),
        ("group", "none"): ("grpo", dict(norm_adv_by_std_in_grpo=False)),
        ("leave_one_out", "none"): ("rloo", {}),
        ("batch", "batch"): ("reinforce_plus_plus", dict(config=SimpleNamespace(gamma=1.0))),
    }.get((o["baseline"], o["scale"]))
    if estimator and b.rewards is not None:
        last = b.loss_mask.cumsum(1).argmax(1)  # (N,) verl puts the reward on the last token
        by_token = torch.zeros_like(b.loss_mask)
        by_token[range(len(last)), last] = b.rewards
        advantages, _ = core_algos.get_adv_estimator_fn(estimator[0])(
            token_level_rewards=by_token, response_mask=b.loss_mask, index=np.array(b.index),
            **estimator[1])
        found["advantages"] = nested(advantages, case)
    name = {("token", "ppo"): "vanilla", ("sequence", "ppo"): "gspo",
            ("token", "cispo"): "cispo", ("token", "sapo"): "sapo"}.get(
                (o["ratio"], o["surrogate"]))
    low = 1.0 if name == "cispo" else o["clip_low"]  # its CISPO has a lower bound, too: off
    threshold = {"none": None, "token_truncate": o["correction_cap"],
                 "token_mask": f"1e-9_{o['correction_cap']}"}
    if (not name or o["correction"] not in threshold
            or name == "sapo" and o["aggregate"] != "sequence" or not b.mask.any()
            or name == "gspo" and o["delta"]):
        return found
    weights = None
    if o["correction"] != "none":
        weights, _ = compute_rollout_correction_weights(
            b.old - b.vllm, b.mask, rollout_is_threshold=threshold[o["correction"]])
    mode = {"sequence": "seq-mean-token-mean", "token": "token-mean",
            "constant": "seq-mean-token-sum-norm"}[o["aggregate"]]
    scale = dict(loss_scale_factor=o["max_tokens"])
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=low,
        clip_ratio_high=o["clip_high"], clip_ratio_c=o["delta"] or math.inf, tau_pos=o["tau"],
        tau_neg=o["tau_neg"], global_batch_info=scale)
    loss, _ = core_algos.get_policy_loss_fn(name)(
        b.old, b.logp, b.advantages, b.mask, mode, config, weights)
    if b.kl_coef:
        kl = core_algos.kl_penalty(b.logp, b.ref, "low_var_kl")  # (N, C)
        loss = loss + b.kl_coef * core_algos.agg_loss(kl, b.mask, mode, **scale)
    return found | of_loss(loss, b, case)


def openrlhf(case):
    """PolicyLoss, aggregate_loss and compute_approx_kl, put together as in its ppo_actor.py."""
    without_init("openrlhf", "openrlhf.models")
    from openrlhf.models.loss import PolicyLoss, aggregate_loss
    from openrlhf.models.utils import compute_approx_kl
    o, b = case["options"], tensors(case)
    kind = {"token": "ppo", "sequence": "gspo"}.get(o["ratio"])
    correction = {  # level, mode, threshold
        "none": ("off", "mask", (0.0, 1.0)), "token_truncate": ("token", "clip", (0.0, None)),
        "token_mask": ("token", "mask", (0.0, None)),
        "sequence_mask": ("seq", "mask", (1 / o["correction_cap"], None))}[o["correction"]]
    if (not kind or o["surrogate"] != "ppo" or o["aggregate"] == "constant"
            or kind == "gspo" and (o["aggregate"] == "token" or o["correction"] != "none")):
        return {}
    level, mode, (low, high) = correction
    policy_loss = PolicyLoss(
        o["clip_low"], o["clip_high"], o["delta"] or None, o["aggregate"] == "token", kind,
        is_correction_level=level, is_correction_mode=mode,
        is_correction_threshold=(low, high or o["correction_cap"]))
    loss = policy_loss(b.logp, b.old, b.advantages, b.mask, b.vllm)[0]
    if b.kl_coef:
        kl = compute_approx_kl(b.logp, b.ref, b.old, kl_estimator="k3")  # (N, C)
        loss = loss + b.kl_coef * aggregate_loss(kl, b.mask)
    return of_loss(loss, b, case)


def areno(case):
    """GSPO's loss in its CUDA backend, which is plain torch, and the group advantages."""
    without_init("areno", "areno.api", "areno.api.backend", "areno.api.backend.cuda")
    from areno.api.advantages import compute_batch_group_advantages
    from areno.api.backend.cuda import losses
    o, b, found = case["options"], tensors(case), {}
    if (o["baseline"], o["scale"]) == ("group", "group") and b.rewards is not None:
        sizes = list(map(len, case["groups"]))
        scores = compute_batch_group_advantages(b.rewards.tolist(), sizes, eps=1e-4)
        found["advantages"] = nested(
            torch.tensor(scores, dtype=torch.float64)[:, None] * b.loss_mask, case)
    if ((o["surrogate"], o["ratio"], o["aggregate"], o["correction"], o["delta"])
            != ("ppo", "sequence", "sequence", "none", 0) or o["clip_low"] != o["clip_high"]
            or b.kl_coef):
        return found
    n, length = b.mask.shape
    pack = dict(
        packed_response_mask=b.mask.flatten(), packed_logprobs=b.old.flatten(),
        packed_advantages=b.advantages.flatten(), packed_num_sequences=n,
        packed_seq_ids=torch.arange(n).repeat_interleave(length))
    loss, _ = losses.gspo_loss_fn(pack, b.logp.flatten(), clip_eps=o["clip_low"])
    return found | of_loss(loss, b, case)


def paper(case):
    """GRPO as in its paper (arXiv:2402.03300, eq. 3 and 4), with the changes of DAPO (2503.14476)
    and Dr. GRPO (2503.20783). It is the shortest adapter: begin one of your own with it."""
    o, b, found = case["options"], tensors(case), {}
    if o["baseline"] == "group" and o["scale"] in ("group", "none") and b.rewards is not None:
        groups = b.rewards.split(list(map(len, case["groups"])))
        scores = [(g - g.mean()) / (g.std(correction=0) + 1e-4 if o["scale"] == "group" else 1)
                  for g in groups]
        found["advantages"] = nested(torch.cat(scores)[:, None] * b.loss_mask, case)
    if (o["surrogate"], o["ratio"], o["correction"], o["delta"]) != ("ppo", "token", "none", 0):
        return found
    ratio = (b.logp - b.old).exp()
    clipped = ratio.clamp(1 - o["clip_low"], 1 + o["clip_high"])
    loss = -torch.minimum(ratio * b.advantages, clipped * b.advantages)
    if b.kl_coef:
        d = b.ref - b.logp
        loss = loss + b.kl_coef * (d.exp() - d - 1)
    by_sequence = (loss * b.mask).sum(1)
    loss = {"sequence": (by_sequence / b.mask.sum(1).clamp(min=1)).mean(),
            "token": by_sequence.sum() / b.mask.sum().clamp(min=1),
            "constant": by_sequence.mean() / o["max_tokens"]}[o["aggregate"]]
    return found | of_loss(loss, b, case)


ADAPTERS = {"trl": (trl, "TRL"), "verl": (verl, "verl"), "openrlhf": (openrlhf, "OpenRLHF"),
            "areno": (areno, "AReno"), "paper": (paper, "the papers")}


ROWS = ("log-ratio beyond 20", "no reward", "all others")  # cases of loss and gradient


def row_of(case):
    """The row of a case. A missing verdict comes first."""
    if not all(c["rewards"] for c in all_in(case["groups"])):
        return "no reward"
    return "log-ratio beyond 20" if "log-ratio" in case["name"] else "all others"


def count(results):
    """Row of the table -> its cell for the results of a project, "agree of compared"."""
    cells = defaultdict(lambda: [0, 0])
    for case in CASES:
        found, o = results.get(case["name"], {}), case["options"]
        for row, fields in (
                (f"advantages, `--scale {o['scale']}`", ["advantages"]),
                (f"loss and gradient, {row_of(case)}", ["loss", "gradient"])):
            if set(fields) <= set(found):
                agrees = all(difference(found[x], case["expected"][x]) <= TOLERANCE for x in fields)
                cells[row][0] += agrees
                cells[row][1] += 1
    return {row: f"{agree} of {compared}" for row, (agree, compared) in cells.items()}


def table(columns):
    """Markdown. columns: project -> its results."""
    cells = {project: count(results) for project, results in columns.items()}
    rows = [f"advantages, `--scale {scale}`" for scale in ("group", "batch", "none")]
    rows += [f"loss and gradient, {row}" for row in ROWS]
    lines = [["", *cells]]
    lines += [[row, *(own.get(row, "-") for own in cells.values())] for row in rows]
    first, *others = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([first, f"|{'---|' * (len(cells) + 1)}", *others])


def main(name, folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if name == "table":
        files = sorted(folder.glob("*.json"), key=lambda path: path.stem.lower())
        shown = table({path.stem: json.loads(path.read_text()) for path in files})
        before, _, after = PAGE.read_text().split("<!-- table -->\n")
        PAGE.write_text(f"{before}<!-- table -->\n{shown}\n<!-- table -->\n{after}")
        print(shown)
        return
    adapter, title = ADAPTERS[name]
    version = "" if name == "paper" else f" {metadata.version(name)}"
    found = {case["name"]: results for case in CASES if (results := adapter(case))}
    path = folder / f"{title}{version}.json"
    path.write_text(json.dumps(found))
    print(f"wrote {path}: {len(found)} of {len(CASES)} cases")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__)
