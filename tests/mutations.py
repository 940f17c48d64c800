"""Plants faults in copies of the repository, one at a time, and reports which test notices each.

    python tests/mutations.py                all faults; make mutations does the same
    python tests/mutations.py leave-one-out  only those whose description contains these words
    python tests/mutations.py --dry          no tests: only checks that every fault can be planted

A fault is a replacement of text that must occur exactly once in its file, so this list cannot become outdated
unnoticed. Each copy is tested in a forked child (torch, TRL and vLLM are imported once, here), which stops at
the first test that fails; the quickest tests run first. Prints a Markdown table. Exits with 1 if no test
notices a fault, or if a test fails without a fault.
"""
import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("pytest.ini", "*.py", "runtime/*.py", "verify/*.py", "tests/*.py", "tests/*.txt", "bench/faults.py",
          "examples/*.py", "models/tiny/*", "runtime/*.html", "bench/screenshots.py",
          "bench/results/ranks_reduce.json", "docs/data_and_rewards.md")
STAGES = (  # each runs if the one before it passed
    ["tests/test_by_hand.py"],
    ["tests/test_precision.py"],
    ["tests/test_wiring.py"],
    ["tests/test_credit.py", "tests/test_variants.py", "tests/test_math.py", "tests/test_guard.py"],
    ["tests/test_process_rewards.py"],
    ["tests/test_trl.py", "-k", "not gradients_equal"],
    ["tests/test_trl.py", "-k", "gradients_equal"],
    ["tests/test_families.py", "-k", "one_sequence_at_a_time"],
    ["tests/test_checksum.py", "-k", "not damaged"],
    ["tests/test_tensor_parallel.py", "-k", "not sample_as_single_ranks"],
    ["tests/test_memory.py", "-k", "planned_state or keys_and_values"],
    ["tests/test_evaluation.py", "-k", "not vllm"],
    ["tests/test_tools.py", "-k", "not program and not example"],
    ["tests/test_report.py", "-k", "numbers_per_token_are or differ_only"],
    ["tests/test_ppo.py", "-k", "gae"],
    ["tests/test_resume.py", "-k", "not killed and not two_ranks and not does_not_answer"])
