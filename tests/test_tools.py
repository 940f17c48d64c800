"""Completions with a tool's output in them: examples/python_tool.py in the real vLLM.

The bundled model does not know the markers <python> and </python>. It writes `<think>14+2=16` by
itself: with the markers "<think>" and "=", each `=` is a call of the program before it, and a turn
ends there."""
import sys
from collections import Counter
from itertools import groupby
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import data
import nano_rlvr as nr
from conftest import close, fixed_rollouts, judged, make_config, naive_logps
from examples import python_tool, tool_model
from runtime import evaluation, guard
from runtime.messages import RunError
from runtime.model import load_model

MAX_TOKENS = 96
SEEDS = [data.request_seed(i) for i in range(6)]


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """Token ids of 6 questions of 3 terms, all of the same length."""
    short = [e for e in data.load("arithmetic", "test", 500) if e["terms"] == 3]
    return [data.encode(e, tokenizer, "chat") for e in short if len(e["question"]) == 8][:6]


@pytest.fixture
def calls(monkeypatch):
    """The bundled model calls at each `=`. The output is "[program]", without a jail."""
    monkeypatch.setattr(python_tool, "OPEN", "<think>")
    monkeypatch.setattr(python_tool, "CLOSE", "=")
    monkeypatch.setattr(python_tool, "run_python", "[{}]".format)


@pytest.fixture
def requests(llm, monkeypatch):
    """What vLLM was given and returned, a list per call: (context, sampled ids, log-probs)."""
    recorded, generate = [], llm.generate

    def record(*args, **kwargs):
        results = generate(*args, **kwargs)
        recorded.append([
            (tuple(result.prompt_token_ids), tuple(s.token_ids), tuple(s.logprobs.logprobs))
            for result in results for s in result.outputs])
        return results
    monkeypatch.setattr(llm, "generate", record)
    return recorded


def sample(llm, prompts, max_tokens=MAX_TOKENS):
    return python_tool.python_rollout(llm, prompts, 4, 1.0, max_tokens, SEEDS)


def segments(r):
    """(sampled, ids) of each run of sampled tokens or of output."""
    tokens = iter(r.completion)
    return [(sampled, [next(tokens) for _ in run]) for sampled, run in groupby(r.loss_mask)]


def turns(r):
    """The turns of a Rollout: (context, sampled ids, log-probs)."""
    end = 0
    for sampled, ids in segments(r):
        start, end = end, end + len(ids)
        if sampled:
            yield (*r.prompt, *r.completion[:start]), tuple(ids), tuple(r.vllm_logps[start:end])


def test_the_ids_trained_are_the_ids_sampled_and_the_output_stands_after_its_call(
        llm, prompts, calls, requests):
    rollouts = sample(llm, prompts)
    decode = llm.get_tokenizer().decode
    assert max(len(list(turns(r))) for r in rollouts) >= 3
    sampled = Counter((context, ids[:room], logps[:room]) for call in requests
                      for context, ids, logps in call
                      for room in [len(prompts[0]) + MAX_TOKENS - len(context)])
    assert sampled == Counter(turn for r in rollouts for turn in turns(r))
    for r in rollouts:
        targets = nr.collate([r]).targets.tolist()
        assert targets == [token for _, ids, _ in turns(r) for token in ids]
        assert [r.text] == data.completion_texts([r], llm.get_tokenizer())
        if not all(r.loss_mask):
            call, output, *_ = (decode(ids) for _, ids in segments(r))
            program = call.removeprefix("<think>").removesuffix("=")
            assert output == f"<output>[{program}]</output>"


def test_every_rank_makes_the_same_number_of_calls(llm, prompts, requests):
    sample(llm, prompts)  # nobody writes </python>
    assert [len(call) for call in requests] == [24, *[0] * python_tool.CALLS]


@pytest.mark.parametrize("max_tokens", [9, 40])
def test_sampled_tokens_and_output_together_are_at_most_max_tokens(llm, prompts, calls, max_tokens):
    for r in sample(llm, prompts, max_tokens=max_tokens):
        n = len(r.completion)
        assert n == len(r.loss_mask) == len(r.vllm_logps) == len(r.advantages) <= max_tokens
        assert r.loss_mask[-1]  # output that nothing follows would be of no use
        assert r.truncated == (r.completion[-1] != llm.get_tokenizer().eos_token_id)


