"""LeanEngine: less Python per token in vLLM gives the same results, bit by bit, in equal steps."""
import ast
import collections
import contextlib
import copy
import inspect
import zlib
from concurrent.futures import Future
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.model_executor.models.transformers.base import Base
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput
from vllm.v1.sample.ops import topk_topp_sampler

from conftest import make_config
from examples import environment
from runtime import engine, lean_engine, ranks, vllm_patches
from runtime.lean_engine import LeanEngine
from runtime.messages import RunError
from runtime.vllm_patches import SURFACE

LEAN = dict(temperature=1.0, max_tokens=150, logprobs=0, flat_logprobs=True, detokenize=False)
PROMPTS = [[60 + i] * (1 + 20 * i) for i in range(8)]  # 1 to 141 tokens
LENGTHS = (1, 2, 3, 5, 33, 64, 100, 172)


def parameters(**changes):
    """A request for each of PROMPTS."""
    return [SamplingParams(seed=seed, **LEAN | dict(n=3) | changes)
            for seed in range(len(PROMPTS))]


def results_of(requests):
    """All that vLLM says of finished requests, but their numbers."""
    return [(r.prompt_token_ids, r.num_cached_tokens, r.num_cache_creation_tokens, r.finished, [
        (x.index, x.text, list(x.token_ids), x.cumulative_logprob, x.finish_reason, x.stop_reason,
         vars(x.logprobs)) for x in r.outputs]) for r in requests]


class Steps:
    """Records all that the device is told at each step. Requests and blocks become numbers."""

    def __init__(self, execute_model):
        self.execute_model = execute_model
        self.steps = []
        self.requests, self.blocks = {}, {}  # name -> number in order of appearance

    def __call__(self, scheduled, **kwargs):
        cached = scheduled.scheduled_cached_reqs
        step = vars(scheduled) | vars(cached) | dict(
            scheduled_cached_reqs=None,
            scheduled_new_reqs=[
                (self.request(new.req_id), new.num_computed_tokens, self.block(new.block_ids))
                for new in scheduled.scheduled_new_reqs],
            req_ids=[self.request(name) for name in cached.req_ids],
            new_block_ids=[self.block(groups) for groups in cached.new_block_ids],
            num_scheduled_tokens=[(self.request(name), count) for name, count
                                  in scheduled.num_scheduled_tokens.items()])
        for names in ("finished_req_ids", "preempted_req_ids", "resumed_req_ids", "all_token_ids"):
            step[names] = {self.requests.get(name) for name in step[names]}  # None: an older one
        self.steps.append(step)
        return self.execute_model(scheduled, **kwargs)

    def request(self, name):
        return self.requests.setdefault(name, len(self.requests))

    def block(self, groups):
        return groups and [self.blocks.setdefault(name, len(self.blocks)) for name in groups[0]]


@contextlib.contextmanager
def counted(lean):
    """Counts of calls: pieces handed over, steps made from the arrays, preemptions."""
    counts = collections.Counter()
    with contextlib.ExitStack() as stack:
        for name in ("hand_over", "next_step", "preempt_request"):
            def call(*args, name=name, method=getattr(lean, name), **kwargs):
                counts[name] += 1
                return method(*args, **kwargs)

            owner = lean.scheduler if name == "preempt_request" else lean
            attribute = "_preempt_request" if name == "preempt_request" else name
            stack.enter_context(mock.patch.object(owner, attribute, call))
        yield counts


def both_ways(llm, lean, generate, blocks=None):
    """generate() with LeanEngine and in vLLM's own way, with an empty prefix cache and, if given,
    so many free blocks. Asserts equal results and steps. Returns counts of the former."""
    core = llm.llm_engine.engine_core.engine_core
    pool, found = core.scheduler.kv_cache_manager.block_pool, []
    with counted(lean) as counts:
        for lean.on in (False, True):
            assert llm.reset_prefix_cache()
            counts.clear()
            steps = Steps(core.model_executor.execute_model)
            taken = pool.get_new_blocks(pool.get_num_free_blocks() - blocks) if blocks else []
            with mock.patch.object(core.model_executor, "execute_model", steps):
                found.append((generate(), steps.steps))
            pool.free_blocks(taken)
            assert lean.row == {} and len(lean.free_rows) == len(lean.requests)
    (own, own_steps), (ours, our_steps) = found
    assert ours == own
    for own_step, our_step in zip(own_steps[1:], our_steps[1:], strict=True):  # 0 ends older ones
        assert our_step == own_step
    return counts