EVALUATION = "runtime/evaluation.py"
TENSOR_PARALLEL = "runtime/tensor_parallel.py"
CHECKSUM = "runtime/checksum.py"
CREDIT = "runtime/credit.py"
CHECKPOINT, FOLDER = "runtime/checkpoint.py", "runtime/folder.py"
VERIFIER = "verify/verifier.py"
REPORT, TOKENS = "runtime/report.py", "runtime/tokens.py"
TOOL, PPO = "examples/python_tool.py", "examples/ppo.py"
SCRIPT, HEAD, ATTENTION, STATS = "nano_rlvr.py", "runtime/head.py", "runtime/attention.py", "runtime/stats.py"
FAULTS = [  # (description, file, text, what replaces it)
    ("clip: maximum instead of minimum", SCRIPT, "torch.minimum(bounded", "torch.maximum(bounded"),
    ("clip: clip_high ignored", SCRIPT,
     "1 - cfg.clip_low, 1 + cfg.clip_high", "1 - cfg.clip_low, 1 + cfg.clip_low"),
    ("clip: delta ignored", SCRIPT, "ratio.clamp(max=cfg.delta) if cfg.delta else ratio", "ratio"),
    ("loss: wrong sign", SCRIPT, "token_loss = -objective", "token_loss = objective"),
    ("loss: mean over the pack instead of the batch", SCRIPT,
     "(batch.weight * token_loss).sum()", "(batch.weight / batch.weight.sum() * token_loss).sum()"),
    ("ratio: detached", SCRIPT, "ratio = log_ratio.", "ratio = log_ratio.detach()."),
    ("ratio: token and sequence swapped", SCRIPT, 'if cfg.ratio == "sequence":',
     'if cfg.ratio == "sequence":\n        pass\n    elif cfg.ratio == "token":'),
    ("ratio: sum over the sequence instead of the mean", SCRIPT,
     "(sequence_sum(x, batch) / batch.lengths)[", "sequence_sum(x, batch)["),
    ("ratio: geometric mean instead of the product", SCRIPT,
     "log_ratio = sequence_sum(log_ratio, batch)[batch.sequence_ids]",
     "log_ratio = sequence_mean(log_ratio, batch)"),
    ("cispo: the weight is not detached", SCRIPT,
     "weight = ratio.clamp(max=1 + cfg.clip_high).detach()", "weight = ratio.clamp(max=1 + cfg.clip_high)"),
    ("sapo: temperatures swapped", SCRIPT, "masked_fill(advantage > 0,", "masked_fill(advantage <= 0,"),
    ("kl: reversed", SCRIPT, "d = ref - logp", "d = logp - ref"),
    ("kl: k3 with exp, rounded where the log-probs hardly differ", SCRIPT,
     "return d.expm1() - d", "return d.exp() - d - 1"),
    ("kl: k3 without exp", SCRIPT, "return d.expm1() - d", "return -d"),
    ("kl: distance from the reference is rewarded", SCRIPT,
     "token_loss + cfg.kl_coef *", "token_loss - cfg.kl_coef *"),
    ("kl: the reference is the policy itself", SCRIPT,
     "batch.ref, _ = ref(batch)", "batch.ref, _ = policy(batch)"),
    ("kl: temperature missing in the reference", SCRIPT,
     "return TokenLogps(model, cfg.temperature,", "return TokenLogps(model,"),
    ("kl: reference reset one step late", SCRIPT,
     "step % cfg.ref_reset_every == 0", "step % cfg.ref_reset_every == 1"),
    ("log-probs: temperature missing", HEAD, "logits.div_(temperature)", "pass"),
    ("log-probs: wrong sign of the entropy", HEAD, "-logp.mul_(p)", "logp.mul_(p)"),
    ("log-probs: temperature missing in the derivative", HEAD,
     "grad_logp[:, None] / ctx.temperature", "grad_logp[:, None]"),
    ("log-probs: normalised over the first chunk of the vocabulary only", HEAD,
     "(sum(target_logits) - norm)[:, 0]", "sum(target_logits)[:, 0] - norms[:, 0]"),
    ("log-probs: entropy between the chunks missing", HEAD, "(entropies - chunk_logp)", "entropies"),
    ("log-probs: a target counts in every chunk", HEAD, "grad * in_chunk", "grad"),
    ("log-probs: derivative without the target", HEAD, ".scatter_add_(-1, column, grad * in_chunk)", ""),
    ("log-probs: sequences of a pack see each other", ATTENTION,
     "zip(batch.cu_seqlens_q.diff().tolist(), batch.cu_seqlens_k.diff().tolist())",
     "[(int(batch.cu_seqlens_q[-1]), int(batch.cu_seqlens_k[-1]))]"),
    ("log-probs: a completion sees one token ahead", ATTENTION, ".tril(n - m)", ".tril(n - m + 1)"),
    ("collate: every completion sees the first prompt", SCRIPT,
     "is_completion, sequence, keeper[sequence])", "is_completion, sequence, 0)"),
    ("collate: positions restart after a shared prompt", SCRIPT,
     "position_ids=position[kept][None]",
     "position_ids=(position - (prompt_lengths * (keeper != torch.arange(len(keeper))))[sequence])[kept]"
     "[None]"),
    ("collate: predictors off by one", SCRIPT, "kv_index[completion - 1]", "kv_index[completion]"),
    ("collate: end-of-sequence token not trained", SCRIPT, "[r.weight for r in rollouts])[sequence_ids]",
     "[r.weight for r in rollouts])[sequence_ids] * (position + 1 < lengths[sequence])[completion]"),
    ("advantage: n - 1 instead of n", STATS, "* known).sum(dim, keepdim=True) / count",
     "* known).sum(dim, keepdim=True) / (count - 1).clamp(min=1)"),
    ("advantage: the mean of equal rewards is rounded", STATS,
     "smallest = torch.where(smallest.isinf(), 0.0, smallest)", "smallest = torch.zeros_like(smallest)"),
    ("advantage: eps missing", SCRIPT, "(group_std + eps)", "(group_std + 1e-8)"),
    ("advantage: leave-one-out divides by n", SCRIPT,
     "(group_rewards - group_mean) * n / (n - 1).clamp(min=1)",
     "group_rewards - (group_mean * n - group_rewards) / n"),
    ("advantage: no verdict counts as 0", SCRIPT, "    group_mean, group_std = stats",
     "    group_rewards = group_rewards.nan_to_num()\n    group_mean, group_std = stats"),
    ("advantage: length added instead of removed", STATS,
     "return x - slope * centred", "return x + slope * centred"),
    ("advantage: running baseline updated before it is used", SCRIPT,
     "if math.isnan(running_mean):", "if True:"),
    ("weight: local counts instead of global ones", SCRIPT,
     "cfg.max_tokens, sequences, tokens)", "cfg.max_tokens)"),
    ("weight: sequence mean divides by max_tokens", SCRIPT,
     "1 / (sequences * n)", "1 / (sequences * max_tokens)"),
    ("weight: truncated completions are trained despite the mask", SCRIPT,
     "if cfg.mask_truncated and r.truncated", "if False and r.truncated"),
    ("correction: inverted", SCRIPT,
     "correction = importance(mismatch,", "correction = importance(-mismatch,"),
    ("correction: the cap is a lower bound", SCRIPT,
     "clamp(max=cfg.correction_cap)", "clamp(min=cfg.correction_cap)"),
    ("correction: token_mask without the weight", SCRIPT,
     "cfg.correction_cap, mismatch.exp(), 0.0)", "cfg.correction_cap, 1.0, 0.0)"),
    ("metrics: means of the means of optimizer steps", STATS,
     'weights = None if name in ("loss", "grad_norm", "skipped") else tokens', "weights = None"),
    ("metrics: the mean of the largest mismatches", STATS,
     'max(values) if name == "mismatch/max" else fmean', "fmean"),
    ("clipped: only what the clip of PPO takes", SCRIPT,
     "return objective, beyond | (objective", "return objective, (objective"),
    ("correction: effective sample size without its square", STATS,
     'means["correction/w"] ** 2', 'means["correction/w"]'),
    ("correction: 0 times infinity above the cap", SCRIPT,
     "torch.where(mismatch.exp() <= cfg.correction_cap, mismatch.exp(), 0.0)",
     "mismatch.exp() * (mismatch.exp() <= cfg.correction_cap)"),
    ("credit: tokens after the end of a step instead of before it", CREDIT,
     "at_end[::-1].cumsum()[::-1]", "at_end.cumsum()"),
    ("credit: of two steps that end in one token only the last counts", CREDIT,
     "at_end[end - 1] += advantage", "at_end[end - 1] = advantage"),
    ("credit: a step without value counts as 0", CREDIT, "[math.nan] * (K - len(x))",
     "[0.0] * (K - len(x))"),
    ("credit: the end of the sequence belongs to no step", CREDIT,
     "if end == len(r.text):", "if end > len(r.text):"),
    ("credit: KL in the reward is rewarded", CREDIT,
     "rewards[-1] - kl_coef * r.kl", "rewards[-1] + kl_coef * r.kl"),
    ("credit: KL in the reward and in the loss", SCRIPT,
     'ref is not None and cfg.kl_in == "loss"', "ref is not None"),
    ("credit: tokens of a tool count in the length", SCRIPT,
     "r.truncated else r.length", "r.truncated else len(r.completion)"),
    ("credit: the KL in the reward with vLLM's log-probs", CREDIT,
     "policy(batch)[0] - ref(batch)[0]", "batch.vllm_logps - ref(batch)[0]"),
    ("credit: KL over the packs in another order", CREDIT,
     "for r, kl in zip(packed,", "for r, kl in zip(packed[::-1],"),
    ("maxrl: divides where the mean is negative", SCRIPT,
     "torch.where(group_mean > 0, advantages / (group_mean + eps), 0.0)", "advantages / (group_mean + eps)"),
    ("squared gate: the log of the bounded ratio", SCRIPT,
     "return advantage * log_ratio - cfg",
     "log_ratio = ratio.log()\n        return advantage * log_ratio - cfg"),
    ("squared gate: twice the penalty", SCRIPT, "cfg.squared_tau / 2", "cfg.squared_tau"),
    ("ratio: its log is not bounded", SCRIPT,
     "log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()", "log_ratio.exp()"),
    ("checksum: the position does not count", "runtime/checksum.py",
     "(rest * factors(tensor.device)[:len(rest)]).sum(0, keepdim=True)", "rest.sum(0, keepdim=True)"),
    ("checksum: one tensor is not compared", "runtime/checksum.py",
     "visible = [name for name, shard in shards.items() if shard is not None]",
     "visible = [name for name, shard in shards.items() if shard is not None][1:]"),
    ("checksum: a missing tensor is ignored", "runtime/checksum.py",
     "    if unmatched:\n", "    if not sent:\n"),
    ("checksum: not looked at after a sync", SCRIPT, "    weights.check(llm)\n", ""),
    ("steps: those that DeepSpeed skips are not reported", SCRIPT,
     "float(not policy.was_step_applied())", "0.0"),
    ("steps: old log-probs only for epochs, not for minibatches", SCRIPT,
     "if cfg.epochs * cfg.minibatches > 1:", "if cfg.epochs > 1 and cfg.minibatches == 1:"),
    ("steps: every minibatch is the complete batch", SCRIPT, "kept[i::cfg.minibatches]", "kept"),
    ("steps: gradient not clipped", SCRIPT,
     '"gradient_clipping": cfg.max_grad_norm', '"gradient_clipping": 0.0'),
    ("steps: learning rate one step ahead", SCRIPT,
     "(1 - cfg.lr_end) * step", "(1 - cfg.lr_end) * (step + 1)"),
    ("steps: wrong first beta of AdamW", SCRIPT, "betas=(0.9, cfg.beta2)", "betas=(0.95, cfg.beta2)"),
    ("sampling: flat groups kept", SCRIPT,
     "if not (cfg.drop_flat_groups and stats.is_flat(group))", "if group"),
    ("sampling: each rank keeps its own share of groups", SCRIPT,
     "sorted(dist.all_gather(list(groups)))[:cfg.prompts]", "sorted(groups)[:share]"),
    ("sampling: random rewards depend on the place in the rank's batch", SCRIPT,
     "[*range(n)] * len(examples)", "[*range(len(rollouts))]"),
    ("sampling: all draws have the same seeds", SCRIPT,
     "request_seed(cfg.seed, step, draw,", "request_seed(cfg.seed, step, 0,"),
    ("sampling: draws of a step overlap those of the next", SCRIPT,
     "step * (1 + cfg.resample) + draw", "step + draw"),
    ("resume: AdamW's second moment is not restored", CHECKPOINT,
     'KINDS = ("fp32", "exp_avg", "exp_avg_sq")', 'KINDS = ("fp32", "exp_avg")'),
    ("resume: AdamW's step count is not restored", CHECKPOINT,
     's["step"] * 0 + adamw_step', 's["step"]'),
    ("resume: the weights of the forward pass are not restored", CHECKPOINT,
     "        p.copy_(value)", "        pass"),
    ("resume: the progress of the loop is not restored", CHECKPOINT,
     'Progress(**state["progress"])', 'Progress(step=state["progress"]["step"])'),
    ("resume: checksums are not compared", CHECKPOINT,
     "if size_and_sum(folder / name)[1] != checksum:", "if False:"),
    ("resume: sizes and checksums are not compared", CHECKPOINT,
     "for name, (size, checksum) in manifest.items():", "for name, (size, checksum) in ():"),
    ("resume: logs are not cut back", CHECKPOINT, 'self.log.cut_back(logs)', "pass"),
    ("resume: a failed write is not noticed", CHECKPOINT,
     "self.pending.result() if self.pending and self.pending.done()", '"" if True'),
    ("resume: the oldest checkpoints are kept", CHECKPOINT, "steps[:-keep]", "steps[keep:]"),
    ("resume: the most accurate checkpoint is deleted", CHECKPOINT,
     "if path != best or step_of(path) not in accuracy", ""),
    ("resume: other flags are accepted", FOLDER, "if texts and not cfg.resume_force", "if False"),
    ("resume: two processes in one folder", FOLDER, "fcntl.LOCK_EX", "fcntl.LOCK_SH"),
    ("resume: other data are accepted", FOLDER, "path.read_bytes() == checksum.encode()", "True"),
    ("resume: a half line stays in a log", "runtime/log.py", "os.ftruncate(f.fileno(), size)", "pass"),
    ("resume: a signal waits for the end of the rollout", "runtime/stop.py",
     "in_call = in_loop", "in_call = False"),
    ("resume: the second signal is ignored", "runtime/stop.py", "os._exit(128 + number)", "pass"),
    ("evaluation: the selector sees the gold answer", EVALUATION, "prompts=questions,",
     'prompts=questions, answer=[e.get("answer") for e, g in zip(examples, groups) for _ in g],'),
    ("evaluation: a completion is not cut at the budget", EVALUATION,
     "r.completion[:budget] + opener", "r.completion + opener"),
    ("evaluation: a task's set is judged by the rewards of the run", "data.py",
     'if spec != cfg.rewards and not example.get("reward")', "if False"),
    ("evaluation: a tool's output counts in the log-prob of a sample", STATS,
     "zip(r.vllm_logps, r.sampled) if sampled", "zip(r.vllm_logps, r.sampled)"),
    ("evaluation: the interval of several sets is not divided by their number", STATS,
     'for m in sets)) / len(sets)', 'for m in sets))'),
    ("guard: no verdict for anything goes unnoticed", "runtime/guard.py", "    if verdicts:", "    if True:"),
    ("process_rewards: the weight is not applied to steps", VERIFIER,
     "steps.get(end, 0.0) + weight * x", "steps.get(end, 0.0) + x"),
    ("process_rewards: of steps that end at one place the last one counts", VERIFIER,
     "steps.get(end, 0.0) + weight * x", "weight * x"),
    ("process_rewards: a number is a step at the first character", VERIFIER,
     "[(len(text_of(completion)), value)]", "[(1, value)]"),
    ("process_rewards: a step without weight is a step", VERIFIER,
     "in value if weight else ():", "in value:"),
    ("process_rewards: ends that do not rise are accepted", VERIFIER, "all(a < b for", "all(a <= b for"),
    ("process_rewards: the spec of a row is ignored", VERIFIER,
     'spec = self.spec if spec in (None, "") else spec', "spec = self.spec"),
    ("process_rewards: a running total may be right twice", "rewards.py",
     'match[1] == next(wanted, "")', 'match[1] in map(str, totals)'),
    ("guard: columns of the first row only", SCRIPT, "set().union(*examples)", "examples[0].keys()"),
    ("tools: the output counts as sampled", TOOL, "[False] * len(output)", "[True] * len(output)"),
    ("tools: the last turn is decoded and encoded again", TOOL, "r.completion += new.completion[:room]",
     'r.completion += tokenizer(new.text, add_special_tokens=False)["input_ids"][:room]'),
    ("tools: all samples of a later turn share their noise", TOOL,
     "request_seed(seeds[i // n], i % n, turn)", "request_seed(seeds[i // n], turn)"),
    ("tools: no room is kept for the next turn", TOOL, "r.truncated = room <= 0", "r.truncated = False"),
    ("tensor_parallel: a rank gets the completions of another one's prompts", TENSOR_PARALLEL,
     "return outputs[first:first + len(prompts)]", "return outputs[:len(prompts)]"),
    ("tensor_parallel: a signal takes one rank out of a shared call", TENSOR_PARALLEL,
     "self._may_stop, stop.in_call = stop.in_call, False", "self._may_stop = stop.in_call"),
    ("tensor_parallel: the checksum does not see where a shard belongs", CHECKSUM,
     "start = dist.engine_rank() * parts // ranks", "start = 0"),
    ("tensor_parallel: copies of a tensor count once", CHECKSUM,
     "return cls(tensor, shape, 0, 0, ranks)", "return cls(tensor, shape, 0, 0, 1)"),
    ("memory: ZeRO-3 keeps whole weights", "runtime/memory.py",
     "whole / dist.world_size() if sharded else whole", "whole"),
    ("report: gap of the wrong sign", TOKENS,
     "x - y for x, y in zip(before, r.vllm_logps)", "y - x for x, y in zip(before, r.vllm_logps)"),
    ("report: numbers per token in the order of the packs", TOKENS,
     "[found[id(r)] for r in rollouts]", "list(found.values())[:len(rollouts)]"),
    ("report: runs that differ in the seed are two lines", REPORT, ' | {"seed"}', ""),
    ("ppo: an advantage without the discount of those after it", PPO,
     "delta + gamma * lam * next_advantage", "delta + lam * next_advantage"),
    ("ppo: the target of the critic is the normalised advantage", PPO,
     "batch.returns = batch.values + advantages[-1].to(batch.values)",
     "batch.returns = batch.values + advantages[-1].to(batch.values) / advantages[-1].std()"),
    ("wiring: the greedy completions of an evaluation are sampled", EVALUATION,
     "sample(prompts, 1, 0.0, cfg.max_tokens)", "sample(prompts, 1, cfg.temperature, cfg.max_tokens)"),
    ("wiring: samples of an evaluation ignore the temperature", EVALUATION,
     "sample(prompts, n, cfg.temperature,", "sample(prompts, n, 1.0,"),
    ("wiring: examples of an evaluation share their noise", EVALUATION,
     "[seeds[i] for i in indices]", "[seeds[0] for i in indices]"),
    ("wiring: ranks evaluate with the seeds of the first examples", EVALUATION,
     "[seeds[i] for i in indices]", "seeds[:len(mine)]"),
    ("wiring: each evaluation has other seeds", SCRIPT,
     'data.request_seed(cfg.seed, "eval", i)', "data.request_seed(cfg.seed, id(object()), i, os.urandom(8))"),
    ("wiring: evaluations have the seeds of step 0", SCRIPT,
     'data.request_seed(cfg.seed, "eval", i)', "data.request_seed(cfg.seed, 0, 0, i)"),
    ("wiring: an evaluation ignores the seed of the run", SCRIPT,
     'data.request_seed(cfg.seed, "eval", i)', 'data.request_seed(0, "eval", i)'),
    ("wiring: the seeds of rollouts ignore the seed of the run", SCRIPT,
     "data.request_seed(cfg.seed, step, draw,", "data.request_seed(0, step, draw,"),
    ("wiring: all ranks have the seeds of rank 0", SCRIPT, "step, draw, first + i)", "step, draw, i)"),
    ("wiring: top_p is not handed on", SCRIPT, "top_p=cfg.top_p, top_k=cfg.top_k)", "top_k=cfg.top_k)"),
    ("wiring: top_k is not handed on", SCRIPT, "top_p=cfg.top_p, top_k=cfg.top_k)", "top_p=cfg.top_p)"),
    ("wiring: raw log-probs for top_p only", SCRIPT,
     "if (cfg.top_p, cfg.top_k) == (1.0, 0)", "if cfg.top_p == 1.0"),
    ("wiring: raw log-probs always", SCRIPT, "if (cfg.top_p, cfg.top_k) == (1.0, 0)", "if False"),
    ("wiring: the end of a ChatML turn does not stop a completion", SCRIPT,
     "[] if turn_end is None else [turn_end]", "[]"),
    ("wiring: vLLM ignores the seed", SCRIPT, "dtype=cfg.dtype, seed=cfg.seed,", "dtype=cfg.dtype, seed=0,"),
    ("wiring: vLLM has no room for the prompt", SCRIPT,
     "max_model_len=cfg.max_prompt + cfg.max_tokens", "max_model_len=cfg.max_tokens"),
    ("wiring: samples of an evaluation are left out of the largest call", "runtime/memory.py",
     "cfg.eval_size * max(cfg.eval_n, 1)", "cfg.eval_size"),
    ("wiring: vLLM's share of the GPU is a constant", SCRIPT,
     "gpu_memory_utilization=cfg.vllm_memory", "gpu_memory_utilization=0.9"),
    ("wiring: --rollout samples in training only", SCRIPT,
     "examples, sampler(cfg.rollout), score", "examples, rollout, score"),
    ("wiring: the policy ignores the temperature", SCRIPT,
     'TokenLogps(model, cfg.temperature, fuse=cfg.compile == "on"),',
     'TokenLogps(model, fuse=cfg.compile == "on"),'),
    ("wiring: the reference is not compiled", SCRIPT,
     'return TokenLogps(model, cfg.temperature, fuse=cfg.compile == "on")',
     "return TokenLogps(model, cfg.temperature)"),
    ("wiring: weight decay ignored", SCRIPT, "weight_decay=cfg.weight_decay", "weight_decay=0.0"),
    ("wiring: beta2 ignored", SCRIPT, "betas=(0.9, cfg.beta2)", "betas=(0.9, 0.999)"),
    ("wiring: activations are never recomputed", SCRIPT, 'if cfg.checkpointing == "on":', "if False:"),
    ("wiring: gradients of packs are summed in bfloat16", SCRIPT,
     '"data_types": {"grad_accum_dtype": "fp32"}', '"data_types": {"grad_accum_dtype": "bf16"}'),
    ("wiring: DeepSpeed has buckets of its own size", SCRIPT, ', "reduce_bucket_size": memory.BUCKET', ""),
    ("wiring: the seed of the adapters is a constant", SCRIPT,
     "torch.manual_seed(cfg.seed)", "torch.manual_seed(0)"),
    ("wiring: the order of the examples ignores the seed", SCRIPT,
     "draw, cfg.prompts, cfg.seed,", "draw, cfg.prompts, 0,"),
    ("wiring: eps of the advantage is a constant", SCRIPT,
     "cfg.scale, cfg.eps, running_mean", "cfg.scale, 1e-4, running_mean"),
    ("wiring: --timeout ignored", SCRIPT,
     "dist.init_process_group(cfg.timeout)", "dist.init_process_group()"),
    ("wiring: warm-up begins at 0", SCRIPT, "(step + 1) / max(1, cfg.warmup)", "step / max(1, cfg.warmup)"),
    ("wiring: no checkpoint at the end", SCRIPT,
     "if step == cfg.steps or cfg.save_every and", "if cfg.save_every and"),
    ("wiring: no evaluation at the end", SCRIPT,
     "if step % cfg.eval_every == 0 or step == cfg.steps:", "if step % cfg.eval_every == 0:"),
    ("wiring: packs of another size", SCRIPT, "budget=cfg.pack_tokens)", "budget=4096)"),
    ("wiring: the examples held out of a file ignore the seed", "data.py",
     'epoch_order(len(train_set), cfg.seed, "held out")', 'epoch_order(len(train_set), 0, "held out")'),
    ("wiring: question and answer swapped in evaluation files", "data.py",
     "{} if source in TASKS else keys", '{} if source in TASKS else keys | {"answer_key": ""}'),
    ("wiring: --eval_size holds for the task's own set only", "data.py",
     '"test", size=cfg.eval_size, **', '"test", size=0, **'),
    ("wiring: rewards ignore the mode of overlong", EVALUATION, "overlong=cfg.overlong,", 'overlong="soft",'),
    ("wiring: rewards ignore the buffer of overlong", EVALUATION,
     "math.ceil(cfg.overlong_buffer * cfg.max_tokens) or None", "None"),
    ("wiring: the preset's penalty has another weight", "runtime/preflight.py",
     'f"{spec},overlong:1"', 'f"{spec},overlong:0.1"'),
    ("wiring: random rewards ignore the seed", EVALUATION, "random_seed=cfg.seed", "random_seed=0"),
    ("wiring: --reward_timeout ignored", EVALUATION, "timeout=cfg.reward_timeout", "timeout=5.0"),
    ("wiring: rewards get text with the chat template", EVALUATION,
     'messages=cfg.template == "chat"', "messages=False"),
    ("wiring: programs run without isolation", EVALUATION,
     "allow_unsafe_code=cfg.allow_unsafe_code", "allow_unsafe_code=True"),
    ("wiring: the judge's model ignored", EVALUATION, "judge_model=cfg.judge_model", 'judge_model=""'),
    ("wiring: rewards have the longest prompt as limit", EVALUATION,
     "max_tokens=cfg.max_tokens,", "max_tokens=cfg.max_prompt,"),
    ("wiring: --keep ignored", CHECKPOINT,
     "expired(self.folder, self.cfg.keep,", "expired(self.folder, 2,"),
    ("wiring: --wandb online for offline", "runtime/log.py",
     "mode=cfg.wandb, config", 'mode="online", config'),
    ("wiring: --keep_rollouts ignored", TOKENS, "math.ceil(cfg.keep_rollouts / cfg.samples)", "64"),
    ("wiring: a resumed run may have another seed", FOLDER,
     '"judge_url", "data"', '"judge_url", "seed", "data"'),
    ("wiring: a resumed run may have another dtype", FOLDER,
     '"memory_gb", "tp"}', '"memory_gb", "tp", "dtype"}'),
    ("wiring: a resumed run may not have another --keep", FOLDER, '"save_every", "keep",', '"save_every",'),
    ("wiring: transformers runs a model's code without being told to", "runtime/engines.py",
     "trust_remote_code=cfg.trust_remote_code)", "trust_remote_code=True)"),
    ("precision: logits of the head stay in bfloat16", HEAD,
     "F.linear(hidden, weight).float()", "F.linear(hidden, weight)"),
    ("precision: the gradient is summed over the chunks in bfloat16", HEAD,
     "torch.zeros_like(hidden, dtype=torch.float32)", "torch.zeros_like(hidden)"),
    ("precision: chunks are combined in bfloat16", HEAD,
     "norms, entropies = torch.stack(norms, -1), torch.stack(entropies, -1)",
     "norms, entropies = (torch.stack(x, -1).to(hidden.dtype).float() for x in (norms, entropies))"),
    ("precision: advantages in bfloat16", SCRIPT,
     "(r.advantages for r in rollouts), np.float64)[sampled].to(weight)",
     "(r.advantages for r in rollouts), np.float64)[sampled].bfloat16().to(weight)"),
    ("precision: log-probs of vLLM in half precision", SCRIPT,
     "(r.vllm_logps for r in rollouts), np.float64)[sampled].to(weight)",
     "(r.vllm_logps for r in rollouts), np.float64)[sampled].half().to(weight)"),
    ("precision: weights in half precision", SCRIPT,
     "weight = torch.tensor([r.weight for r in rollouts])[sequence_ids]",
     "weight = torch.tensor([r.weight for r in rollouts]).half().float()[sequence_ids]"),
    ("precision: counts over the ranks in float32", "runtime/dist.py",
     "torch.tensor(values, dtype=torch.float64)", "torch.tensor(values, dtype=torch.float32)"),
    ("precision: rewards in half precision", CREDIT,
     ".view(-1, cfg.samples * K)", ".half().float().view(-1, cfg.samples * K)"),
    ("by_hand: drawing ends when one rank has enough groups", SCRIPT,
     "if len(kept) == cfg.prompts:", "if len(groups) >= share:"),
    ("by_hand: drawing goes on when there are exactly enough groups", SCRIPT,
     "if len(kept) == cfg.prompts:", "if len(groups) > cfg.prompts:"),
    ("by_hand: the last groups are kept", SCRIPT,
     "(list(groups)))[:cfg.prompts]", "(list(groups)))[-cfg.prompts:]"),
    ("by_hand: a tool's output counts in the length that advantages are freed of", SCRIPT,
     "lambda r: [r.length] * max(1, len(r.steps))", "lambda r: [len(r.completion)] * max(1, len(r.steps))"),
    ("by_hand: a tool's output counts in completion/length", "runtime/log.py",
     "(r.reward, r.length, r.truncated, r.parts)", "(r.reward, len(r.completion), r.truncated, r.parts)"),
    ("by_hand: a tool's output counts in eval/length", STATS,
     '"length": rollout.length', '"length": len(rollout.completion)'),
    ("by_hand: a mismatch of NaN is accepted", "runtime/guard.py",
     "if not mismatch <= mismatch_bound:", "if mismatch > mismatch_bound:"),
    ("by_hand: an infinite loss is accepted", "runtime/guard.py",
     'not math.isfinite(metrics["loss"])', 'math.isnan(metrics["loss"])'),
    ("by_hand: skipped steps are forgotten after each batch", SCRIPT,
     "guard.count_skipped(progress.skipped,", "guard.count_skipped(0,"),
    ("by_hand: a step that was taken does not end a row of skipped ones", "runtime/guard.py",
     'in_a_row + 1 if metrics["skipped"] else 0', 'in_a_row + 1 if metrics["skipped"] else in_a_row'),
    ("by_hand: two beginning-of-sequence tokens", "data.py",
     'tokenizer(text, add_special_tokens=False)["input_ids"]', 'tokenizer(text)["input_ids"]'),
    ("by_hand: a beginning of sequence before the answer to a budget", EVALUATION,
     "tokenizer.encode(opener, add_special_tokens=False)", "tokenizer.encode(opener)"),
    ("by_hand: the passes of further epochs are not counted", "runtime/log.py", "3 * cfg.epochs +", "3 +"),
    ("by_hand: the pass of the old log-probs is not counted", "runtime/log.py",
     " + (cfg.epochs * cfg.minibatches > 1)", ""),
    ("by_hand: the pass of the reference is not counted", "runtime/log.py",
     "    if cfg.kl_coef:", "    if False:"),
    ("by_hand: rollouts without a gradient count in mfu", "runtime/log.py",
     "for r in group if r.weight]", "for r in group]"),
    ("by_hand: the plan has no fp32 copy of a bucket", "runtime/memory.py",
     "buckets = (size + 4) *", "buckets = size *"),
    ("by_hand: the plan has no buffer of offload", "runtime/memory.py",
     "offload_buffer = largest * size * offload", "offload_buffer = 0"),
    ("by_hand: before and after swapped in the table", REPORT,
     "accuracy(runs, 0), accuracy(runs, -1)", "accuracy(runs, -1), accuracy(runs, 0)"),
    ("by_hand: the best evaluation for the last one", REPORT,
     "fmean(of[at] for of in evals)", "fmean(of[0] if at == 0 else max(of) for of in evals)"),
    ("by_hand: before and after swapped in the questions", REPORT,
     "for step in (steps[0], steps[-1]))", "for step in (steps[-1], steps[0]))"),
    ("by_hand: the questions of the second evaluation instead of the last", REPORT,
     "for step in (steps[0], steps[-1]))", "for step in (steps[0], steps[1]))"),
]


