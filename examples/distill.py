"""On-policy distillation: the student samples, and a teacher grades each of its tokens.

    python -m examples.distill --teacher runs/x/final --steps 20     flags of nano_rlvr.py work

The advantage of a token is log pi_teacher - log pi_student: the sum over a completion is minus the
KL that the student pays, and each token gets its own share of it, with no reward to wait for
(arXiv:2306.13649 with the reverse KL; arXiv:2306.08543). Rewards are only shown, None as 0.

--teacher_prompt puts a text before the teacher's prompt. Without --teacher, the model then learns
to do without that text (context distillation). Teacher and student share a tokenizer. The teacher
waits in host memory, and the memory plan does not count it.
"""
import argparse
import dataclasses

import nano_rlvr as nr
from runtime import ranks, trainer
from runtime.batch import flatten
from runtime.messages import RunError
from runtime.trainer import on_device


def token_advantages(policy, teacher, rollouts, prefix, cfg):
    """Fills r.advantages with log pi_teacher - log pi_student of each sampled token.

    prefix: token ids that stand before the teacher's prompts. Returns the mean: minus the KL.
    """
    seen = []
    for r in rollouts:
        prompt = prefix + r.prompt
        seen.append(dataclasses.replace(r, prompt=prompt))
    with on_device(teacher):
        theirs = trainer.token_logps(teacher, seen, cfg)
    ours = trainer.token_logps(policy, rollouts, cfg)
    total = 0.0
    for r, a, b in zip(rollouts, theirs, ours):
        gaps = iter([x - y for x, y in zip(a, b)])
        r.advantages = [next(gaps) if sampled else 0.0 for sampled in r.loss_mask]
        total += sum(r.advantages)
        if r.reward is None:
            r.reward = 0.0  # trained without a reward, too
    tokens = sum(r.length for r in rollouts)
    total, tokens = ranks.all_sum(total, tokens)
    return total / max(1, tokens)


def checked_sampler(cfg, name):
    """A Sampler, if the teacher can be read and has the student's tokens. Engines load later."""
    try:
        model = nr.flags.find_model(name or cfg.model)
        of_teacher = nr.load_tokenizer(dataclasses.replace(cfg, model=model))
        of_student = nr.load_tokenizer(cfg)
    except (ValueError, OSError) as e:
        raise RunError(f"--teacher: {e}") from e
    if of_teacher.get_vocab() != of_student.get_vocab():
        raise RunError(f"--teacher {name}: its tokenizer is not that of {cfg.model}")
    return nr.Sampler(cfg)


def train(run, name, text):
    """nano_rlvr's loop with these advantages. name: the teacher, "" = the starting model."""
    model = nr.flags.find_model(name or run.cfg.model)
    cfg = dataclasses.replace(run.cfg, model=model, kl_coef=1.0, lora_rank=0)
    teacher = nr.make_reference(cfg)
    tokenizer = run.llm.get_tokenizer()
    prefix = tokenizer.encode(text, add_special_tokens=False)

    def assign_advantages(groups, cfg, running_mean):
        rollouts = flatten(groups)
        mean = token_advantages(run.policy, teacher, rollouts, prefix, cfg)
        run.metrics["teacher/kl"] = -mean
        return running_mean

    nr.train(run, assign_advantages=assign_advantages)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--teacher", default="")
    parser.add_argument("--teacher_prompt", default="")
    own, argv = parser.parse_known_args()
    nr.main(
        ["--kl_coef", "0", *argv],
        lambda run: train(run, own.teacher, own.teacher_prompt),
        lambda cfg: checked_sampler(cfg, own.teacher))