def test_turns_are_functions_of_seeds_that_differ_between_samples_and_turns(
        llm, prompts, calls, monkeypatch):
    used, rollout = [], python_tool.rollout
    monkeypatch.setattr(python_tool, "rollout", lambda *args, **sampling: (
        used.append(args[5]) or rollout(*args, **sampling)))
    once, again = (sample(llm, prompts) for _ in range(2))
    assert [r.completion for r in once] == [r.completion for r in again]
    later = sum(used[1:1 + python_tool.CALLS], [])
    assert used[0] == SEEDS and used[2] and len(set(later)) == len(later) > 6


@pytest.mark.parametrize("program, output", [
    ("while True: pass", python_tool.NO_RESULT),
    ("print('é' * 3_000_000)", "é" * python_tool.CHARACTERS),
    ("print(1)\n\nraise SystemExit(3)  ", "1\nSystemExit: 3"),
])
def test_a_program_that_fails_is_output_and_not_an_error(monkeypatch, program, output):
    monkeypatch.setattr(python_tool, "SECONDS", 0.5 if "while" in program else 10.0)
    assert python_tool.run_python(program) == output


# ---- functions of a user


@pytest.fixture
def user(llm, prompts, tmp_path):
    """user(body of a function): what --rollout samples for 2 prompts, 2 each."""
    def call(body):
        file = tmp_path / "mine.py"
        file.write_text("from runtime.messages import RunError\nfrom nano_rlvr import rollout\n"
                        "def mine(llm, prompts, n, temperature, max_tokens, seeds=None, **more):\n"
                        f"    {body}\n")
        mine = guard.load_rollout(f"{file}:mine")
        return mine(llm, prompts[:2], 2, 1.0, 8, SEEDS[:2], top_p=1.0)
    return call


SAMPLE = "rs = rollout(llm, prompts, n, temperature, max_tokens, seeds, **more); "


@pytest.mark.parametrize("body, says", [
    ("return None", "it must return a list of 2 Rollouts for each of 2 prompts, not None"),
    ("return [rs[i] for i in (0, 2, 1, 3)]", "Rollout 1 .* not in the order of the prompts"),
    ("rs[2].completion[3] = 263", "Rollout 2 .* a token has id 263, .* an int below 263"),
    ("rs[3].vllm_logps[1] = float('nan')", "Rollout 3 .* log-prob nan, .* finite and at most 0"),
    ("rs[3].vllm_logps[1] = 0.5", "Rollout 3 .* log-prob 0.5, .* finite and at most 0"),
    ("rs[1].text = None", "Rollout 1 .* without text"),
    ("rs[3].vllm_logps += [-1.0]", "Rollout 3 .* not lists of one length"),
    ("rs = rollout(llm, prompts, n, 1.0, 99, seeds, ignore_eos=True)", "Rollout 0 .* --max_tokens"),
    ("rs[3].vllm_logps = None", "Rollout 3 .* not lists of one length"),
    ("rs[0].loss_mask = [False] * len(rs[0].loss_mask)", "Rollout 0 .* no token is sampled"),
    ("raise KeyError('the\\nserver')", "KeyError: 'the.*server' .line 4.$"),
    ("rollout(llm, [[1] * 999], 1, 1.0, 8)", "VLLM.*: .* 999 .*.line 4.$"),  # too long
])
def test_a_function_that_fails_or_returns_what_does_not_fit_is_named_in_one_line(user, body, says):
    with pytest.raises(RunError, match=f"^--rollout .*mine.py:mine: {says}") as e:
        user(f"{SAMPLE}{body}" if "return" in body else f"{SAMPLE}{body}; return rs")
    assert "\n" not in str(e.value)


def test_a_failed_sync_and_a_full_device_are_not_blamed_on_the_user(user):
    for error in ("RunError('lost')", "RuntimeError('out of memory')"):
        with pytest.raises(RuntimeError, match="^(lost|out of memory)$"):
            user(f"raise {error}")


