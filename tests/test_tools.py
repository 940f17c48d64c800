"""Completions with a tool's output in them: examples/python_tool.py in the real vLLM, and TRL's mask.

The bundled model does not know the markers <python> and </python>. It writes `<think>14+2=16` by itself: with
the markers "<think>" and "=", each `=` is a call of the program before it, and a turn ends there.
"""
import json
import sys
from collections import Counter
from itertools import cycle, groupby

import pytest
import torch

import data
import nano_rlvr as nr
import test_trl
from conftest import ROOT, close, make_config, within
import runtime.model
from runtime import guard
from runtime.dist import RunError

sys.path.append(str(ROOT / "examples"))
import python_tool  # noqa: E402
import tool_model  # noqa: E402

MAX_TOKENS = 96
SEEDS = [data.request_seed(i) for i in range(6)]


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """Token ids of 6 questions of 3 terms, all of the same length."""
    short = [e for e in data.load("arithmetic", "test", 500) if e["terms"] == 3]
    return [data.encode(e, tokenizer, "chat") for e in short if len(e["question"]) == 8][:6]


@pytest.fixture
def calls(monkeypatch):
    """The bundled model calls at each `=`. The output is "[program]", without the cost of a jail."""
    monkeypatch.setattr(python_tool, "OPEN", "<think>")
    monkeypatch.setattr(python_tool, "CLOSE", "=")
    monkeypatch.setattr(python_tool, "run_python", "[{}]".format)


@pytest.fixture
def requests(llm, monkeypatch):
    """What vLLM was given and returned, one list per call of generate: (context, sampled ids, log-probs)."""
    recorded, generate = [], llm.generate

    def record(*args, **kwargs):
        results = generate(*args, **kwargs)
        recorded.append([(tuple(result.prompt_token_ids), tuple(s.token_ids), tuple(s.logprobs.logprobs))
                         for result in results for s in result.outputs])
        return results
    monkeypatch.setattr(llm, "generate", record)
    return recorded


def turns(r):
    """The turns of a Rollout: (context, sampled ids, log-probs)."""
    end = 0
    for sampled, tokens in groupby(r.sampled):
        start, end = end, end + len(list(tokens))
        if sampled:
            context = (*r.prompt, *r.completion[:start])
            yield context, tuple(r.completion[start:end]), tuple(r.vllm_logps[start:end])


# ---- 1. tokens


def test_the_ids_trained_are_the_ids_sampled(llm, prompts, calls, requests):
    rollouts = python_tool.python_rollout(llm, prompts, 4, 1.0, MAX_TOKENS, SEEDS)
    assert max(len(list(turns(r))) for r in rollouts) >= 3
    sampled = Counter((context, ids[:room], logps[:room]) for call in requests for context, ids, logps in call
                      for room in [len(prompts[0]) + MAX_TOKENS - len(context)])
    assert sampled == Counter(turn for r in rollouts for turn in turns(r))
    for r in rollouts:
        batch = nr.collate([r])
        assert batch.input_ids[0].tolist() == r.prompt + r.completion
        assert batch.targets.tolist() == [token for _, ids, _ in turns(r) for token in ids]
        assert batch.lengths.tolist() == [r.length] == [len(batch.targets)]


def test_all_samples_of_a_turn_are_one_call_and_every_rank_makes_the_same_number_of_calls(
        llm, prompts, requests, monkeypatch):
    python_tool.python_rollout(llm, prompts, 4, 1.0, MAX_TOKENS, SEEDS)  # nobody writes </python>
    assert [len(call) for call in requests] == [24, *[0] * python_tool.CALLS]


def test_the_output_stands_between_the_call_and_the_next_turn(llm, prompts, calls):
    rollouts = python_tool.python_rollout(llm, prompts, 4, 1.0, MAX_TOKENS, SEEDS)
    decode = llm.get_tokenizer().decode
    called = [r for r in rollouts if not all(r.sampled)]
    assert called
    for r in called:
        assert r.text == decode(r.completion, skip_special_tokens=True)
        first, output, *_ = (decode(ids) for _, ids in segments(r))
        program = first.removeprefix("<think>").removesuffix("=")
        assert output == f"<output>[{program}]</output>"


