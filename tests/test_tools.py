"""Completions with a tool's output in them: examples/python_tool.py in the real vLLM.

The bundled model does not know the markers <python> and </python>. It writes `<think>14+2=16` by
itself: with the markers "<think>" and "=", each `=` is a call of the program before it, and a turn
ends there.
"""
import sys
from collections import Counter
from itertools import groupby

import pytest
import torch

import data
import nano_rlvr as nr
import python_tool
import tool_model
from conftest import close, fixed_rollouts, make_config, naive_logps, read_rows
from runtime import guard
from runtime.dist import RunError
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


def sample(llm, prompts, n=4, temperature=1.0, max_tokens=MAX_TOKENS, seeds=SEEDS):
    return python_tool.python_rollout(llm, prompts, n, temperature, max_tokens, seeds)


def segments(r):
    """(sampled, ids) of each run of sampled tokens or of output."""
    tokens = iter(r.completion)
    return [(sampled, [next(tokens) for _ in run]) for sampled, run in groupby(r.sampled)]


def turns(r):
    """The turns of a Rollout: (context, sampled ids, log-probs)."""
    end = 0
    for sampled, ids in segments(r):
        start, end = end, end + len(ids)
        if sampled:
            yield (*r.prompt, *r.completion[:start]), tuple(ids), tuple(r.vllm_logps[start:end])


# ---- 1. tokens


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
        batch = nr.collate([r])
        assert batch.input_ids[0].tolist() == r.prompt + r.completion
        assert batch.targets.tolist() == [token for _, ids, _ in turns(r) for token in ids]
        assert batch.lengths.tolist() == [r.length] == [len(batch.targets)]
        assert r.text == decode(r.completion, skip_special_tokens=True)
        if not all(r.sampled):
            call, output, *_ = (decode(ids) for _, ids in segments(r))
            program = call.removeprefix("<think>").removesuffix("=")
            assert output == f"<output>[{program}]</output>"


def test_every_rank_makes_the_same_number_of_calls(llm, prompts, requests):
    sample(llm, prompts)  # nobody writes </python>
    assert [len(call) for call in requests] == [24, *[0] * python_tool.CALLS]


def test_a_token_in_which_the_marker_ends_is_kept_whole(llm, prompts, monkeypatch, tokenizer):
    monkeypatch.setattr(python_tool, "CLOSE", "</thi")  # inside the token </think>
    token = tokenizer.convert_tokens_to_ids("</think>")
    for r in sample(llm, prompts[:2], max_tokens=2 * MAX_TOKENS, seeds=SEEDS[:2]):
        (_, call), (_, output), *_ = segments(r)
        assert call[-1] == token and tokenizer.decode(output).startswith("<output>")


# ---- 2. limits, seeds


@pytest.mark.parametrize("max_tokens", [9, 40])
def test_sampled_tokens_and_output_together_are_at_most_max_tokens(llm, prompts, calls, max_tokens):
    for r in sample(llm, prompts, max_tokens=max_tokens):
        n = len(r.completion)
        assert n == len(r.sampled) == len(r.vllm_logps) == len(r.advantages) <= max_tokens
        assert r.sampled[-1]  # output that nothing follows would be of no use
        assert r.truncated == (r.completion[-1] != llm.get_tokenizer().eos_token_id)
        assert len(list(turns(r))) <= 1 + python_tool.CALLS
        assert all(x == 0.0 for x, sampled in zip(r.vllm_logps, r.sampled) if not sampled)


def test_turns_are_functions_of_seeds_that_differ_between_samples_and_turns(
        llm, prompts, calls, monkeypatch):
    used, rollout = [], python_tool.rollout
    monkeypatch.setattr(python_tool, "rollout", lambda *args, **sampling: (
        used.append(args[5]) or rollout(*args, **sampling)))
    plain = nr.rollout(llm, prompts, 4, 1.0, MAX_TOKENS, SEEDS)
    once, again, other = (sample(llm, prompts, seeds=[seed + more for seed in SEEDS])
                          for more in (0, 0, 100))
    assert [r.completion for r in once] == [r.completion for r in again]
    assert [r.completion for r in once] != [r.completion for r in other]
    for a, b in zip(plain, once):  # the first turn is that of plain sampling
        first = segments(b)[0][1]
        assert a.completion[:len(first)] == first
    later = sum(used[1:1 + python_tool.CALLS], [])
    assert used[0] == SEEDS and used[2] and len(set(later)) == len(later) > 6
    greedy, same = (sample(llm, prompts, 1, 0.0, seeds=None) for _ in range(2))
    assert [r.completion for r in greedy] == [r.completion for r in same]
    assert not all(all(r.sampled) for r in greedy)