def faulty_text(file, old, new):
    """The text of a file with the fault. Exits if the text to replace does not occur exactly once."""
    text = (ROOT / file).read_text()
    if text.count(old) != 1:
        sys.exit(f"{text.count(old)} times in {file}, must be once: {old}")
    return text.replace(old, new)


def copy(folder, patterns=COPIED):
    """Copies what the tests need into a folder."""
    for pattern in patterns:
        for path in ROOT.glob(pattern):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def plant(folder, file, old, new):
    """A copy, in a folder, of what the tests need, with one fault."""
    copy(folder)
    (folder / file).write_text(faulty_text(file, old, new))


def import_libraries():
    """Once for all forked children."""
    os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork
    sys.dont_write_bytecode = True
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import tyro  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: F401
    from vllm import SamplingParams  # noqa: F401


class FirstFailure:
    """A pytest plugin. `name`: the first test that fails, or that a file could not be collected."""

    def __init__(self):
        self.name = ""

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report):
        if report.failed:
            self.name = "cannot be collected"


def caught_by(folder, topic="", stages=STAGES):
    """The first failing test of a copy, "" if all pass. The output of the last stage is <folder>/log.

    A stage with a test file named after the topic runs first. Each has a process of its own: DeepSpeed makes
    its groups once per process.
    """
    stages = sorted(stages, key=lambda stage: f"tests/test_{topic}.py" not in stage)
    return next(filter(None, (first_failure(folder, stage) for stage in stages)), "")