def segments(r):
    """(sampled, ids) of each run of sampled tokens or of output."""
    tokens = iter(r.completion)
    return [(sampled, [next(tokens) for _ in run]) for sampled, run in groupby(r.sampled)]


def test_a_token_in_which_the_marker_ends_is_kept_whole(llm, prompts, monkeypatch, tokenizer):
    monkeypatch.setattr(python_tool, "CLOSE", "</thi")  # inside the token </think>
    rollouts = python_tool.python_rollout(llm, prompts, 4, 1.0, 2 * MAX_TOKENS, SEEDS)
    token = tokenizer.convert_tokens_to_ids("</think>")
    for r in rollouts:
        (_, call), (_, output), *_ = segments(r)
        assert call[-1] == token and tokenizer.decode(output).startswith("<output>")


# ---- 2. limits, seeds


@pytest.mark.parametrize("max_tokens", [9, 24, 40, MAX_TOKENS])
def test_sampled_tokens_and_output_together_are_at_most_max_tokens(llm, prompts, calls, max_tokens):
    rollouts = python_tool.python_rollout(llm, prompts, 4, 1.0, max_tokens, SEEDS)
    stop = llm.get_tokenizer().eos_token_id
    for r in rollouts:
        assert len(r.completion) <= max_tokens
        assert len(r.completion) == len(r.sampled) == len(r.vllm_logps) == len(r.advantages)
        assert r.sampled[-1]  # output that nothing follows would be of no use
        assert r.truncated == (r.completion[-1] != stop)
        assert len(list(turns(r))) <= 1 + python_tool.CALLS
        assert all(logp == 0.0 for logp, sampled in zip(r.vllm_logps, r.sampled) if not sampled)


def test_the_first_turn_is_that_of_plain_sampling_and_all_turns_are_functions_of_the_seeds(
        llm, prompts, calls):
    plain = nr.rollout(llm, prompts, 4, 1.0, MAX_TOKENS, SEEDS)
    once, again = (python_tool.python_rollout(llm, prompts, 4, 1.0, MAX_TOKENS, SEEDS) for _ in range(2))
    assert [r.completion for r in once] == [r.completion for r in again]
    for a, b in zip(plain, once):
        first = segments(b)[0][1]
        assert a.completion[:len(first)] == first
    other = python_tool.python_rollout(llm, prompts, 4, 1.0, MAX_TOKENS, [seed + 100 for seed in SEEDS])
    assert [r.completion for r in once] != [r.completion for r in other]


def test_seeds_of_the_later_turns_differ_between_samples_and_turns(llm, prompts, calls, monkeypatch):
    used, sample = [], python_tool.rollout

    def record(llm, prompts, n, temperature, max_tokens, seeds, **sampling):
        used.append(seeds)
        return sample(llm, prompts, n, temperature, max_tokens, seeds, **sampling)
    monkeypatch.setattr(python_tool, "rollout", record)
    python_tool.python_rollout(llm, prompts, 4, 1.0, MAX_TOKENS, SEEDS)
    assert used[0] == SEEDS and len(used[1]) > 6 and used[2]
    later = [seed for seeds in used[1:] for seed in seeds]
    assert len(set(later)) == len(later)


def test_greedy_completions_need_no_seeds(llm, prompts, calls):
    once, again = (python_tool.python_rollout(llm, prompts, 1, 0.0, MAX_TOKENS) for _ in range(2))
    assert [r.completion for r in once] == [r.completion for r in again]
    assert not all(all(r.sampled) for r in once)


# ---- 3. programs


