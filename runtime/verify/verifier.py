"""Runs the rewards of a spec in processes that can be killed (pool.py), weights and adds them."""
import asyncio
import contextlib
import inspect
import math
import sys
import traceback
from dataclasses import dataclass

from runtime.messages import plain
from runtime.verify.pool import Pool
from runtime.verify.user_code import load

# by the trainer and by Verifier
ADDED_COLUMNS = set("prompts step sample_index completion_ids index correct".split())
# of a run: they too go before columns of the data
SETTINGS = {"timeout", "random_seed", "max_tokens", "overlong_buffer"}


def columns_of(rollouts, examples, step):
    """The columns that the reward functions of a run get: {name: a value per rollout}.

    Those of the examples, None where one lacks it; prompts (the questions), completion_ids and step
    (of the loop); sample_index, the number of a completion among those of its prompt; outcome, if a
    --rollout function has filled it. Verifier adds others. rollouts: the same number for each
    example, in their order."""
    n = len(rollouts) // len(examples)
    columns = {}
    for name in set().union(*examples) - {"prompt_ids", "completions"}:  # the trainer's own
        columns[name] = []
        for example in examples:
            columns[name] += [example.get(name)] * n
    outcomes = [r.outcome for r in rollouts]
    if any(value is not None for value in outcomes):
        columns["outcome"] = outcomes
    return columns | {"prompts": columns["question"], "step": step,
                      "sample_index": [*range(n)] * len(examples),
                      "completion_ids": [r.completion for r in rollouts]}


@dataclass
class Traits:
    """What Verifier knows of a reward function: the columns without which it fails, and attributes
    that it may have, such as my_reward.waits = True.

    It may also have `check`, a function of the settings that raises ValueError with one line if the
    reward cannot work, and `warm`, which fills caches. Both are called before workers are forked.
    """
    needs: set  # columns
    whole_batch: bool  # it gets all completions of a spec in one call, after the others
    waits: bool  # for a network, more than it computes: pool.WAITING calls at a time
    reads_gold: bool  # None for an empty text means that it cannot read the gold answer