def first_failure(folder, arguments, cores=None, limit=math.inf):
    """The first failing test of a copy, "" if all pass. Runs pytest with these arguments in a forked child,
    on these cores if they are given, for at most `limit` seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        os.sched_setaffinity(0, cores or os.sched_getaffinity(0))
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        libraries = [p for p in sys.path if not p.startswith(str(ROOT)) or "site-packages" in p]
        sys.path[:] = [str(folder / "tests"), str(folder), *libraries]
        import pytest
        first = FirstFailure()
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:cov"]
        code = pytest.main([*options, *arguments], plugins=[first])
        os.write(writing, (first.name or ("" if code == 0 else f"pytest ended with {int(code)}")).encode())
        os._exit(0)
    os.close(writing)
    begin = time.monotonic()
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() - begin > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "does not end"
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests left
    with os.fdopen(reading) as pipe:
        return pipe.read()


def main(words):
    for _, *fault in FAULTS:
        compile(faulty_text(*fault), fault[0], "exec")
    if words == "--dry":
        sys.exit()
    import_libraries()
    begin, missed = time.time(), 0
    faults = [fault for fault in FAULTS if words in fault[0]]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for i, (_, *fault) in enumerate(faults):
            plant(folder / str(i), *fault)
        if not words:
            plant(folder / "plain", SCRIPT, "import torch\n", "import torch\n")
            if name := caught_by(folder / "plain"):
                sys.exit(f"without any fault: {name}\n" + (folder / "plain/log").read_text()[-3000:])
        print("| fault | caught by |\n|---|---|")
        for i, (what, *_) in enumerate(faults):
            name = caught_by(folder / str(i), topic=what.partition(":")[0])
            missed += "::" not in name
            print(f"| {what} | {f'`{name}`' if name else '**nothing**'} |", flush=True)
            if words or name and "::" not in name:
                print((folder / f"{i}/log").read_text()[-3000:], file=sys.stderr)
    print(f"\n{len(faults) - missed} of {len(faults)} caught, {time.time() - begin:.0f} s")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