@pytest.mark.parametrize("program, output", [
    ("print(347*86)", "29842"),
    ("print('a')\n\nprint('b')  ", "a\nb"),
    ("", ""),
    ("while True: pass", python_tool.NO_RESULT),
    ("import os; os.kill(os.getpid(), 9)", python_tool.NO_RESULT),
    ("print('x' * 30_000_000)", python_tool.NO_RESULT),
    ("print('é' * 3_000_000)", "é" * python_tool.CHARACTERS),
    ("14+2=16", "SyntaxError: "),
    ("print(1)\nprint(1/0)", "1\nZeroDivisionError: division by zero"),
    ("raise SystemExit(3)", "SystemExit: 3"),
    ("def f(): return f()\nf()", "RecursionError: "),
    ("print('\\ud83d')", "UnicodeEncodeError: "),
    ("print(open('/etc/passwd').read())", "FileNotFoundError: "),
    ("\ud83d", "SyntaxError: "),
])
def test_a_program_that_fails_is_output_and_not_an_error(monkeypatch, program, output):
    monkeypatch.setattr(python_tool, "SECONDS", 0.5 if "while" in program else 10.0)
    got = python_tool.run_python(program)
    assert got.startswith(output) if output.endswith(": ") else got == output
    assert len(got) <= python_tool.CHARACTERS


def test_a_call_is_the_text_between_the_last_opening_marker_and_the_closing_one():
    of = python_tool.called_program
    assert of("Let me see. <python>print(1)</python>") == "print(1)"
    assert of("<python> or <python>print(1)</python>\n") == "print(1)"
    assert of("print(1)</python>") == "print(1)"  # no opening marker: all of it
    assert of("<python>print(1)") is None
    assert python_tool.tool_calls(["a", "<python>1</python><output></output>2</python>"]) == [0.0, 2.0]


def test_programs_that_hang_or_print_megabytes_or_do_not_compile_are_read_by_the_model(
        llm, prompts, monkeypatch):
    monkeypatch.setattr(python_tool, "CLOSE", "=")
    programs = cycle(["while True: pass", "print('x' * 3_000_000)", "14+2="])
    for name, value in {"SECONDS": 3.0, "CHARACTERS": 50, "CALLS": 1}.items():
        monkeypatch.setattr(python_tool, name, value)
    called = python_tool.called_program
    monkeypatch.setattr(python_tool, "called_program",
                        lambda turn: None if called(turn) is None else next(programs))
    rollouts = python_tool.python_rollout(llm, prompts, 4, 1.0, 2 * MAX_TOKENS, SEEDS)
    text = "".join(r.text for r in rollouts)
    for output in (python_tool.NO_RESULT, "x" * 50 + "</output>", "SyntaxError"):
        assert f"<output>{output}" in text


# ---- 4. functions of a user


@pytest.fixture
def user(llm, prompts, tmp_path):
    """user(body of a function, what follows its name): what --rollout then samples for 2 prompts, 2 each."""
    def call(body, signature="(llm, prompts, n, temperature, max_tokens, seeds=None, **sampling)"):
        file = tmp_path / f"mine{len(list(tmp_path.iterdir()))}.py"
        file.write_text("import math\nfrom nano_rlvr import Rollout, rollout\n"
                        f"def mine{signature}:\n    {body}\n")
        sample = nr.sampler(f"{file}:mine")
        return sample(llm, prompts[:2], 2, 1.0, 8, SEEDS[:2], top_p=1.0, top_k=0)
    return call


SAMPLE = "rs = rollout(llm, prompts, n, temperature, max_tokens, seeds, **sampling); "


