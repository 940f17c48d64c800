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

from data import completion_texts, request_seed
from examples import jail
from nano_rlvr import rollout
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
    try:
        [output] = jail.run_program(RUNNER, [program], SECONDS, output=size)
    except RuntimeError:  # the machine is too busy for a jail
        output = None
    return NO_RESULT if output is None else output.strip()[:CHARACTERS]


def called_program(turn):
    """The program that the text of a turn ends with; None if the turn is not a call."""
    return turn.partition(CLOSE)[0].rpartition(OPEN)[2] if CLOSE in turn else None


def add_outputs(rollouts, programs, tokenizer, max_tokens):
    """Runs the programs, {number of a rollout: text, or None without a call}, and appends what they
    print to their rollouts. Returns {number of a rollout: tokens that its next turn may have}.
    """
    called = {i: program for i, program in programs.items() if program is not None}
    unique = sorted(set(called.values()))  # without input: equal programs, equal output
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        outputs = dict(zip(unique, threads.map(run_python, unique)))
    rooms = {}
    for i, program in called.items():
        r = rollouts[i]
        text = f"<output>{outputs[program]}</output>"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        room = max_tokens - len(r.completion) - len(ids)
        r.truncated = room <= 0
        if not r.truncated:
            rooms[i] = room
            r.completion += ids
            r.loss_mask += [False] * len(ids)
            r.vllm_logps += [0.0] * len(ids)
    return rooms


def add_turn(r, turn, room):
    """Appends the first `room` tokens of a turn. Returns the program that it calls, or None."""
    r.completion += turn.completion[:room]
    r.loss_mask += turn.loss_mask[:room]
    r.vllm_logps += turn.vllm_logps[:room]
    r.truncated = turn.truncated or len(turn.completion) > room
    return None if r.truncated else called_program(turn.text)


def python_rollout(llm, prompts, n, temperature, max_tokens, seeds=None, **sampling):
    """As nano_rlvr.rollout, with up to CALLS calls of Python per completion.

    max_tokens counts sampled tokens and output. A completion that ends with a call, because CALLS
    are used up or the output leaves no room for another token, counts as truncated.
    """
    tokenizer = llm.get_tokenizer()
    # vLLM looks for stop strings in its own text; CLOSE may be a special token
    sampling |= {"stop": [CLOSE], "detokenize": True, "skip_special_tokens": False}
    rollouts = rollout(llm, prompts, n, temperature, max_tokens, seeds, **sampling)
    programs = {i: called_program(r.text) for i, r in enumerate(rollouts)}  # of the last turn
    for number in range(CALLS):
        rooms = add_outputs(rollouts, programs, tokenizer, max_tokens)
        # One request per rollout, also if there is none: all ranks make the same calls.
        contexts = []
        turn_seeds = [] if seeds else None
        for i in rooms:
            contexts.append(rollouts[i].prompt + rollouts[i].completion)
            if seeds:
                turn_seeds.append(request_seed(seeds[i // n], i % n, number))
        most = max(rooms.values(), default=1)  # a turn may be longer than its own room
        turns = rollout(llm, contexts, 1, temperature, most, turn_seeds, **sampling)
        programs = {}
        for (i, room), turn in zip(rooms.items(), turns):
            programs[i] = add_turn(rollouts[i], turn, room)
    for i, program in programs.items():
        if program is not None:
            rollouts[i].truncated = True
    for r, text in zip(rollouts, completion_texts(rollouts, tokenizer)):
        r.text = text
        r.advantages = [0.0] * len(r.completion)  # as long as the completion is now
    return rollouts


@each
def tool_calls(text):
    """The number of calls, to be logged: --rewards ...,examples/python_tool.py:tool_calls:0."""
    return float(text.count(CLOSE))
