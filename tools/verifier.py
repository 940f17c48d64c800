"""Runs the rewards of a spec in processes that can be killed (sandbox.Pool), weighs and adds them."""
import asyncio
import functools
import importlib.util
import inspect
import math
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import sandbox


class Verifier:
    """The rewards of a spec, run in a pool of processes that was started once.

        verify = Verifier("math:1,format:0.2", workers=8, timeout=5.0)
        rewards, parts, metrics = verify(completions, answer=answers, prompts=prompts)

    rewards: per completion the weighted sum of its parts; a part that is None is left out, and a sample without parts, or
    with one that timed out or crashed, is None. parts: by name, unweighted. metrics: reward/timeouts and reward/crashes
    of this batch. The first crash of each function is told on stderr.

    A column with one value a completion is dealt out; anything else (a number, a string) and the settings (max_tokens,
    judge_url, …) reach every call as they are. A call sees one completion and may take `timeout` seconds and memory_mb.
    A function with the attribute `whole_batch = True` sees all completions in one call, after the rest; an attribute
    `warm` is called once, at the start. Columns added here: index (place in the batch) and, for whole_batch functions,
    correct (the first part that is not one of them).

    Raises ValueError for a bad spec, sandbox.NoIsolation for `code` without a jail, RuntimeError if no worker starts.
    """

    def __init__(self, spec, workers=None, timeout=5.0, messages=False, allow_unsafe_code=False, memory_mb=512, **settings):
        from rewards import code_reward, parse_rewards  # here: rewards imports this file

        parts = parse_rewards(spec)
        if any(function is code_reward for _, _, function in parts):
            sandbox.jail(allow_unsafe_code)  # refuse now, not at the first batch
        settings = {"timeout": timeout, "allow_unsafe_code": allow_unsafe_code, **settings}
        self.weights, self.messages, self.told = {name: weight for name, weight, _ in parts}, messages, set()
        self.whole = [name for name, _, function in parts if getattr(function, "whole_batch", False)]
        self.single = [name for name in self.weights if name not in self.whole]
        self.pool = sandbox.Pool("tools.verifier:_handler", (spec, settings), workers, timeout, memory_mb << 20)

    def __call__(self, completions, **columns):
        """(rewards, parts, metrics) of a batch; see the class."""
        return self.submit(completions, **columns).result()

    def submit(self, completions, **columns):
        """The same without waiting: a handle whose result() waits. ValueError if a column has not one value each."""
        n = len(completions)
        columns["index"] = list(range(n))
        dealt = {name: values for name, values in columns.items() if isinstance(values, (list, tuple))}
        for name, values in dealt.items():
            if len(values) != n:
                raise ValueError(f"column {name!r} has {len(values)} values for {n} completions")
        if self.messages:
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        tasks = [(self.single, completions[i:i + 1], columns | {name: values[i:i + 1] for name, values in dealt.items()})
                 for i in range(n) if self.single]
        future = self.pool.submit(tasks, len(self.single))
        return SimpleNamespace(result=functools.cache(lambda: self._collect(tasks, future, completions, columns)))

    def _collect(self, tasks, future, completions, columns):
        parts, lost = {name: [None] * len(completions) for name in self.weights}, set()
        metrics = {"reward/timeouts": 0.0, "reward/crashes": 0.0}

        def enter(tasks, future):
            for (names, texts, row), results in zip(tasks, future.result()):
                for name, result in zip(names, results):
                    if isinstance(result, list):
                        for i, value in zip(row["index"], result):
                            parts[name][i] = value
                        continue
                    lost.update(row["index"])
                    metrics["reward/timeouts" if result == sandbox.Pool.TIMEOUT else "reward/crashes"] += 1
                    if result != sandbox.Pool.TIMEOUT and name not in self.told:
                        self.told.add(name)
                        print(f"reward {name!r} crashed (told once, then counted in reward/crashes) on completion "
                              f"{repr(texts)[:500]} of {repr(row)[:500]}\n{result}", file=sys.stderr)

        enter(tasks, future)
        if self.whole and completions:
            task = self.whole, completions, columns | ({"correct": parts[self.single[0]]} if self.single else {})
            enter([task], self.pool.submit([task], len(self.whole)))
        rewards = []
        for i in range(len(completions)):
            given = [weight * parts[name][i] for name, weight in self.weights.items() if parts[name][i] is not None]
            rewards.append(sum(given) if given and i not in lost else None)
        return rewards, parts, metrics

    def close(self):
        """Ends the worker processes."""
        self.pool.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _handler(spec, settings):
    """Runs in the pool's mother process; what it returns runs in a worker: yields one result a reward function."""
    from rewards import parse_rewards

    functions = {name: function for name, _, function in parse_rewards(spec)}
    for function in functions.values():
        getattr(function, "warm", lambda: None)()  # import what it needs once, here, instead of in every worker and on its time

    def handle(task):
        names, completions, columns = task
        for name in names:
            yield _call(functions[name], completions, settings | columns)

    return handle


def _call(function, completions, columns):
    """-> list of float or None, or the traceback as text."""
    try:
        known = inspect.signature(function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            columns = {name: value for name, value in columns.items() if name in known}
        values = function(completions=completions, **columns)
        values = asyncio.run(values) if inspect.isawaitable(values) else values
        values = [None if v is None or math.isnan(v) else float(v) for v in values]  # nan is how TRL itself writes None
        if len(values) != len(completions) or any(map(math.isinf, filter(None, values))):
            raise ValueError(f"returned {str(values)[:200]} for {len(completions)} completions")
        return values
    except BaseException:  # SystemExit too: a reward function must not end a worker
        return traceback.format_exc(limit=-5)


def load(where, name):
    """The function `name` of "my_file.py" or "installed.module"; ValueError, in one line, if there is none."""
    try:
        if where.endswith(".py"):
            path = Path(where).resolve()
            if not path.is_file():
                raise ValueError(f"reward file {where!r} does not exist")
            sys.path += [str(path.parent)] * (str(path.parent) not in sys.path)  # it may import its neighbours
            plan = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
            module = sys.modules[plan.name] = importlib.util.module_from_spec(plan)
            plan.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        function = getattr(module, name)
    except (AttributeError, ImportError) as e:
        raise ValueError(f"reward {where}:{name}: {e}") from None
    if not callable(function):
        raise ValueError(f"reward {where}:{name} is not a function")
    return function
