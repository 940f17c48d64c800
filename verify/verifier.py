"""Runs the rewards of a spec in processes that can be killed (pool.py), weights and adds them."""
import asyncio
import functools
import importlib.util
import inspect
import itertools
import math
import operator
import sys
import traceback
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

from verify.pool import Pool

WAITING = 64  # calls of functions that wait for a network, at a time
ATTRIBUTES = ("whole_batch", "waits", "reads_gold")
# by the trainer and by Verifier
ADDED_COLUMNS = {"prompts", "step", "sample_index", "completion_ids", "index", "correct"}


class Verifier:
    """The rewards of a spec, run in a pool of processes that is started once.

        verify = Verifier("math:1,format:0.2", workers=8, timeout=5.0)
        rewards, parts, metrics = verify(completions, answer=answers, prompts=prompts)

    rewards   one value per completion: the weighted sum of its parts that are not None; None if all parts
              are None, or if one of them timed out or crashed. A list of steps where a function gave steps
    parts     {name: one unweighted value per completion}; for steps the mean of their values: 1 if every
              step is right. None also where the row's spec does not name the function
    metrics   reward/timeouts and reward/crashes: completions of this batch that have no verdict for that

    A step is (end, value): `end` is the number of characters of the text that it covers, 1..len(text), and
    rises from step to step. If a function with a weight other than 0 gives steps for a completion, the steps
    of all functions are weighted, added where they end at the same place, and sorted; a number of another
    function is a step at the end of the text. Functions with weight 0 add no steps. A completion without
    steps has no verdict.

    The column `reward` may hold a spec per completion, which then replaces `spec` (None or "": `spec`
    itself). All of them are given in row_specs, which may contain them more than once.

    The first crash of each function is printed to stderr; its last line is in the dict `crashes`. A column
    that is a list holds one value per completion. Any other column and the settings (max_tokens, judge_url,
    ...) reach every call unchanged. A call gets one completion; it may take `timeout` seconds and memory_mb
    of memory. One that raises TimeoutError counts as timed out. Two columns are added: index (position in the
    batch) and, for whole_batch functions, correct (the first part that is not one of them).

    A reward function may have these attributes:

    whole_batch   True: it gets all completions of a spec in one call, after the other functions
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
                 memory_mb=512, *, parser, row_specs=(), **settings):
        settings = {"timeout": timeout, "allow_unsafe_code": allow_unsafe_code, **settings}
        specs = [spec, *(other for other in row_specs if other not in (None, ""))]
        for other in specs:
            if not isinstance(other, str):
                raise ValueError(f"column 'reward': {str(other)[:200]} is no text such as math:1,format:0.1")

        def start(workers, check):
            args = (parser, list(dict.fromkeys(specs)), settings, check)
            return Pool("verify.verifier:_make_handler", args, workers, timeout, memory_mb << 20)

        self.pool = start(workers, check=True)
        self.spec = spec
        self.weights, functions = self.pool.about  # {spec: {name: weight}}, {name: (columns, attributes)}
        self.needed = {name: columns - settings.keys() for name, (columns, _) in functions.items()}
        self.batch_names, waiting, self.gold_names = (
            [name for name, (_, attributes) in functions.items() if attributes[key]] for key in ATTRIBUTES)
        names = [name for name in functions if name not in self.batch_names]
        waiting = [name for name in names if name in waiting]
        self.pools = [(self.pool, [name for name in names if name not in waiting])]
        if waiting:
            self.pools.append((start(WAITING, check=False), waiting))
        self.messages = messages
        self.crashes = {}  # name of a function -> last line of its first crash

    def __call__(self, completions, **columns):
        """Judge a batch: returns (rewards, parts, metrics), see the class."""
        return self.submit(completions, **columns).result()

    def weights_of(self, spec=None):
        """{name: weight}, in their order, of the spec of a row; of the Verifier's own one for None and "".

        Raises ValueError for a spec that was not in row_specs.
        """
        return self.weights[self._known(spec)]

    def _known(self, spec):
        spec = self.spec if spec in (None, "") else spec
        if not isinstance(spec, str) or spec not in self.weights:
            raise ValueError(f"column 'reward': {str(spec)[:200]!r} was not in row_specs at the start")
        return spec

    def submit(self, completions, **columns):
        """The same without waiting: returns a handle whose result() waits.

        Raises ValueError if a column has another number of values than there are completions, or for a spec
        that was not in row_specs.
        """
        n = len(completions)
        columns["index"] = list(range(n))
        for name, values in columns.items():
            if isinstance(values, (list, tuple)) and len(values) != n:
                raise ValueError(f"column {name!r} has {len(values)} values for {n} completions")
        if self.messages:
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        specs = columns.get("reward")
        rows_of = {}  # spec -> indices of the completions that it judges
        for i, spec in enumerate(specs if isinstance(specs, (list, tuple)) else [specs] * n):
            rows_of.setdefault(self._known(spec), []).append(i)
        jobs = []  # a task per completion, for all functions of a pool that judge single completions
        for spec, rows in rows_of.items():
            for pool, pool_names in self.pools:
                names = [name for name in self.weights[spec] if name in pool_names]
                tasks = [(names, *_select(completions, columns, [i])) for i in rows if names]
                jobs.append((tasks, pool.submit(tasks, len(names))))
        collect = functools.partial(self._collect, jobs, completions, columns, rows_of)
        return SimpleNamespace(result=functools.cache(collect))

    def _judged_by(self, name, examples):
        return [example for example in examples if name in self.weights_of(example.get("reward"))]

    def check_columns(self, examples, source):
        """Raises ValueError if a reward function needs a column that is None or missing in all of the
        `examples` (dicts) that it judges. `source` is their name."""
        for name, needed in self.needed.items():
            judged = self._judged_by(name, examples)
            columns = dict.fromkeys(  # in their order
                key for example in judged for key, value in example.items() if value is not None)
            columns.pop("prompt_ids", None)  # the trainer's
            flag = "--rewards" if name in self.weights_of() else "column 'reward',"
            rows = "" if len(judged) == len(examples) else " in the rows with this reward"
            for column in sorted(needed - columns.keys() - ADDED_COLUMNS) if judged else ():
                raise ValueError(f"{flag} {name}: it reads the column '{column}', which {source} does not "
                                 f"have{rows} (it has {', '.join(map(str, columns))})")

    def count_unreadable(self, examples, notify=print, at_most=256):
        """Call notify(text) for each reward that cannot read some gold answers of the `examples` (dicts) that
        it judges. Raises ValueError if it can read none.

        Each reward judges an empty completion of every example; of more than `at_most`, of an even sample.
        """
        for name in self.gold_names:
            judged = self._judged_by(name, examples)
            sample = judged[::math.ceil(len(judged) / at_most) or 1]
            rows = [{key: [value] for key, value in example.items()} for example in sample]
            results = self.pool.submit([([name], [""], row) for row in rows], 1).result()
            bad = [example for example, (result,) in zip(sample, results) if result != [0.0]]
            if bad and len(bad) == len(sample):
                raise ValueError(f"reward {name}: none of {len(bad)} answers can be read; choose another "
                                 f"reward or --answer_key; one is {str(bad[0].get('answer'))[:200]!r}")
            if bad:
                of = f" (an even sample of {len(judged)})" if len(sample) < len(judged) else ""
                notify(f"reward {name}: {len(bad)} of {len(sample)} answers cannot be read{of}, and their "
                       f"completions get no verdict; one is {str(bad[0].get('answer'))[:200]!r}")

    def _collect(self, jobs, completions, columns, rows_of):
        values = {name: [None] * len(completions) for name in self.needed}  # numbers, None, or lists of steps
        failed = set()  # indices of completions with a part that timed out or crashed
        metrics = {"reward/timeouts": 0.0, "reward/crashes": 0.0}
        for tasks, future in jobs:
            self._store(tasks, future.result(), values, failed, metrics)
        parts = {name: [_part(value) for value in column] for name, column in values.items()}
        for spec, rows in rows_of.items():
            names = [name for name in self.weights[spec] if name in self.batch_names]
            judged, row = _select(completions, columns, rows)
            if first := next((name for name in self.weights[spec] if name not in names), None):
                row["correct"] = [parts[first][i] for i in rows]
            tasks = [(names, judged, row)] if names else []
            self._store(tasks, self.pool.submit(tasks, len(names)).result(), values, failed, metrics)
        parts |= {name: [_part(value) for value in values[name]] for name in self.batch_names}
        rewards = [None] * len(completions)
        for spec, rows in rows_of.items():
            for i in rows:
                given = [(weight, values[name][i]) for name, weight in self.weights[spec].items()
                         if values[name][i] is not None]
                if given and i not in failed:
                    rewards[i] = _weighted(given, completions[i])
        return rewards, parts, metrics

    def _store(self, tasks, all_results, values, failed, metrics):
        """Enter results into values, failed and metrics. A result is a list of values or an error as text."""
        for (names, completions, row), results in zip(tasks, all_results):
            for name, result in zip(names, results):
                if isinstance(result, list):
                    for i, value in zip(row["index"], result):
                        values[name][i] = value
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


def text_of(completion):
    """The text of a completion: a string, or the joined contents of TRL's list of messages.

    >>> text_of([{"role": "assistant", "content": "72"}])
    '72'
    """
    return completion if isinstance(completion, str) else "".join(m.get("content") or "" for m in completion)


def _select(completions, columns, rows):
    """The completions with the indices `rows`, and the columns with their values."""
    return [completions[i] for i in rows], {
        name: [values[i] for i in rows] if isinstance(values, (list, tuple)) else values
        for name, values in columns.items()}


def _part(value):
    """A part: the mean of the values of a list of steps; a number or None as it is."""
    return fmean(x for _, x in value) if isinstance(value, list) else value


def _weighted(given, completion):
    """The reward of a completion from pairs (weight, number or list of steps): a number, or a list of steps.

    >>> _weighted([(1.0, [(2, 1.0), (5, 0.0)]), (0.5, 1.0), (0.0, [(3, 1.0)])], "14+2=16")
    [(2, 1.0), (5, 0.0), (7, 0.5)]
    """
    if not any(weight and isinstance(value, list) for weight, value in given):
        return sum(weight * _part(value) for weight, value in given)
    steps = {}
    for weight, value in given:
        value = value if isinstance(value, list) else [(len(text_of(completion)), value)]
        for end, x in value if weight else ():
            steps[end] = steps.get(end, 0.0) + weight * x
    return sorted(steps.items())


def _make_handler(parser, specs, settings, check):
    """Runs in the fork server. The handler it returns runs in a worker and yields one result per function.

    specs: the Verifier's own, then those of rows.
    """
    parse, functions, weights = load(*parser.split(":")), {}, {}
    for spec in specs:
        try:
            parts = parse(spec)
            for name, _, function in parts:
                if functions.setdefault(name, function) is not function:
                    raise ValueError(f"another reward is named {name!r} too")
        except ValueError as e:
            of_row = "" if spec == specs[0] else f"column 'reward', {spec[:200]!r}: "
            raise ValueError(f"{of_row}{e}") from None
        weights[spec] = {name: weight for name, weight, _ in parts}
    for function in functions.values():
        if check and hasattr(function, "check"):
            function.check(**settings)
        if hasattr(function, "warm"):
            function.warm()

    def handle(task):
        names, completions, columns = task
        for name in names:
            yield _call(functions[name], completions, settings | columns)

    handle.about = weights, {name: (_needed_columns(name, function),
                                    {key: getattr(function, key, False) for key in ATTRIBUTES})
                             for name, function in functions.items()}
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
    """Returns a list with a float, None or a list of steps per completion, or the traceback as text."""
    try:
        parameters = inspect.signature(function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            columns = {name: value for name, value in columns.items() if name in parameters}
        values = function(completions=completions, **columns)
        values = asyncio.run(values) if inspect.isawaitable(values) else values
        if isinstance(values, (str, bytes, dict, set)):
            raise TypeError(f"returned {str(values)[:200]}, no list with a number or None per completion")
        values = list(values)
        if len(values) != len(completions):
            raise ValueError(f"returned {str(values)[:200]} for {len(completions)} completions")
        return [_checked(value, completion) for value, completion in zip(values, completions)]
    except TimeoutError:
        return Pool.TIMEOUT
    except BaseException:  # SystemExit too: a reward function must not end the worker
        return traceback.format_exc(limit=-5)


def _checked(value, completion):
    """What a function returned for a completion as a float, None or a list of steps, see Verifier."""
    if not isinstance(value, (list, tuple)):
        if value is None or math.isnan(value):  # nan: TRL's form of None
            return None
        if math.isinf(value):
            raise ValueError(f"returned {value}")
        return float(value)
    try:
        steps = [(operator.index(end), float(x)) for end, x in value]
    except (TypeError, ValueError):
        raise TypeError(f"returned {str(value)[:200]}: a step must be (end, value), an int and a number"
                        ) from None
    ends = [0, *(end for end, _ in steps)]
    rise = all(a < b for a, b in itertools.pairwise(ends)) and ends[-1] <= len(text_of(completion))
    if not rise or not all(math.isfinite(x) for _, x in steps):
        raise ValueError(f"returned {str(value)[:200]}: the ends of the steps must rise within 1..len(text), "
                         f"here {len(text_of(completion))}, and their values must be finite")
    return steps or None


@functools.cache  # a file named by several specs gives the same function
def load(module, name, kind="reward"):
    """The function `name` of "my_file.py" or "installed.module"; a one-line ValueError if there is none."""
    path = Path(module).resolve() if module.endswith(".py") else None
    if path and not path.is_file():
        raise ValueError(f"{kind} file {module!r} does not exist")
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
        raise ValueError(f"{kind} {module}:{name}: {text[:500]}{at}") from None
    if not callable(function):
        raise ValueError(f"{kind} {module}:{name} is not a function")
    return function