# ---- 3. programs


@pytest.mark.parametrize("program, output", [
    ("print('a')\n\nprint('b')  ", "a\nb"),
    ("while True: pass", python_tool.NO_RESULT),
    ("print('x' * 30_000_000)", python_tool.NO_RESULT),
    ("print('é' * 3_000_000)", "é" * python_tool.CHARACTERS),
    ("14+2=16", "SyntaxError: "),
    ("print(1)\nraise SystemExit(3)", "1\nSystemExit: 3"),
    ("\ud83d", "SyntaxError: "),
])
def test_a_program_that_fails_is_output_and_not_an_error(monkeypatch, program, output):
    monkeypatch.setattr(python_tool, "SECONDS", 0.5 if "while" in program else 10.0)
    got = python_tool.run_python(program)
    assert got.startswith(output) if output.endswith(": ") else got == output
    assert len(got) <= python_tool.CHARACTERS


def test_a_call_is_the_text_between_the_last_opening_marker_and_the_closing_one():
    of = python_tool.called_program
    assert of("<python> or <python>print(1)</python>\n") == "print(1)"
    assert of("print(1)</python>") == "print(1)"  # no opening marker: all of it
    assert of("<python>print(1)") is None
    assert python_tool.tool_calls(["a", "<python>1</python><output></output>2</python>"]) == [0, 2]


# ---- 4. functions of a user


@pytest.fixture
def user(llm, prompts, tmp_path):
    """user(body of a function, its parameters): what --rollout samples for 2 prompts, 2 each."""
    def call(body, parameters="llm, prompts, n, temperature, max_tokens, seeds=None, **sampling"):
        file = tmp_path / f"mine{len(list(tmp_path.iterdir()))}.py"
        file.write_text("import math\nfrom nano_rlvr import Rollout, rollout\n"
                        f"def mine({parameters}):\n    {body}\n")
        mine = nr.rollout_function(f"{file}:mine")
        return mine(llm, prompts[:2], 2, 1.0, 8, SEEDS[:2], top_p=1.0)
    return call


SAMPLE = "rs = rollout(llm, prompts, n, temperature, max_tokens, seeds, **sampling); "


@pytest.mark.parametrize("body, says", [
    ("return None", "it must return a list of 2 Rollouts for each of 2 prompts, not None"),
    ("return rs[:3]", "it must return a list of 2"),
    ("return [vars(r) for r in rs]", "Rollout 0 does not fit: it is {'prompt': .*, not a Rollout"),
    ("return [rs[i] for i in (0, 2, 1, 3)]", "Rollout 1 does not fit: it has another prompt"),
    *((f"rs[2].completion[3] = {x}", f"Rollout 2 .* a token has id {x}, .* an int below 263")
      for x in ("263", "-1", "True")),
    *((f"rs[3].vllm_logps[1] = float('{x}')", f"Rollout 3 .* log-prob {x}, .* finite and at most 0")
      for x in ("nan", "-inf", "0.5")),
    ("rs[0].sampled[0] = 2", "Rollout 0 .* sampled 2; .* a bool"),
    ("rs[3].vllm_logps += [-1.0]", "Rollout 3 .* must be lists of one length"),
    ("rs[0].sampled = [False] * len(rs[0].sampled)", "Rollout 0 .* no token of it is sampled"),
    ("raise KeyError('the\\nserver')", "KeyError: 'the.*server' .line 4.$"),
    ("raise SystemExit(0)", "SystemExit: 0 .line 4.$"),
    ("rollout(llm, [[1] * 999], 1, 1.0, 8)", "VLLM.*: .* 999 .*.line 4.$"),  # too long
])
def test_a_function_that_fails_or_returns_what_does_not_fit_is_named_in_one_line(user, body, says):
    with pytest.raises(RunError, match=f"^--rollout .*mine0.py:mine: {says}") as e:
        user(f"{SAMPLE}{body}" if "return" in body else f"{SAMPLE}{body}; return rs")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("parameters, says", [
    ("llm, prompts, n, temperature, max_tokens, seeds=None", "unexpected keyword argument 'top_p'"),
    ("llm, prompts, n, temperature, max_tokens, seeds, **sampling", "required argument: 'seeds'"),
])
def test_a_function_that_cannot_be_called_is_refused_before_anything_is_loaded(
        user, parameters, says):
    with pytest.raises(ValueError, match=f"^--rollout .*mine0.py:mine: .*{says}"):
        user("raise SystemExit", parameters)


