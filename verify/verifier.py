"""Runs the rewards of a spec in processes that can be killed (pool.py), weights and adds them."""
import asyncio
import functools
import importlib.util
import inspect
import math
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

from verify.pool import Pool

WAITING = 64  # calls of functions that wait for a network, at a time
ATTRIBUTES = ("whole_batch", "waits", "reads_gold")
ADDED_COLUMNS = {"prompts", "step", "completion_ids", "index", "correct"}  # by the trainer and by Verifier


class Verifier:
    """The rewards of a spec, run in a pool of processes that is started once.

        verify = Verifier("math:1,format:0.2", workers=8, timeout=5.0)
        rewards, parts, metrics = verify(completions, answer=answers, prompts=prompts)

    rewards   one value per completion: the weighted sum of its parts that are not None; None if all parts
              are None, or if one of them timed out or crashed
    parts     {name: one unweighted value per completion}
    metrics   reward/timeouts and reward/crashes: completions of this batch that have no verdict for that

    The first crash of each function is printed to stderr; its last line is in the dict `crashes`. A column
    that is a list holds one value per completion. Any other column and the settings (max_tokens, judge_url,
    ...) reach every call unchanged. A call gets one completion; it may take `timeout` seconds and memory_mb
    of memory. One that raises TimeoutError counts as timed out. Two columns are added: index (position in the
    batch) and, for whole_batch functions, correct (the first part that is not one of them).

    A reward function may have these attributes:

    whole_batch   True: it gets all completions in one call, after the other functions
    waits         True: it waits for a network more than it computes, so 64 of its calls run at a time
    warm          a function, called once before the workers are forked, to import modules and fill caches
    check         a function of the settings, called before `warm`: raises ValueError with one line if the
                  reward cannot work
    reads_gold    True: it gives None to an empty completion exactly if it cannot read the gold answer

    `parser` names the function spec -> [(name, weight, function), ...] as "module:function". It is a name
    because only processes that can be killed import a user's file. rewards.Verifier fills it in.

    Raises ValueError for a bad spec or a reward that cannot be imported or fails its check, RuntimeError if
    no process starts. Both have one line.
    """

    def __init__(self, spec, workers=None, timeout=5.0, messages=False, allow_unsafe_code=False,
                 memory_mb=512, *, parser, **settings):
        settings = {"timeout": timeout, "allow_unsafe_code": allow_unsafe_code, **settings}

        def start(workers, check):
            args = (parser, spec, settings, check)
            return Pool("verify.verifier:_make_handler", args, workers, timeout, memory_mb << 20)

        self.pool = start(workers, check=True)
        self.weights = {name: weight for name, weight, *_ in self.pool.about}
        self.needed = {name: columns - settings.keys() for name, _, columns, _ in self.pool.about}
        self.batch_names, waiting, self.gold_names = (
            [name for name, *_, attributes in self.pool.about if attributes[key]] for key in ATTRIBUTES)
        self.names = [name for name in self.weights if name not in self.batch_names]
        waiting = [name for name in self.names if name in waiting]
        self.pools = [(self.pool, [name for name in self.names if name not in waiting])]
        if waiting:
            self.pools.append((start(WAITING, check=False), waiting))
        self.messages = messages
        self.crashes = {}  # name of a function -> last line of its first crash

    def __call__(self, completions, **columns):
        """Judge a batch: returns (rewards, parts, metrics), see the class."""
        return self.submit(completions, **columns).result()

    def submit(self, completions, **columns):
        """The same without waiting: returns a handle whose result() waits.

        Raises ValueError if a column has another number of values than there are completions.
        """
        n = len(completions)
        columns["index"] = list(range(n))
        lists = {name: values for name, values in columns.items() if isinstance(values, (list, tuple))}
        for name, values in lists.items():
            if len(values) != n:
                raise ValueError(f"column {name!r} has {len(values)} values for {n} completions")
        if self.messages:
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        rows = [columns | {name: values[i:i + 1] for name, values in lists.items()} for i in range(n)]
        jobs = []  # a task per completion, for all functions of a pool that judge single completions
        for pool, names in self.pools:
            tasks = [(names, completions[i:i + 1], row) for i, row in enumerate(rows) if names]
            jobs.append((tasks, pool.submit(tasks, len(names))))
        collect = functools.partial(self._collect, jobs, completions, columns)
        return SimpleNamespace(result=functools.cache(collect))

    def weights_of(self, spec=None):
        """{name: weight} of the reward functions that judge a row."""
        return self.weights

    def check_columns(self, examples, source):
        """Raises ValueError if a reward function needs a column that none of `examples` (dicts) has. `source`
        is their name."""
        columns = dict.fromkeys(key for example in examples for key in example)  # in their order
        columns.pop("prompt_ids", None)  # the trainer's
        for name, needed in self.needed.items():
            for column in sorted(needed - columns.keys() - ADDED_COLUMNS):
                raise ValueError(f"--rewards {name}: it reads the column '{column}', which {source} does not "
                                 f"have (it has {', '.join(map(str, columns))})")

    def count_unreadable(self, examples, notify=print, at_most=256):
        """Call notify(text) for each reward that cannot read some gold answers of `examples` (dicts). Raises
        ValueError if it can read none.

        Each reward judges an empty completion of every example; of more than `at_most`, of an even sample.
        """
        sample = examples[::math.ceil(len(examples) / at_most) or 1]
        rows = [{key: [value] for key, value in example.items()} for example in sample]
        for name in self.gold_names:
            results = self.pool.submit([([name], [""], row) for row in rows], 1).result()
            bad = [example for example, (result,) in zip(sample, results) if result != [0.0]]
            if bad and len(bad) == len(sample):
                raise ValueError(f"reward {name}: none of {len(bad)} answers can be read; choose another "
                                 f"reward or --answer_key; one is {str(bad[0].get('answer'))[:200]!r}")
            if bad:
                of = f" (an even sample of {len(examples)})" if len(sample) < len(examples) else ""
                notify(f"reward {name}: {len(bad)} of {len(sample)} answers cannot be read{of}, and their "
                       f"completions get no verdict; one is {str(bad[0].get('answer'))[:200]!r}")

    def _collect(self, jobs, completions, columns):
        parts = {name: [None] * len(completions) for name in self.weights}
        failed = set()  # indices of completions with a part that timed out or crashed
        metrics = {"reward/timeouts": 0.0, "reward/crashes": 0.0}
        for tasks, future in jobs:
            self._store(tasks, future.result(), parts, failed, metrics)
        if self.batch_names and completions:
            if self.names:
                columns = columns | {"correct": parts[self.names[0]]}
            tasks = [(self.batch_names, completions, columns)]
            future = self.pool.submit(tasks, len(self.batch_names))
            self._store(tasks, future.result(), parts, failed, metrics)
        rewards = []
        for i in range(len(completions)):
            values = [w * parts[name][i] for name, w in self.weights.items() if parts[name][i] is not None]
            rewards.append(sum(values) if values and i not in failed else None)
        return rewards, parts, metrics

    def _store(self, tasks, all_results, parts, failed, metrics):
        """Enter results into parts, failed and metrics. A result is a list of values or an error as text."""
        for (names, completions, row), results in zip(tasks, all_results):
            for name, result in zip(names, results):
                if isinstance(result, list):
                    for i, value in zip(row["index"], result):
                        parts[name][i] = value
                    continue
                failed.update(row["index"])
                if result == Pool.TIMEOUT:
                    metrics["reward/timeouts"] += len(completions)
                    continue
                metrics["reward/crashes"] += len(completions)
                if name not in self.crashes:
                    self.crashes[name] = f"{name}: {result.strip().splitlines()[-1]}"
                    sample = f"{repr(completions)[:500]} of {repr(row)[:500]}"
                    print(f"reward {name!r} crashed (printed once, then counted in reward/crashes) "
                          f"on completion {sample}\n{result}", file=sys.stderr)

    def close(self):
        """End the worker processes."""
        for pool, _ in self.pools:
            pool.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _make_handler(parser, spec, settings, check):
    """Runs in the fork server. The handler it returns runs in a worker and yields one result per function."""
    parts = load(*parser.split(":"))(spec)
    for _, _, function in parts:
        if check and hasattr(function, "check"):
            function.check(**settings)
        if hasattr(function, "warm"):
            function.warm()
    functions = {name: function for name, _, function in parts}

    def handle(task):
        names, completions, columns = task
        for name in names:
            yield _call(functions[name], completions, settings | columns)

    handle.about = [(name, weight, _needed_columns(name, function),
                     {key: getattr(function, key, False) for key in ATTRIBUTES})
                    for name, weight, function in parts]
    return handle