class Verifier(contextlib.AbstractContextManager):
    """The rewards of a spec, run in a pool of processes that is started once.

        verify = Verifier("math:1,format:0.2", workers=8, timeout=5.0)
        rewards, parts, metrics = verify(completions, answer=answers, prompts=prompts)

    rewards   one value per completion: the weighted sum of its parts that are not None; None if all
              are None, or if one timed out or crashed, unless its spec has a value ("math:1:0")
    parts     {name: one unweighted value per completion}; None where a row does not name it
    metrics   reward/timeouts and reward/crashes: how many calls did

    A column that is a list holds one value per completion. Any other column and the settings
    (max_tokens, random_seed, ...) reach every call unchanged. A call gets one completion, `timeout`
    seconds and memory_mb. Two columns are added: index (position in the batch) and, for whole_batch
    functions, correct (the first part that is not one of them). The first crash of each function is
    printed to stderr; its last line is in the dict `crashes`.

    Raises ValueError for a bad spec or a reward that cannot be imported or fails its check,
    RuntimeError or OSError if no process starts. All have one line."""

    def __init__(self, spec, workers=None, timeout=5.0, messages=False,
                 memory_mb=512, *, known, **settings):
        settings |= {"timeout": timeout}
        self.pool = Pool(_make_handler, (spec, known, settings), workers, timeout, memory_mb << 20)
        self.messages = messages
        self.weights, self.traits = self.pool.facts  # {name: [weight, value]}, {...}
        self.crashes = {}  # name of a function -> last line of its first crash

    def __call__(self, completions, /, **columns):
        """Judge a batch: returns (rewards, parts, metrics), see the class."""
        n = len(completions)
        columns["index"] = list(range(n))
        if self.messages:
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        values = {name: [None] * n for name in self.traits}
        single = [name for name, traits in self.traits.items() if not traits.whole_batch]
        batched = [name for name, traits in self.traits.items() if traits.whole_batch]
        calls = []
        for i in range(n):
            calls += [(name, [i]) for name in single]
        errors = self._judge(calls, completions, columns, values)
        if single:
            columns["correct"] = values[single[0]]
        calls = [(name, range(n)) for name in batched]
        errors += self._judge(calls, completions, columns, values)
        timeouts = sum(error == Pool.TIMEOUT for *_, error in errors)
        metrics = {"reward/timeouts": timeouts, "reward/crashes": len(errors) - timeouts}
        return self._weighted_sums(values, errors), values, metrics

    def _weighted_sums(self, values, errors):
        """The reward of each completion: see `rewards` of the class."""
        rewards = []
        failed = {i for name, i, _ in errors if values[name][i] is None}
        for i, row in enumerate(zip(*values.values())):
            parts = []
            for name, value in zip(values, row):
                if value is not None:
                    weight, _ = self.weights[name]
                    parts.append(weight * value)
            rewards.append(sum(parts) if parts and i not in failed else None)
        return rewards

    def _judge(self, calls, completions, columns, values):
        """Make calls (name of a function, indices of completions) and enter what they return.
        Returns [(name, index of a completion, error)] for those that failed."""
        tasks = []
        for name, rows in calls:
            arguments = {}
            for key, column in columns.items():
                one_each = isinstance(column, (list, tuple))
                arguments[key] = [column[i] for i in rows] if one_each else column
            tasks.append((name, [completions[i] for i in rows], arguments))
        waits = [self.traits[name].waits for name, _ in calls]
        results = self.pool.run(tasks, waits)
        errors = []
        for (name, rows), task, result in zip(calls, tasks, results):
            if isinstance(result, str):
                errors += [(name, i, result) for i in rows]
                if result != Pool.TIMEOUT and name not in self.crashes:
                    self._report_crash(task, result)
                _, value = self.weights[name]
                result = [value] * len(rows)
            for i, value in zip(rows, result):
                values[name][i] = value
        return errors

    def _report_crash(self, task, error):
        """Prints the first crash of a function, with the completion and its columns."""
        name, completions, columns = task
        self.crashes[name] = f"{name}: {_last_line(error)}"
        print(f"reward {name!r} crashed (printed once, then counted in reward/crashes) on "
              f"completion {repr(completions)[:500]} of {repr(columns)[:500]}\n{plain(error)}",
              file=sys.stderr)

    def check_columns(self, examples, source):
        """Raises ValueError if a reward function needs a column that is None or missing in all of
        the `examples` (dicts). `source` is their name."""
        for name, traits in self.traits.items():
            for column in sorted(traits.needs - ADDED_COLUMNS):
                if all(example.get(column) is None for example in examples):
                    raise ValueError(
                        f"reward {name}: it reads the column '{column}', which {source} does not "
                        f"have (it has {', '.join(map(str, examples[0]))})")

    def count_unreadable(self, examples, notify=print):
        """Call notify(text) for each reward that cannot read some gold answers of the `examples`
        (dicts) that it judges. Raises ValueError if it can read none.

        Each judges an empty completion of every example; of more than 256, of an even sample."""
        sample = examples[::len(examples) // 257 + 1]
        for name, traits in self.traits.items():
            if not traits.reads_gold:
                continue
            tasks = []
            for example in sample:
                columns = {key: [value] for key, value in example.items()}
                tasks.append((name, [""], columns))
            results = self.pool.run(tasks)
            unreadable = [(x, example) for x, example in zip(results, sample) if x != [0.0]]
            if not unreadable:
                continue
            result, example = unreadable[0]
            reason = f"one is {str(example.get('answer'))[:200]!r}"
            if isinstance(result, str):
                reason = _last_line(result)
            says = (f"reward {name}: {len(unreadable)} of {len(sample)} answers cannot be read, "
                    f"{reason}")
            if len(unreadable) == len(sample):
                raise ValueError(f"{says}; choose another reward or --answer_key")
            notify(f"{says}; their completions get no reward")

    def close(self, *_):
        """End the worker processes."""
        self.pool.close()

    __exit__ = close


def text_of(completion):
    """The text of a completion: a string, or the joined contents of TRL's list of messages.

    >>> text_of([{"role": "assistant", "content": "72"}])
    '72'
    """
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion)


