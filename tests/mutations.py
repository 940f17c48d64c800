"""Plants faults in a copy of the repository and asks which test notices each: python tests/mutations.py [words of one fault]

A fault is a textual replacement that must be found exactly once, so that the list cannot rot in silence. Each copy runs in a
forked child (torch, TRL and vLLM are imported once, here) and stops at the first test that fails, the quickest tests first.
Prints a Markdown table; exits with 1 if a fault stays unnoticed, or if the copy without a fault fails.
"""
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("pytest.ini", "*.py", "tools/*.py", "tests/*.py", "models/tiny/*")
STAGES = (["tests/test_variants.py", "tests/test_math.py"], ["tests/test_trl.py", "-k", "not gradients_equal"],
          ["tests/test_trl.py", "-k", "gradients_equal"])  # the next one when all pass
FAULTS = [  # what goes wrong, in nano_rlvr.py: this text, becomes that
    ("clip: maximum in place of minimum", "torch.minimum(bounded", "torch.maximum(bounded"),
    ("clip: clip_high ignored", "ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)", "ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_low)"),
    ("clip: delta ignored", "ratio.clamp(max=cfg.delta) if cfg.delta else ratio", "ratio"),
    ("loss: sign of the advantage", "token_loss = -gain", "token_loss = gain"),
    ("loss: mean over the pack in place of the batch", "(batch.weight * token_loss).sum()",
     "(batch.weight / batch.weight.sum() * token_loss).sum()"),
    ("ratio: detached", "ratio = log_ratio.exp()", "ratio = log_ratio.detach().exp()"),
    ("ratio: token and sequence swapped", 'if cfg.ratio != "token":', 'if cfg.ratio == "token":'),
    ("ratio: sum over the sequence in place of its mean", "return (total / batch.completion_lengths)[batch.sequence_ids]", "return total[batch.sequence_ids]"),
    ("ratio: product taken as geometric mean", 'batch.completion_lengths[batch.sequence_ids] if cfg.ratio == "product" else 1', "1"),
    ("cispo: the weight keeps its gradient", ".detach() * batch.advantage * logp", " * batch.advantage * logp"),
    ("sapo: temperatures swapped", "torch.where(batch.advantage > 0, 1.0, 1.05)", "torch.where(batch.advantage > 0, 1.05, 1.0)"),
    ("kl: reversed", "d = ref - logp", "d = logp - ref"),
    ("kl: k3 without exp", "return d.exp() - d - 1", "return -d"),
    ("kl: rewards distance from the reference", "token_loss + cfg.kl_coef *", "token_loss - cfg.kl_coef *"),
    ("kl: the reference is the policy itself", 'annotate(ref, packs, "ref")', 'annotate(engine, packs, "ref")'),
    ("kl: temperature missing in the reference", "requires_grad_(False), cfg.temperature)", "requires_grad_(False))"),
    ("kl: reference reset one step late", "step % cfg.ref_reset_every == 0", "step % cfg.ref_reset_every == 1"),
    ("log-probs: temperature missing", "logits if temperature == 1 else logits.div_(temperature)", "logits"),
    ("log-probs: sign of the entropy", "entropies.append(-inside", "entropies.append(inside"),
    ("log-probs: temperature missing in the derivative", "grad = grad[:, None] / ctx.temperature", "grad = grad[:, None]"),
    ("log-probs: each chunk of the vocabulary for all of it", "(chosen - norm)[:, 0]", "chosen[:, 0] - norms[:, 0]"),
    ("log-probs: entropy without that of the choice of a chunk", "(entropies - share)", "entropies"),
    ("log-probs: a target counts in every chunk", "grad * here", "grad"),
    ("log-probs: derivative without the target", ".scatter_add_(-1, column, grad * here)", ""),
    ("log-probs: sequences of a pack see each other", "zip(pack.row_ends.diff().tolist(), pack.ends.diff().tolist())",
     "[(int(pack.row_ends[-1]), int(pack.ends[-1]))]"),
    ("log-probs: a completion sees its own end", ".tril(n - m)", ".tril(n - m + 1)"),
    ("collate: every completion sees the first prompt", "whole += [*prompt, *completion]", "whole += [*range(len(prompt)), *completion]"),
    ("collate: positions begin again after a shared prompt", "positions += range(known, len(r))", "positions += range(len(r) - known)"),
    ("collate: rows off by one", "[prompt[-1], *completion[:-1]]", "completion"),
    ("collate: end-of-sequence token not trained", 'weight=per_token("weight")',
     'weight=per_token("weight") * (torch.cat([torch.arange(n, 0, -1) for n in sizes]) > 1)'),
    ("advantage: n - 1 for n", "* known).sum(1, keepdim=True) / count.clamp(min=1)).sqrt()",
     "* known).sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()"),
    ("advantage: eps missing", "/ (deviation + eps))", "/ (deviation + 1e-8))"),
    ("advantage: leave-one-out divides by n", "(total - r) / (count - 1).clamp(min=1)", "(total - r) / count.clamp(min=1)"),
    ("advantage: no verdict counts as 0", "known = ~rewards.isnan()", "known = torch.ones_like(rewards, dtype=torch.bool)"),
    ("advantage: length added in place of removed", "advantage = advantage - x *", "advantage = advantage + x *"),
    ("advantage: running baseline moves before it is used", "running = mean if math.isnan(running) else running", "running = mean"),
    ("weight: local counts in place of global ones", "cfg.max_tokens, sequences, tokens)", "cfg.max_tokens)"),
    ("weight: sequence mean divides by max_tokens", "1 / (sequences * n)", "1 / (sequences * max_tokens)"),
    ("weight: truncated completions push in spite of the mask", "if cfg.mask_truncated and r.truncated", "if False and r.truncated"),
    ("correction: inverted", "importance(before - batch.vllm_logps", "importance(batch.vllm_logps - before"),
    ("correction: the cap is a floor", "weight.clamp(max=cfg.correction_cap)", "weight.clamp(min=cfg.correction_cap)"),
    ("correction: token_mask forgets the weight", "inside * weight if", "inside * 1.0 if"),
    ("correction: effective sample size without its square", 'metrics["correction/w"] ** 2', 'metrics["correction/w"]'),
    ("steps: old log-probs only for epochs, not minibatches", "if cfg.epochs * cfg.minibatches > 1:",
     "if cfg.epochs > 1 and cfg.minibatches == 1:"),
    ("steps: every minibatch is the whole batch", "groups[i::cfg.minibatches]", "groups"),
    ("steps: gradient not clipped", '"gradient_clipping": cfg.max_grad_norm', '"gradient_clipping": 0.0'),
    ("steps: learning rate a step ahead", "(1 - cfg.lr_end) * step", "(1 - cfg.lr_end) * (step + 1)"),
    ("steps: AdamW's first beta", "betas=(0.9, cfg.beta2)", "betas=(0.95, cfg.beta2)"),
    ("sampling: flat groups kept", "if not (cfg.drop_flat_groups and flat(g))", "if g"),
    ("sampling: every draw has the same seeds", "request_seed(cfg.seed, step, draw,", "request_seed(cfg.seed, step, 0,"),
    ("sampling: draws of a step overlap the next step's", "step * (1 + cfg.resample) + draw", "step + draw"),
]