def _needed_columns(name, function):
    """The columns without which a reward function fails: parameters without a default.

    Raises ValueError if it cannot be called with `completions`.
    """
    try:
        called = inspect.signature(function, follow_wrapped=False).parameters.values()
        read = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # some functions written in C
        called = read = []
    if not any(p.name == "completions" or p.kind is p.VAR_KEYWORD for p in called):
        raise ValueError(f"--rewards {name}: it is no reward function, which is f(completions, **columns)")
    if hasattr(function, "__wrapped__"):  # @each: the first parameter is the text of a completion
        read = read[1:]
    return {p.name for p in read if p.default is p.empty and p.name != "completions"
            and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def _call(function, completions, columns):
    """Returns a list with a float or None per completion, or the traceback as text."""
    try:
        parameters = inspect.signature(function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            columns = {name: value for name, value in columns.items() if name in parameters}
        values = function(completions=completions, **columns)
        values = asyncio.run(values) if inspect.isawaitable(values) else values
        if isinstance(values, (str, bytes, dict, set)):
            raise TypeError(f"returned {str(values)[:200]}, no list with a number or None per completion")
        values = [None if v is None or math.isnan(v) else float(v) for v in values]  # nan: TRL's form of None
        if len(values) != len(completions) or any(v is not None and math.isinf(v) for v in values):
            raise ValueError(f"returned {str(values)[:200]} for {len(completions)} completions")
        return values
    except TimeoutError:
        return Pool.TIMEOUT
    except BaseException:  # SystemExit too: a reward function must not end the worker
        return traceback.format_exc(limit=-5)


@functools.cache
def load(module, name):
    """The function `name` of "my_file.py" or "installed.module"; a one-line ValueError if there is none."""
    path = Path(module).resolve() if module.endswith(".py") else None
    if path and not path.is_file():
        raise ValueError(f"reward file {module!r} does not exist")
    try:
        if path:
            if str(path.parent) not in sys.path:
                sys.path.append(str(path.parent))  # the file may import its neighbours
            spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
            found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        else:
            found = importlib.import_module(module)
        function = getattr(found, name)
    except (Exception, SystemExit) as e:  # a user's file: any type
        frames = traceback.extract_tb(e.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        at = f" (line {lines[-1]})" if lines else ""  # a SyntaxError names its line itself
        text = " ".join(f"{type(e).__name__}: {e}".split())
        raise ValueError(f"reward {module}:{name}: {text[:500]}{at}") from None
    if not callable(function):
        raise ValueError(f"reward {module}:{name} is not a function")
    return function