@pytest.mark.parametrize("body, says", [
    ("return None", "it must return a list of 2 Rollouts for each of 2 prompts, .* it returned None"),
    ("return (r for r in rs)", "it must return .* it returned <generator"),
    ("return rs[:3]", "it must return .* it returned 3"),
    ("return [vars(r) for r in rs]", "Rollout 0 of 4 does not fit: it is {'prompt': .*, not a Rollout"),
    ("return [rs[i] for i in (0, 2, 1, 3)]", "Rollout 1 of 4 does not fit: it has another prompt"),
    ("prompts[1].append(7); return rs", "Rollout 2 of 4 does not fit: it has another prompt"),
    ("rs[2].completion[3] = 263", r"Rollout 2 .* its completion\[3\] is 263, not .* an int from 0 to 262"),
    ("rs[2].completion[3] = -1", r"Rollout 2 .* its completion\[3\] is -1, not .* from 0 to 262"),
    ("rs[1].completion[0] = 'a'", r"Rollout 1 .* its completion\[0\] is 'a', not a token id"),
    ("rs[1].completion[0] = True", r"Rollout 1 .* its completion\[0\] is True, not a token id"),
    ("rs[3].completion = 'abc'", "Rollout 3 .* its completion is 'abc', not a list"),
    ("rs[3].completion, rs[3].vllm_logps = [], []", "Rollout 3 .* 0 tokens, 0 log-probs and . marks"),
    ("rs[3].vllm_logps += [-1.0]", "Rollout 3 .* its completion has . tokens, . log-probs"),
    ("rs[3].vllm_logps = None", "Rollout 3 .* its vllm_logps is None, not a list"),
    ("rs[3].vllm_logps[1] = math.nan", r"Rollout 3 .* its vllm_logps\[1\] is nan, not a log-prob"),
    ("rs[3].vllm_logps[1] = -math.inf", r"Rollout 3 .* its vllm_logps\[1\] is -inf, not a log-prob"),
    ("rs[3].vllm_logps[1] = 0.5", r"Rollout 3 .* its vllm_logps\[1\] is 0.5, .* at most 0"),
    ("rs[3].vllm_logps[1] = None", r"Rollout 3 .* its vllm_logps\[1\] is None, not a log-prob"),
    ("rs[0].sampled[0] = 2", r"Rollout 0 .* its sampled\[0\] is 2, not True or False"),
    ("rs[0].sampled = [False] * len(rs[0].sampled)", "Rollout 0 .* at least one sampled token"),
    ("rs[0].text = None", "Rollout 0 .* its text is None, not a str"),
    ("rs[0].truncated = None", "Rollout 0 .* its truncated is None, not a bool"),
    ("rs[0].gold", "AttributeError: 'Rollout' object has no attribute 'gold' .*mine0.py:4"),
    ("raise KeyError('the\\nserver')", "KeyError: 'the.*server' .*mine0.py:4"),
    ("raise SystemExit(0)", "SystemExit: 0 .*mine0.py:4"),
    ("rollout(llm, [[1] * 999], 1, 1.0, 8)", "VLLM.*: .* 999 .*mine0.py:4"),  # too long
])
def test_a_function_that_fails_or_returns_what_does_not_fit_is_named_in_one_line(user, body, says):
    with pytest.raises(RunError, match=f"^--rollout .*mine0.py:mine: {says}") as e:
        user(f"{SAMPLE}{body}" if "return" in body else f"{SAMPLE}{body}; return rs")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("signature, says", [
    ("(llm, prompts)", "too many positional arguments; it must take llm, prompts, n, temp"),
    ("(llm, prompts, n, temperature, max_tokens, seeds=None)", "unexpected keyword argument 'top_p'"),
    ("(llm, prompts, n, temperature, max_tokens, seeds, **sampling)", "required argument: 'seeds'"),
])
def test_a_function_that_cannot_be_called_is_refused_before_anything_is_loaded(user, signature, says):
    with pytest.raises(ValueError, match=f"^--rollout .*mine0.py:mine: .*{says}"):
        user("raise SystemExit", signature)


def test_a_failed_sync_and_a_full_device_are_not_blamed_on_the_user(user):
    for error, kind in (("RunError('lost')", RunError), ("RuntimeError('out of memory')", RuntimeError)):
        with pytest.raises(kind, match="^(lost|out of memory)$"):
            user(f"from runtime.dist import RunError; raise {error}")


