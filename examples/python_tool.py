"""A tool: the model may run Python programs and reads their output before it goes on.

    python nano_rlvr.py --rollout examples/python_tool.py:python_rollout --model Qwen2.5-1.5B ...

A completion with one call has two turns of the model. The part in brackets is not sampled:

    <python>print(347*86)</python>[<output>29842</output>]<answer>29842</answer>

The markers are plain text, which any tokenizer can write. vLLM ends a turn at the text </python>.
The marker may end inside a token such as ">\\n": the token is kept whole, and the rest of its text
stands before <output>. Nothing that was sampled is decoded and encoded again: the context of the
next turn is the ids of the prompt, the ids sampled so far and the ids of the output, and the
trainer gets the same ids.
"""
import os
from concurrent.futures import ThreadPoolExecutor

from data import request_seed
from examples import jail
from nano_rlvr import Rollout, rollout
from rewards import each

CALLS = 3  # at most so many calls per completion
SECONDS = 4.0  # time limit of a program
CHARACTERS = 400  # the output is cut to so many
NO_RESULT = "error: no result: too slow, too much output or memory, or killed"
OPEN, CLOSE = "<python>", "</python>"

# Runs in the jail. The program is its standard input; an exception becomes one line of output.
RUNNER = """
import sys
try:
    exec(compile(sys.stdin.read(), "program", "exec"), {"__name__": "__main__"})
except BaseException as e:  # SystemExit too
    print(type(e).__name__ + ":", e)
"""

jail.check()  # raises RuntimeError where no jail can be built: here, before the model is loaded


def run_python(program):
    """What the model reads: the standard output of a program in the jail, or NO_RESULT."""
    size = 4 * CHARACTERS  # bytes: UTF-8 has 1 to 4 per character
    [output] = jail.run_program(RUNNER, [program], SECONDS, output=size)
    return NO_RESULT if output is None else output.strip()[:CHARACTERS]


def called_program(turn):
    """The program that the text of a turn ends with; None if the turn is not a call."""
    return turn.partition(CLOSE)[0].rpartition(OPEN)[2] if CLOSE in turn else None


def python_rollout(llm, prompts, n, temperature, max_tokens, seeds=None, **sampling):
    """As nano_rlvr.rollout, with up to CALLS calls of Python per completion.

    max_tokens counts sampled tokens and output. A completion that ends with a call, because CALLS
    are used up or the output leaves no room for another token, counts as truncated.
    """
    tokenizer = llm.get_tokenizer()
    sampling |= dict(stop=[CLOSE], detokenize=True)  # vLLM looks for stop strings in its own text
    rollouts = rollout(llm, prompts, n, temperature, max_tokens, seeds, **sampling)
    programs = {i: called_program(r.text) for i, r in enumerate(rollouts)}  # of the last turn
    for turn in range(CALLS):
        programs = {i: program for i, program in programs.items() if program is not None}
        unique = sorted(set(programs.values()))  # without input: equal programs, equal output
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            output_of = dict(zip(unique, threads.map(run_python, unique)))
        rooms = {}  # number of the rollout -> tokens that its next turn may have
        for i, program in programs.items():
            r = rollouts[i]
            text = f"<output>{output_of[program]}</output>"
            output = tokenizer(text, add_special_tokens=False)["input_ids"]
            room = max_tokens - len(r.completion) - len(output)
            r.truncated = room <= 0
            if not r.truncated:
                rooms[i] = room
                r.completion += output
                r.loss_mask += [False] * len(output)
                r.vllm_logps += [0.0] * len(output)
        # One request per rollout, also if there is none: all ranks make the same calls.
        contexts = [rollouts[i].prompt + rollouts[i].completion for i in rooms]
        turn_seeds = seeds and [request_seed(seeds[i // n], i % n, turn) for i in rooms]
        most = max(rooms.values(), default=1)
        turns = rollout(llm, contexts, 1, temperature, most, turn_seeds, **sampling)
        programs = {}
        for (i, room), new in zip(rooms.items(), turns):  # a turn may be longer than its own room
            r = rollouts[i]
            r.completion += new.completion[:room]
            r.loss_mask += new.loss_mask[:room]
            r.vllm_logps += new.vllm_logps[:room]
            r.truncated = new.truncated or len(new.completion) > room
            programs[i] = None if r.truncated else called_program(new.text)
    texts = tokenizer.batch_decode([r.completion for r in rollouts], skip_special_tokens=True)
    return [
        Rollout(r.prompt, r.completion, text, r.truncated or programs.get(i) is not None,
                r.vllm_logps, r.loss_mask)
        for i, (r, text) in enumerate(zip(rollouts, texts))]


@each
def tool_calls(text):
    """The number of calls, to be logged: --rewards ...,examples/python_tool.py:tool_calls:0."""
    return float(text.count(CLOSE))