def test_a_failed_sync_and_a_full_device_are_not_blamed_on_the_user(user):
    for error in ("RunError('lost')", "RuntimeError('out of memory')"):
        with pytest.raises(RuntimeError, match="^(lost|out of memory)$"):
            user(f"from runtime.dist import RunError; raise {error}")
    metrics = {"mismatch/mean_abs": 0.2, "loss": 0.0}
    for spec, says in (("a.py:f", "--rollout a.py:f returned other ids"), ("", "vLLM has other")):
        with pytest.raises(RunError, match=f"Either {says}"):
            guard.check_step(metrics, 0.1, spec)


# ---- 5. the model of the example


def test_the_example_model_learns_its_calls_but_not_the_output(tmp_path, monkeypatch):
    batches, collate = [], nr.collate
    monkeypatch.setattr(nr, "collate", lambda rs: batches.append(rs) or collate(rs))
    monkeypatch.setattr(sys, "argv", ["tool_model.py", "--out", str(tmp_path), "--steps", "1"])
    tool_model.main()
    tokenizer = tool_model.make_tokenizer()
    tokenizer.add_tokens(tool_model.TAGS)
    called = [r for r in batches[0] if not all(r.sampled)]
    assert 0 < len(called) < len(batches[0])
    for r in called:
        question = tokenizer.decode(r.prompt[1:-1])
        value = eval(question)
        assert [tokenizer.decode(ids) for _, ids in segments(r)] == [
            f"<python>print({question})</python>", f"<output>{value}</output>",
            f"<answer>{value}</answer><|endoftext|>"]
    train, test = ({row["question"] for row in read_rows(tmp_path / f"{split}.jsonl")}
                   for split in ("train", "test"))
    assert not (train | {tokenizer.decode(r.prompt[1:-1]) for r in batches[0]}) & test


# ---- 6. training


@pytest.mark.numeric
def test_the_gradient_is_that_of_the_sampled_tokens_one_sequence_at_a_time(in_float64, tokenizer):
    """GRPO: the mean over sequences of the mean over their sampled tokens."""
    rollouts, noise = fixed_rollouts(tokenizer), torch.Generator().manual_seed(0)
    for r in rollouts:  # about a third of the tokens is output, not always before the last one
        n = len(r.completion)
        runs = torch.rand(n // 4 + 1, generator=noise).gt(0.33).repeat_interleave(4)[:n].tolist()
        r.sampled = [True, *runs[1:]]
    assert not all(r.sampled[-1] for r in rollouts)
    cfg = make_config(correction="none", kl_coef=0.0)
    ours, naive = nr.TokenLogps(load_model(cfg)), load_model(cfg)
    batch = nr.collate(nr.assign_token_weights(rollouts, cfg))
    nr.policy_loss(ours(batch)[0], None, None, batch, cfg)[0].backward()
    naive.set_attn_implementation("eager")
    for r in rollouts:
        logp, _ = naive_logps(naive, r)  # (R,)
        (-r.advantages[0] * logp[torch.tensor(r.sampled)].mean() / len(rollouts)).backward()
    for p, q in zip(ours.model.parameters(), naive.parameters(), strict=True):
        close(p.grad, q.grad)
    for r in rollouts:  # what is stored for the output changes nothing
        for values, stored in ((r.vllm_logps, -99.0), (r.advantages, 99.0)):
            values[:] = [x if sampled else stored for x, sampled in zip(values, r.sampled)]
    for name, x in vars(nr.collate(rollouts)).items():
        assert x is None or torch.as_tensor(x).equal(torch.as_tensor(vars(batch)[name])), name