def plant(folder, old, new):
    """A copy of what the tests need, with one fault."""
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    text = (folder / "nano_rlvr.py").read_text()
    if text.count(old) != 1:
        sys.exit(f"{text.count(old)} times in nano_rlvr.py, must be once: {old}")
    (folder / "nano_rlvr.py").write_text(text.replace(old, new))


class First:
    """Remembers the first test that fails, and whether anything could not even be collected."""

    def __init__(self):
        self.name = ""

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report):
        if report.failed:
            self.name = "cannot be collected"


def caught_by(folder):
    """The first failing test in a copy, "" if all pass; in a forked child whose output goes to the copy's log."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        sys.path[:] = [str(folder / "tests"), str(folder)] + [p for p in sys.path if not p.startswith(str(ROOT)) or "site-packages" in p]
        import pytest
        first = First()
        for stage in STAGES:
            if not first.name:
                code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *stage], plugins=[first])
                first.name = first.name or ("" if code == 0 else f"pytest ended with {int(code)}")
        os.write(writing, first.name.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def main(words):
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork must not take threads along
    sys.dont_write_bytecode = True
    import datasets  # noqa: F401  once for all children
    import deepspeed  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import tyro  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401
    from vllm import SamplingParams  # noqa: F401
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: F401
    begin, missed = time.time(), 0
    faults = [f for f in FAULTS if words in f[0]]
    with tempfile.TemporaryDirectory() as folder:
        for i, fault in enumerate(faults):
            plant(Path(folder) / str(i), *fault[1:])  # all of them first: a text that is not there must not cost minutes
        if not words:
            plant(Path(folder) / "plain", "import torch\n", "import torch\n")
            if name := caught_by(Path(folder) / "plain"):
                sys.exit(f"without any fault: {name}\n" + (Path(folder) / "plain/log").read_text()[-3000:])
        print("| fault | caught by |\n|---|---|")
        for i, (what, *_) in enumerate(faults):
            name = caught_by(Path(folder) / str(i))
            missed += not name or "::" not in name
            print(f"| {what} | {f'`{name}`' if name else '**nothing**'} |", flush=True)
            if words or name and "::" not in name:
                print((Path(folder) / f"{i}/log").read_text()[-3000:], file=sys.stderr)
    print(f"\n{len(faults) - missed} of {len(faults)} caught, {time.time() - begin:.0f} s")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