@pytest.mark.parametrize("arguments", [
    "temperature, seeds=None, **s", "temperature, max_tokens, seeds, **s",
    "temperature, max_tokens, *, seeds=None, **s", "temperature, max_tokens, seeds=None"])
def test_a_function_with_other_arguments_is_refused_before_a_model_is_loaded(tmp_path, arguments):
    (tmp_path / "mine.py").write_text(f"def mine(llm, prompts, n, {arguments}): ...")
    with pytest.raises(ValueError, match=r"^--rollout .*mine\.py:mine: .*argument"):
        guard.load_rollout(f"{tmp_path}/mine.py:mine")


def test_the_example_model_learns_its_calls_but_not_the_output(tmp_path, monkeypatch):
    packs, collate = [], nr.collate
    monkeypatch.setattr(
        nr, "collate", lambda rs, *device: packs.append(rs) or collate(rs, *device))
    monkeypatch.setattr(sys, "argv", ["tool_model.py", "--out", str(tmp_path), "--steps", "1"])
    tool_model.main()
    tokenizer = tool_model.make_tokenizer()
    tokenizer.add_tokens(tool_model.TAGS)
    called = [r for r in packs[0] if not all(r.loss_mask)]
    assert 0 < len(called) < len(packs[0])
    for r in called:
        question = tokenizer.decode(r.prompt[1:-1])
        assert [tokenizer.decode(ids) for _, ids in segments(r)] == [
            f"<python>print({question})</python>", f"<output>{eval(question)}</output>",
            f"<answer>{eval(question)}</answer><|endoftext|>"]


@pytest.mark.numeric
def test_the_gradient_is_that_of_the_sampled_tokens_one_sequence_at_a_time(in_float64, tokenizer):
    """GRPO: the mean over sequences of the mean over their sampled tokens."""
    rollouts, noise = fixed_rollouts(tokenizer), torch.Generator().manual_seed(0)
    for r in rollouts:  # about a third of the tokens is output, not always before the last one
        n = len(r.completion)
        runs = torch.rand(n // 4 + 1, generator=noise).gt(0.33).repeat_interleave(4)[:n].tolist()
        r.loss_mask = [True, *runs[1:]]
        r.extra = {"mine": r.completion}
    cfg = make_config(correction="none", kl_coef=0.0)
    ours, naive = nr.TokenLogps(load_model(cfg)), load_model(cfg)
    pack = nr.collate(nr.assign_token_weights(rollouts, cfg))
    assert pack.extra["mine"].tolist() == pack.targets.tolist()
    nr.policy_loss(ours(pack)[0], None, None, pack, cfg)[0].backward()
    naive.set_attn_implementation("eager")
    for r in rollouts:
        logp, _ = naive_logps(naive, r)  # (R,)
        (-r.advantages[0] * logp[torch.tensor(r.loss_mask)].mean() / len(rollouts)).backward()
    for p, q in zip(ours.model.parameters(), naive.parameters(), strict=True):
        close(p.grad, q.grad)


def test_a_function_with_the_parameter_examples_gets_the_rows_of_its_prompts(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from nano_rlvr import Rollout\n"
        "def mine(llm, prompts, n, temperature, max_tokens, seeds=None, examples=None, **more):\n"
        "    return [Rollout(p, [65], e['answer'], False, [0.0]) for p, e in zip(prompts, examples)"
        " for _ in range(n)]\n")
    llm = MagicMock(**{"llm_engine.model_config.get_vocab_size.return_value": 99})
    rows = [{"question": f"{i}", "answer": f"{i + 1}", "prompt_ids": [i]} for i in range(3)]
    cfg = make_config(rollout=f"{tmp_path}/mine.py:mine", prompts=3, samples=2, eval_n=2)
    texts = judged(lambda texts, columns: [float(x == y) for x, y in zip(texts, columns["answer"])])
    run = SimpleNamespace(cfg=cfg, llm=llm, train_set=rows, eval_set=rows, verifier=texts,
                          metrics={}, rollout=guard.load_rollout(cfg.rollout))
    metrics, _ = evaluation.evaluate(run, nr.score)
    assert (metrics["eval/accuracy"], metrics["eval/mean@2"]) == (1.0, 1.0)
    assert {r.reward for group in nr.sample_groups(run, 0) for r in group} == {1.0}