def test_a_completion_that_has_grown_can_be_packed(user):
    rollouts = user(SAMPLE + "rs[0].completion += [5]; rs[0].sampled += [False]; "
                    "rs[0].vllm_logps += [0.0]; return rs")
    assert not all(rollouts[0].sampled)
    assert nr.collate(rollouts).lengths.tolist() == [r.length for r in rollouts]


def test_log_probs_of_another_computation_name_the_function_that_returned_them():
    metrics = {"mismatch/mean_abs": 0.2, "loss": 0.0}
    with pytest.raises(RunError, match="Either --rollout mine.py:f returned other ids or log-probs"):
        guard.check_step(metrics, 0.1, "mine.py:f")
    with pytest.raises(RunError, match="Either vLLM has other weights"):
        guard.check_step(metrics, 0.1)


# ---- 5. the model of the example


def test_the_example_model_learns_its_calls_but_not_the_output(tmp_path, monkeypatch):
    batches, collate = [], nr.collate
    monkeypatch.setattr(nr, "collate", lambda rollouts: batches.append(rollouts) or collate(rollouts))
    monkeypatch.setattr(sys, "argv", ["tool_model.py", "--out", str(tmp_path), "--steps", "1"])
    tool_model.main()
    tokenizer = tool_model.make_tokenizer()
    tokenizer.add_tokens(tool_model.TAGS)
    called = [r for r in batches[0] if not all(r.sampled)]
    assert 0 < len(called) < len(batches[0])
    for r in called:
        (_, call), (_, output), (_, answer) = segments(r)
        question = tokenizer.decode(r.prompt[1:-1])
        value = eval(question)
        assert tokenizer.decode(call) == f"<python>print({question})</python>"
        assert tokenizer.decode(output) == f"<output>{value}</output>"
        assert tokenizer.decode(answer) == f"<answer>{value}</answer><|endoftext|>"
    train, test = ([json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
                   for split in ("train", "test"))
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    shown = {tokenizer.decode(r.prompt[1:-1]) for r in batches[0]}
    assert not shown & {row["question"] for row in test}


# ---- 6. training


def test_log_probs_of_the_trainer_are_those_of_vllm_on_sampled_tokens(llm, prompts, calls, group):
    """In fp32 the run stops at a mean difference of 1e-3; an output that one side reads differently is 1."""
    cfg = make_config(prompts=6, lr=0.0)
    rollouts = python_tool.python_rollout(llm, prompts, 4, cfg.temperature, MAX_TOKENS, SEEDS)
    for i, r in enumerate(rollouts):
        r.reward, r.advantages = 1.0, [i % 2 - 0.5] * len(r.completion)
    trained = nr.assign_token_weights(rollouts, cfg)
    metrics = nr.update(nr.make_policy(cfg), [nr.collate(p) for p in nr.pack(trained, 10**4)], cfg)
    within(metrics["mismatch/mean_abs"], 1e-3)
    within(metrics["mismatch/max"], 1e-2)
    assert metrics["grad_norm"] > 0


def with_output(rollouts, seed=0):
    """Marks about a third of the tokens as output, in runs; the last token is sampled."""
    noise = torch.Generator().manual_seed(seed)
    for r in rollouts:
        n = len(r.completion)
        runs = torch.rand(n // 4 + 1, generator=noise).gt(0.33).repeat_interleave(4)[:n].tolist()
        r.sampled = [*runs[:-1], True]
    assert not all(all(r.sampled) for r in rollouts)
    return rollouts


def test_what_is_stored_for_the_output_changes_nothing(tokenizer):
    rollouts = with_output(test_trl.Table(tokenizer, groups=2).rollouts)
    batch = nr.collate(rollouts)
    for r in rollouts:
        r.vllm_logps = [x if sampled else -99.0 for x, sampled in zip(r.vllm_logps, r.sampled)]
        r.advantages = [x if sampled else 99.0 for x, sampled in zip(r.advantages, r.sampled)]
    for name, x in vars(nr.collate(rollouts)).items():
        assert x is None or torch.equal(torch.as_tensor(x), torch.as_tensor(getattr(batch, name))), name


class MaskedTable(test_trl.Table):
    """Completions with output in them; TRL gets the mask under its name for it, env_mask."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, groups=4)
        with_output(self.rollouts)

    def rollout_func(self, prompts, trainer):
        rows = [self.by_prompt[p][i % trainer.num_generations] for i, p in enumerate(prompts)]
        env_mask = [list(map(int, r.sampled)) for r in rows]
        return super().rollout_func(prompts, trainer) | {"env_mask": env_mask}


@pytest.fixture(scope="module")
def masked(tmp_path_factory, tokenizer, in_float64):
    table = MaskedTable(tokenizer)
    folder = tmp_path_factory.mktemp("masked")
    return table, test_trl.make_trainer(folder, tokenizer, table, beta=0.04, use_bias_correction_kl=False)


@pytest.mark.numeric
@pytest.mark.parametrize("loss_type, level, masked_out", [
    ("grpo", "token", False), ("dapo", "token", False), ("dr_grpo", "token", True),
    ("grpo", "sequence", True), ("cispo", "sequence", False)])
def test_loss_and_gradients_equal_trls_with_its_mask_of_tool_tokens(masked, loss_type, level, masked_out):
    table, t = masked
    t.loss_type, t.importance_sampling_level, t.scale_rewards = loss_type, level, "none"
    t.epsilon_low, t.epsilon_high = 0.2, 0.28 + (loss_type == "cispo")
    t.mask_truncated_completions, t.num_iterations = masked_out, 2  # 2: TRL keeps the old log-probs
    t.current_gradient_accumulation_steps = t.args.steps_per_generation = 1
    policy = nr.TokenLogps(runtime.model.load_model(make_config()), test_trl.TEMPERATURE)
    reference = nr.TokenLogps(runtime.model.load_model(make_config()), test_trl.TEMPERATURE)
    start = [p.detach().clone() for p in policy.parameters()]
    test_trl.set_weights(t.model, start)
    test_trl.set_weights(t.ref_model, test_trl.moved(start, 2))
    inputs = t._generate_and_score_completions(test_trl.batch_of(table))
    assert (inputs["tool_mask"] == 0).any()
    test_trl.set_weights(t.model, test_trl.moved(start, 3))
    t.model.zero_grad()
    loss = t._compute_loss(t.model, inputs)
    loss.backward()

    test_trl.set_advantages(table.rollouts, nr.group_advantages(table.rewards, scale="none"))
    cfg = make_config(
        ratio=level, kl_coef=0.04, clip_high=0.28, correction="none", mask_truncated=masked_out,
        max_tokens=test_trl.MAX_TOKENS, **test_trl.OURS[loss_type])
    batch = nr.collate(nr.assign_token_weights(table.rollouts, cfg))
    test_trl.set_weights(reference, test_trl.moved(start, 2))
    with torch.no_grad():
        batch.old, batch.ref = policy(batch)[0], reference(batch)[0]
    test_trl.set_weights(policy, test_trl.moved(start, 3))
    ours, _ = nr.policy_loss(policy(batch)[0], batch.old, batch.ref, batch, cfg)
    ours.backward()
    close(ours, loss)
    for a, b in zip(policy.parameters(), t.model.parameters(), strict=True):
        close(a.grad, b.grad)


@pytest.mark.numeric
def test_lengths_are_those_that_trl_reports(masked):
    table, t = masked
    t._generate_and_score_completions(test_trl.batch_of(table))
    close(sum(r.length for r in table.rollouts) / 16, t._metrics["train"]["completions/mean_length"][-1])