def _last_line(error):
    return error.strip().splitlines()[-1]


def _make_handler(spec, known, settings):
    """Runs in the fork server."""
    functions = {}
    weights = {}
    for name, numbers, where in parse_spec(spec, known):
        functions[name] = load(where)
        weights[name] = numbers
    for function in functions.values():
        if hasattr(function, "check"):
            function.check(**settings)
        if hasattr(function, "warm"):
            function.warm()

    def handle(task):
        name, completions, columns = task
        return _call(functions[name], completions, columns | settings)

    traits = {name: _traits(name, function, settings) for name, function in functions.items()}
    return handle, (weights, traits)


def _traits(name, function, settings):
    """Raises ValueError if the function cannot be called with `completions`."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [p.name for p in parameters]
    if "completions" not in names and hasattr(function, "__wrapped__"):
        parameters = parameters[1:]  # @each: the first parameter is the text of a completion
    elif "completions" not in names and not _takes_any(parameters):
        raise ValueError(f"--rewards {name}: it is no reward function, which is "
                         "f(completions, **columns)")
    needs = set()
    for p in parameters:
        is_column = p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != "completions"
        if is_column and p.default is p.empty:
            needs.add(p.name)
    return Traits(
        needs=needs - settings.keys(),
        whole_batch=getattr(function, "whole_batch", False),
        waits=getattr(function, "waits", False),
        reads_gold=getattr(function, "reads_gold", False))


def _takes_any(parameters):
    """Whether a function has **columns."""
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _call(function, completions, columns):
    """Returns a list with a number or None per completion, or an error as text."""
    try:
        parameters = inspect.signature(function).parameters
        if not _takes_any(parameters.values()):
            columns = {name: value for name, value in columns.items() if name in parameters}
        values = function(completions=completions, **columns)
        if inspect.isawaitable(values):
            values = asyncio.run(values)
        numbers = [] if isinstance(values, (str, bytes, dict, set)) else list(values)
        for i, x in enumerate(numbers):
            is_none = x is None or math.isnan(x)  # nan is TRL's form of None
            numbers[i] = None if is_none else float(x)
        if len(numbers) != len(completions) or {math.inf, -math.inf} & set(numbers):
            raise ValueError(f"returned {str(values)[:200]}, no list with a finite number or None "
                             f"for each of {len(completions)} completions")
        return numbers
    except TimeoutError:
        return Pool.TIMEOUT
    except BaseException:  # SystemExit too: a reward function must not end the worker
        return traceback.format_exc(limit=-5)


def parse_spec(spec, known):
    """Parse "name:weight:value,..." into [(name, [weight, value], "module:function"), ...].

    A name is a key of `known`, whose value is its "module:function", or it is
    "my_file.py:function" or "installed.module:function". The weight is by default 1, the value of a
    call that times out or crashes None. Imports nothing. A one-line ValueError for anything else.

    >>> parse_spec("gsm8k:1:0,my_file.py:brief:0.1", {"gsm8k": "rewards:gsm8k_reward"})
    [('gsm8k', [1.0, 0.0], 'rewards:gsm8k_reward'), ('brief', [0.1, None], 'my_file.py:brief')]
    """
    parts = []
    for item in map(str.strip, spec.split(",")):
        name, *rest = item.split(":")
        where = known.get(name)
        if where is None:
            if not rest:
                raise ValueError(f"unknown reward {name!r}; known: {', '.join(known)}; or "
                                 "my_file.py:function, module:function")
            where = f"{name}:{rest[0]}"
            name, *rest = rest
        try:
            numbers = [float(number) for number in rest] or [1.0]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2) or not all(map(math.isfinite, numbers)):
            raise ValueError(f"reward {item!r}: its weight must be a finite number")
        parts.append((name, [*numbers, None][:2], where))
    return parts