def generation(llm, params, prompts=PROMPTS):
    """A function that generates, through vLLM's LLM."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return lambda: results_of(llm.generate(inputs, params, use_tqdm=False))


CASES = {
    "seeds": {},
    "one sample": dict(n=1),
    "no seeds": dict(n=1, seed=None, temperature=0.0),
    "all have one length": dict(ignore_eos=True),
    "stop tokens": dict(stop_token_ids=[70, 80, 90]),
    "at least 40 tokens": dict(min_tokens=40),
    "top-p and top-k": dict(top_p=0.8, top_k=50),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_steps_are_those_of_vllms_own_way(llm, name):
    params = [SamplingParams(**LEAN | dict(n=3, seed=i) | CASES[name]) for i in range(8)]
    counts = both_ways(llm, llm.lean, generation(llm, params))
    assert counts["hand_over"] >= 8 and counts["next_step"] > 50


def test_several_lengths_in_several_calls_with_a_prefix_cache(llm):
    """Turns: half of the later prompts continue what was generated before."""
    def three_turns():
        prompts, turns = PROMPTS, []
        for turn in range(3):
            params = [SamplingParams(seed=10 * turn + i, ignore_eos=True,
                                     **LEAN | dict(n=2, max_tokens=LENGTHS[i] // 3 + 1))
                      for i in range(8)]
            turns.append(generation(llm, params, prompts)())
            prompts = [prompt + outputs[0][2] for prompt, *_, outputs in turns[-1][:4]]
            prompts += PROMPTS[4:]
        return turns

    counts = both_ways(llm, llm.lean, three_turns)
    assert counts["next_step"] > 50
    turns = three_turns()
    assert [cached for _, cached, *_ in turns[2]] != [0] * 8


@pytest.mark.parametrize("blocks", [24, 60])
def test_preempted_requests_go_on_where_they_were(llm, blocks):
    params = parameters(ignore_eos=True, max_tokens=110)
    counts = both_ways(llm, llm.lean, generation(llm, params), blocks=blocks)
    assert counts["preempt_request"] > 3 and counts["next_step"] > 10


def test_more_requests_than_may_run_at_once(llm):
    """Steps are steady while others wait, and a request ends at each of the later steps."""
    running = len(llm.lean.requests)
    prompts = [[60 + i % 50, 61] for i in range(running)]
    params = [SamplingParams(seed=i, ignore_eos=True, **LEAN | dict(n=2, max_tokens=20 + i % 9))
              for i in range(running)]
    counts = both_ways(llm, llm.lean, generation(llm, params, prompts))
    assert counts["hand_over"] > 2 * running and counts["next_step"] > 20


OTHERS = [dict(presence_penalty=0.5), dict(logprobs=2), dict(flat_logprobs=False),
          dict(detokenize=True, stop=["7"]), dict(repetition_penalty=1.2), dict(logit_bias={70: 9})]


def test_requests_with_other_parameters_go_vllms_own_way_beside_lean_ones(llm):
    params = parameters()
    for i, changes in enumerate(OTHERS):
        params[i] = SamplingParams(seed=i, **LEAN | dict(n=3) | changes)

    def generate():
        requests = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        return [(list(x.token_ids), x.text, x.logprobs, x.cumulative_logprob, x.finish_reason,
                 x.stop_reason) for r in requests for x in r.outputs]

    with mock.patch.object(llm.lean, "add", side_effect=llm.lean.add) as add:
        both_ways(llm, llm.lean, generate)
    lean = [call.args[0].prompt_token_ids for call in add.call_args_list]
    assert sorted(map(len, lean)) == 3 * [121] + 3 * [141]  # the last two prompts


class Twice:
    """An environment of two turns."""

    def reset(self, row):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return "<|user|>1+1<|assistant|>", float(len(text)), self.turns == 2


def test_a_rollout_function_of_several_turns(llm):
    examples = [{"question": "1+2", "answer": "3"} for _ in PROMPTS]
    play = environment.player(Twice, max_turns=2)

    def generate():
        rollouts = play(llm, PROMPTS, 3, 1.0, 100, list(range(8)), examples=examples)
        return [(r.completion, r.vllm_logps, r.loss_mask, r.outcome) for r in rollouts]

    assert both_ways(llm, llm.lean, generate)["next_step"] > 10


def test_after_an_exception_the_next_call_has_its_own_results_only(llm):
    processor = llm.llm_engine.output_processor
    calls, process = [], processor.process_outputs

    def interrupted(outputs, **args):
        calls.append(outputs)
        if len(calls) == 40:
            raise KeyboardInterrupt
        return process(outputs, **args)

    generate = generation(llm, parameters(ignore_eos=True))
    llm.reset_prefix_cache()
    wanted = generate()
    with mock.patch.object(processor, "process_outputs", interrupted), \
            pytest.raises(KeyboardInterrupt):
        generate()
    assert not llm.lean.row and not processor.request_states and not processor.parent_requests
    assert llm.reset_prefix_cache()  # all blocks are free
    assert generate() == wanted


# ---- the asynchronous scheduler of a GPU

class Device:
    """Where a GPU with vLLM's second model runner would be. A token is a function of the seed and
    of all tokens before it. It checks what the scheduler says of each request."""

    def __init__(self, block_size):
        self.block_size, self.requests = block_size, {}

    def execute_model(self, scheduled, non_block=True):
        """None, as of a runner that waits for sample_tokens(), or the output of an empty step."""
        for name in (*scheduled.finished_req_ids, *scheduled.preempted_req_ids):
            self.requests.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self.requests[new.req_id] = SimpleNamespace(
                seed=new.sampling_params.seed, tokens=list(new.prefill_token_ids),
                computed=new.num_computed_tokens, blocks=list(new.block_ids[0]))
        cached = scheduled.scheduled_cached_reqs
        for name, computed, blocks in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            request = self.requests[name]
            assert request.computed == computed
            request.blocks += blocks[0] if blocks else []
        names = list(scheduled.num_scheduled_tokens)
        sampled = [self.compute(self.requests[name], scheduled.num_scheduled_tokens[name])
                   for name in names]
        column = np.array([tokens or [0] for tokens in sampled]).reshape(-1, 1)  # (names, 1)
        # far apart: their sum depends on the order, as it rounds
        logps = -np.float32(1 + column) ** -7  # (names, 1)
        self.output = ModelRunnerOutput(
            names, {name: i for i, name in enumerate(names)}, sampled,
            LogprobsLists(column, logps, column[:, 0]))
        return self.done(None if names else EMPTY_MODEL_RUNNER_OUTPUT)

    def compute(self, request, count):
        """The token that follows, if these are the last ones that are known."""
        request.computed += count
        assert request.computed <= self.block_size * len(request.blocks)
        if request.computed < len(request.tokens):
            return []
        assert request.computed == len(request.tokens)
        token = zlib.crc32(f"{request.seed} {request.tokens}".encode()) % 263
        request.tokens.append(token)
        return [token]

    def sample_tokens(self, grammar, non_block=True):
        return self.done(self.output)

    def done(self, result):
        future = Future()
        future.set_result(result)
        return future


@contextlib.contextmanager
def asynchronous(llm, blocks, tokens, sequences=24):
    """In the engine of `llm`, the scheduler and the queue of a GPU: so many blocks of KV cache,
    tokens and sequences per step. -> a LeanEngine in it."""
    core = llm.llm_engine.engine_core.engine_core
    old = core.scheduler
    config, cache = copy.copy(old.vllm_config), copy.copy(old.kv_cache_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.async_scheduling = True
    config.scheduler_config.enable_chunked_prefill = True
    config.scheduler_config.max_num_seqs = sequences
    config.scheduler_config.max_num_batched_tokens = tokens
    config.scheduler_config.max_num_scheduled_tokens = tokens
    cache.num_blocks = blocks
    scheduler = AsyncScheduler(config, cache, core.structured_output_manager, old.block_size)
    scheduler.use_v2_model_runner = True
    with mock.patch.multiple(
            core, scheduler=scheduler, model_executor=Device(old.block_size),
            async_scheduling=True, batch_queue=collections.deque(maxlen=2), batch_queue_size=2,
            step_fn=core.step_with_batch_queue):
        yield LeanEngine(llm)


@pytest.mark.parametrize("blocks, tokens", [(400, 4096), (400, 48), (40, 4096), (30, 48)])
@pytest.mark.parametrize("changes", [{}, dict(ignore_eos=True, max_tokens=110),
                                     dict(stop_token_ids=[70, 71, 72, 73])], ids=str)
def test_on_the_asynchronous_scheduler_too(llm, blocks, tokens, changes):
    """With room for all; with prompts in pieces; with preemptions; with both."""
    with asynchronous(llm, blocks, tokens) as lean:
        counts = both_ways(llm, lean, generation(llm, parameters(**changes)))
    assert counts["hand_over"] and counts["next_step"]
    assert counts["preempt_request"] or blocks == 400 or "stop_token_ids" in changes


# ---- another vLLM

def touched():
    """The attributes of other objects that lean_engine.py reads or sets, but numpy's and Python's.
    """
    tree = ast.parse(inspect.getsource(lean_engine))
    modules = {"self", "np", "ranks", "vllm_patches", "functools", "operator", "copy"}
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
             and getattr(node.value, "id", None) not in modules}
    for owner in (dict, list, set, str, np.ndarray):
        found -= set(dir(owner))
    return found - {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_this_vllm_has_all_that_is_touched_and_the_table_names_all():
    for user in SURFACE:
        assert vllm_patches.missing(user) == [], user
    entries = "; ".join(SURFACE["LeanEngine"].values()).split("; ")
    assert not touched() - {entry.partition("(")[0] for entry in entries}


CHANGED = {
    "vllm.v1.request:Request": "num_tokens; num_tokens_of_2030",  # a name
    "vllm.v1.core.sched.scheduler:Scheduler": "running; schedule(self)",  # parameters
    "vllm.v1.core.sched.scheduler_of_2030:Scheduler": "running",  # a module
}


@pytest.fixture
def another_vllm(monkeypatch):
    """All that touches vLLM finds something missing."""
    ranks.print_each_once.cache_clear()
    for user in SURFACE:
        monkeypatch.setitem(SURFACE, user, CHANGED)


def test_what_another_vllm_lacks_is_named(another_vllm, capsys):
    assert vllm_patches.missing("LeanEngine") == [
        "vllm.v1.request:Request.num_tokens_of_2030",
        "vllm.v1.core.sched.scheduler:Scheduler.schedule(self)",
        "vllm.v1.core.sched.scheduler_of_2030:Scheduler"]
    assert lean_engine.lean_engine(None) is None
    vllm_patches.name_shared_memory(1)
    notes = capsys.readouterr().out.splitlines()
    assert len(notes) == 2 and all("has no vllm.v1.request:Request.num_tok" in x for x in notes)
    with pytest.raises(RunError, match="vLLM 0.31.* has no .*num_tokens_of_2030"):
        vllm_patches.require_surface()


def test_what_touches_another_vllm_leaves_it_alone(another_vllm, monkeypatch, capsys):
    before = topk_topp_sampler.random_sample, Base._decorate_for_torch_compile
    vllm_patches.draw_tokens_by(None)
    vllm_patches.leave_transformers_alone()
    vllm_patches.compile_no_helpers()
    vllm_patches.show_no_progress()
    assert (topk_topp_sampler.random_sample, Base._decorate_for_torch_compile) == before
    monkeypatch.setattr(engine, "start_vllm", lambda **_: None)
    llm = engine.Sampler(make_config())
    assert (llm.lean, llm.is_checked, llm.expert_layers) == (None, False, [])
    assert capsys.readouterr().out.count("note: ") == 7


def test_another_version_or_another_scheduler_keeps_vllms_own_way_and_a_note_says_so(
        llm, monkeypatch, capsys):
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    for name, value, reason in [
            ("num_spec_tokens", 3, "num_spec_tokens is 3"),
            ("max_num_scheduled_tokens", 5, "more sequences may run than a step has tokens")]:
        with mock.patch.object(scheduler, name, value):
            assert lean_engine.lean_engine(llm) is None
        assert f"which is slower, because {reason}" in capsys.readouterr().out
    monkeypatch.setattr("vllm.__version__", "0.40.1")
    assert lean_engine.lean_engine(llm) is None
    assert "because this is vLLM 0.40.1, not 0.31" in capsys.readouterr().out
