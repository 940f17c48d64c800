"""Runs in the jail (jail.run_asserts): a program in one process, its tests in another.

The tests get plain values of the program (numbers, texts, None and PLAIN) as copies. Everything
else stays in the program's process, and the tests hold a Remote of it, which asks that process for
attributes, calls and methods. The tests may hand over functions and objects of their own in the
same way. So Python compares plain values, and no code of the program runs beside the tests.

The jail gets this file as text, and calls main: it imports nothing of ours.
"""
import ast
import builtins
import ctypes
import importlib
import io
import json
import operator
import os
import re
import sys
import types

ATOMS = {"builtins.bool", "builtins.int", "builtins.float", "builtins.str", "builtins.NoneType"}
ITEMS = {  # type: its items
    **dict.fromkeys(("builtins.list", "builtins.tuple", "builtins.set", "builtins.frozenset",
                     "collections.deque"), list),
    **dict.fromkeys(("builtins.dict", "collections.OrderedDict", "collections.Counter",
                     "collections.defaultdict"), lambda x: list(dict.items(x)))}
FIXED = {"builtins.tuple", "builtins.frozenset"}  # of ITEMS: no function can change them in place
PLAIN = {  # type: the arguments that make it again
    "builtins.complex": lambda x: [x.real, x.imag],
    "builtins.bytes": lambda x: [list(x)],
    "builtins.bytearray": lambda x: [list(x)],
    "builtins.range": lambda x: [x.start, x.stop, x.step],
    "builtins.slice": lambda x: [x.start, x.stop, x.step],
    "fractions.Fraction": lambda x: [x.numerator, x.denominator],
    "decimal.Decimal": lambda x: [str(x)],
    "datetime.date": lambda x: [x.year, x.month, x.day],
    "datetime.time": lambda x: [x.hour, x.minute, x.second, x.microsecond, x.tzinfo],
    "datetime.datetime": lambda x: [x.year, x.month, x.day, x.hour, x.minute, x.second,
                                    x.microsecond, x.tzinfo],
    "datetime.timedelta": lambda x: [x.days, x.seconds, x.microseconds],
    "datetime.timezone": lambda x: [x.utcoffset(None)],
    "uuid.UUID": lambda x: [str(x)],
    "pathlib.PosixPath": lambda x: [str(x)],
    "pathlib.PurePosixPath": lambda x: [str(x)],
    "numpy.ndarray": lambda x: [x.tolist(), x.dtype.str]}
# The other process imports these modules and what they hold, and does not ask for it. The tests
# import no functions: a program's `decode` may be eval, which must not run in their process.
LIBRARY = {"builtins", "math", "cmath", "statistics", "itertools", "functools", "operator", "re",
           "collections", "heapq", "bisect", "string", "random", "copy", "datetime", "decimal",
           "fractions", "json", "typing", "time", "calendar", "numbers"}
CLASSES = type, types.ModuleType
FUNCTIONS = types.FunctionType, types.BuiltinFunctionType
COMPARISONS = "lt", "le", "eq", "ne", "gt", "ge"
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or",
              "xor", "lshift", "rshift")
NUMERIC = "abs", "int", "float", "complex", "round", "bool", "neg", "pos", "invert", "index"
OTHER = "len", "iter", "next", "str", "repr", "hash", "format", "reversed"
DO = {f"__{name}__" for name in COMPARISONS + ARITHMETIC + (  # else a function of builtins
    "neg", "pos", "invert", "index", "getitem", "setitem", "delitem", "contains")}
DO |= {*NUMERIC, *OTHER, "getattr", "setattr", "delattr", "isinstance", "issubclass"}

in_tests = False  # whether this is the process of the tests
refused = False  # whether a Remote was asked to decide a test
read_line = write_line = None  # files: from and to the other process
objects = {}  # number: an object of this process that the other process knows
numbers = {}  # id of such an object: its number
remotes = {}  # number of an object of the other process: its Remote, or a class of exceptions


def refuse(why="an object of the program cannot decide a test"):
    """End the test, also one that catches every exception."""
    global refused
    refused = True
    raise TypeError(why)


# ---------------------------------------------------------------------------------- what is plain

def type_at(path):
    """The type of which base_of gives the path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def base_of(x):
    """The plain type of which the type of x is a subclass, as "module.name", or None."""
    if type(x).__name__ in ("dict_keys", "dict_items"):
        return "builtins.set"
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(x).__mro__)
    return next((name for name in names if name in ATOMS or name in ITEMS or name in PLAIN), None)


def value_of(x):
    """x as an object of its plain type: what the tests compare, whatever its class defines."""
    path = base_of(x)
    cls = type_at(path)
    if path in ATOMS:
        return getattr(cls, f"__{cls.__name__}__")(x)  # int.__int__, str.__str__
    return made(path, ITEMS[path](x) if path in ITEMS else PLAIN[path](x))


def made(path, items):
    """The value of the type `path` with these items, or made with these arguments."""
    if path == "numpy.ndarray":
        path = "numpy.array"  # the function that makes one
    cls = type_at(path)
    if path not in ITEMS:
        return cls(*items)
    if ITEMS[path] is list:
        return cls(items)
    pairs = dict(items)
    return cls(None, pairs) if path.endswith("defaultdict") else cls(pairs)


def library(x):
    """[module, name] with which the other process can import x, or None."""
    if not issubclass(type(x), CLASSES + FUNCTIONS):
        return None
    try:
        is_module = isinstance(x, types.ModuleType)
        path = [x.__name__, ""] if is_module else [x.__module__, x.__qualname__]
        return path if imported(*path, not in_tests) is x else None
    except (ImportError, AttributeError):
        return None


def imported(module, name, for_tests):
    top = str(module).partition(".")[0].removeprefix("_")
    x = importlib.import_module(module) if top in sys.stdlib_module_names else None
    for part in filter(None, name.split(".")):
        x = getattr(x, part)
    error = isinstance(x, type) and issubclass(x, BaseException)
    if error or top in LIBRARY and isinstance(x, CLASSES + FUNCTIONS * (not for_tests)):
        return x
    raise ImportError(module)


# ------------------------------------------------------------------------------- values as JSON

def encode(x, known, live=False):
    """A value as what JSON can hold. `known`: {id of a list, dict, ...: its number in this call}.
    live: a list is not copied; the other process gets a Remote of it."""
    if type(x) is Remote:
        return {"yours": x._number}
    path = f"{type(x).__module__}.{type(x).__qualname__}"
    if path in ATOMS:
        return x
    if path in ITEMS and not (live and path not in FIXED):
        if id(x) in known:
            return {"same": known[id(x)][0]}
        number = None
        if path not in FIXED:
            number = len(known)
            known[id(x)] = number, x
        return {path: [number, items_of(path, x, known)]}
    if path in PLAIN:
        return {path: [encode(argument, known) for argument in PLAIN[path](x)]}
    if path.startswith("numpy.") and hasattr(x, "tolist"):
        return encode(x.tolist(), known)  # numpy's 3 is 3
    if isinstance(x, BaseException):
        arguments = [encode(argument, known) for argument in x.args]
        return {"raised": [encode(type(x), known), arguments, number_of(x)]}
    if at := library(x):
        return {"library": at}
    if isinstance(x, type) and issubclass(x, BaseException):
        if "_remote" in x.__dict__:  # made below
            return {"yours": x._remote}
        bases = [encode(base, known) for base in x.__bases__ if issubclass(base, BaseException)]
        return {"error": [number_of(x), x.__name__, bases]}
    kind = ("class" if isinstance(x, type) else
            "coroutine" if isinstance(x, types.CoroutineType) else "")
    return {"own": [number_of(x), base_of(x), kind]}


def items_of(path, x, known):
    items = ITEMS[path](x)
    if ITEMS[path] is list:
        return [encode(item, known) for item in items]
    return [[encode(key, known), encode(item, known)] for key, item in items]


def number_of(x):
    if id(x) not in numbers:
        numbers[id(x)] = len(objects)
        objects[len(objects)] = x  # which keeps it, and so its id
    return numbers[id(x)]


def decoder(got):
    """The function that makes a value of {name: arguments}. got: {number: list, dict, ...}"""
    def decode(pair):
        [[name, content]] = pair.items()
        if name == "same":
            return got[content]
        if name == "yours":
            return objects[content]
        if name == "library":
            return imported(*content, in_tests)
        if name == "own":
            return remote(*content)
        if name == "error":
            return error_class(*content)
        if name == "raised":
            return error(*content)
        if name in ITEMS:
            number, items = content
            value = made(name, items)
            if number is not None:
                got[number] = value
            return value
        if name in PLAIN:
            return made(name, content)
        raise ValueError(name)
    return decode


def remote(number, base, kind):
    if number not in remotes:
        remotes[number] = Remote(number, base, kind)
    x = remotes[number]
    return awaited(x) if kind == "coroutine" else x


async def awaited(x):
    return ask(x, "await")


def error_class(number, name, bases):
    """A class like a program's class of exceptions, for `except` and isinstance."""
    if number not in remotes:
        def ask_for(self, attribute):
            if "_error" not in self.__dict__:
                raise AttributeError(attribute)
            return ask(self._error, "getattr", attribute)

        def text(self):
            return ask(self._error, "str") if "_error" in self.__dict__ else str(self.args)

        remotes[number] = type(name, tuple(bases), {
            "__getattr__": ask_for, "__str__": text, "_remote": number})
    return remotes[number]


def error(cls, arguments, number):
    if "_remote" not in cls.__dict__:
        return cls(*arguments)
    x = cls.__new__(cls, *arguments)
    x.args = tuple(arguments)
    x._error = remote(number, None, "")
    return x


# --------------------------------------------------------------------------------- asking and doing

def send(kind, content):
    write_line.write(kind + json.dumps(content).encode() + b"\n")
    write_line.flush()


def receive(got):
    """Do what the other process asks for until it answers. Returns (kind, content)."""
    while True:
        text = read_line.readline()
        if not text:
            refuse("the program has ended") if in_tests else os._exit(0)
        if text[:1] == b"?":
            answer(text[1:])
            continue
        try:
            return text[:1], json.loads(text[1:], object_hook=decoder(got))
        except Exception as e:  # a set of objects that have no hash
            refuse(str(e))


def ask(x, what, /, *arguments, **named):  # /: a test may name an argument x
    """Do `what` with the object of the other process. Raises what it raises."""
    known = {}
    send(b"?", [x._number, what, [encode(a, known) for a in arguments],
                [[name, encode(a, known)] for name, a in named.items()]])
    got = dict(known.values())
    kind, (value, changes, printed) = receive(got)
    for number, items in changes:  # in place, as the function did it
        target = got[number]
        target.clear()
        if isinstance(target, dict):
            dict.update(target, items)
        else:
            (target.update if isinstance(target, set) else target.extend)(items)
    sys.stdout.write(printed)
    if kind == b"#":
        refuse(value)
    if kind == b"!":
        raise value
    return value


def answer(text):
    """Do what the other process asks for, and send the result."""
    got = {}
    printed = io.StringIO()
    before, kind = {}, b"="
    try:
        number, what, arguments, named = json.loads(text, object_hook=decoder(got))
        before = {i: flat_ids(x) for i, x in got.items()}
        stdout = sys.stdout
        if not in_tests:
            sys.stdout = printed
        try:
            value = do(objects[number], what, arguments, dict(named))
        finally:
            if not in_tests:
                sys.stdout = stdout
    except BaseException as e:  # SystemExit too
        value, kind = e, b"!"
    known = {id(x): (i, x) for i, x in got.items()}
    try:
        changes = [[i, items_of(base_of(x), x, known)] for i, x in got.items()
                   if flat_ids(x) != before.get(i)]
        live = kind == b"=" and what in ("getattr", "__getitem__")
        content = [encode(value, known, live), changes, printed.getvalue()]
    except Exception as e:  # of a program's class, or nested too deeply
        kind, content = b"#", [str(e), [], ""]
    send(kind, content)


def flat_ids(x):
    parts = ITEMS[base_of(x)](x)
    if isinstance(x, dict):
        parts = sum(parts, ())  # of the pairs (key, value)
    return [id(part) for part in parts]


def do(x, what, arguments, named):
    if in_tests and what.endswith("attr") and re.match("_|(gi|cr|ag|f|tb|co)_", arguments[0]):
        raise AttributeError(arguments[0])  # else the program could reach the tests
    if what == "call":
        return x(*arguments, **named)
    if what == "value":
        return value_of(x)
    if what == "await":
        import asyncio
        return asyncio.run(x)
    if what == "names":
        return list(vars(x))
    if what in DO:
        return getattr(operator if what.startswith("__") else builtins, what)(x, *arguments)
    raise ValueError(what)


class Remote:
    """An object of the other process.

    The tests must not let a program's object decide: it would be equal to everything. Refused are
    comparisons and containment between an object and a plain value, and what turns the sum or
    difference of both into a number or a truth value. Two objects of the program compare
    themselves only if the test has made one of them itself, with a class that it names with a
    capital letter; a subclass of a plain type counts as its plain value.
    """

    def __init__(self, number, base, kind):
        vars(self).update(_number=number, _base=base, _kind=kind, _named=False, _made=False,
                          _mixed=False)

    @property
    def __class__(self):
        return type_at(self._base) if self._base else type if self._kind == "class" else Remote

    def __call__(self, /, *arguments, **named):
        return self._new(ask(self, "call", *arguments, **named))

    def __getattr__(self, name):
        return self._new(ask(self, "getattr", name))

    def __setattr__(self, name, value):
        ask(self, "setattr", name, value)

    def __delattr__(self, name):
        ask(self, "delattr", name)

    def __getitem__(self, key):
        return self._new(ask(self, "__getitem__", key))

    def __setitem__(self, key, value):
        ask(self, "__setitem__", key, value)

    def __delitem__(self, key):
        ask(self, "__delitem__", key)

    def __instancecheck__(self, x):
        return type(x) is Remote and bool(ask(x, "isinstance", self))

    def __subclasscheck__(self, x):
        return type(x) is Remote and bool(ask(x, "issubclass", self))

    def __enter__(self):
        return self.__getattr__("__enter__")()

    def __exit__(self, *error):
        return self.__getattr__("__exit__")(*(error[:2] + (None,)))

    def __contains__(self, item):
        if self._base and in_tests:
            return item in ask(self, "value")
        if self._made or not in_tests:
            return bool(ask(self, "__contains__", item))
        return any(x is item or x == item for x in self)

    def _new(self, x):
        if type(x) is Remote and self._named:
            vars(x)["_made"] = True
        return x

    def _operate(self, what, other, swapped=False):
        compares = what[2:-2] in COMPARISONS
        function = getattr(operator, what)
        both = type(other) is Remote
        if not in_tests:
            return ask(self, what, other) if not swapped else NotImplemented
        if both and not (self._made or other._made or self._base and other._base):
            refuse()
        if not both:
            if other is None and what in ("__eq__", "__ne__"):
                return what == "__ne__"
            if self._base:
                value = ask(self, "value")
                return function(other, value) if swapped else function(value, other)
            if compares:
                refuse()
        if swapped:
            what = f"__r{what[2:]}"
            result = self.__getattr__(what)(other)
        else:
            result = ask(self, what, other)
        if compares:
            return result if type(result) is bool else refuse()
        if type(result) is not Remote:
            return result if both else refuse()
        vars(result)["_mixed"] = not both or self._mixed or other._mixed
        return result


def add_methods():
    """Python looks for special methods in the class."""
    def binary(what, swapped=False):
        return lambda self, other: self._operate(what, other, swapped)

    def unary(name, what):
        def method(self, *arguments):
            if self._mixed and name in NUMERIC:
                refuse()
            if self._base and in_tests and name in ("hash", "bool", "index"):
                return getattr(operator if name == "index" else builtins, name)(ask(self, "value"))
            return ask(self, what, *arguments)
        return method

    for name in COMPARISONS + ARITHMETIC:
        setattr(Remote, f"__{name}__", binary(f"__{name}__"))
    for name in ARITHMETIC:
        setattr(Remote, f"__r{name}__", binary(f"__{name}__", True))
    for name in NUMERIC + OTHER:
        what = f"__{name}__" if f"__{name}__" in DO else name
        setattr(Remote, f"__{name}__", unary(name, what))


# ------------------------------------------------------------------------------ LeetCode's names

# what LeetCode imports before a program, each also as `from module import *`; a later name counts
LEETCODE = ("typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math",
            "random", "statistics", "itertools", "functools", "operator", "io", "sys", "json")


class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next


class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right


# These four are named by the tests of LeetCodeDataset (arXiv 2504.14655).

def list_node(values):
    node = None
    for value in reversed(values):
        node = ListNode(value, node)
    return node


def tree_node(values):
    """The root of a tree whose values are written level by level; None is a missing child."""
    nodes = [None if value is None else TreeNode(value) for value in values]
    children = iter(nodes[1:])
    for node in nodes:
        if node:
            node.left = next(children, None)
            node.right = next(children, None)
    return nodes[0] if nodes else None


def is_same_list(a, b):
    while a is not None and b is not None and a.val == b.val:
        a = a.next
        b = b.next
    return a is None and b is None


def is_same_tree(a, b):
    if a is None or b is None:
        return a is None and b is None
    same_left = a.val == b.val and is_same_tree(a.left, b.left)
    return same_left and is_same_tree(a.right, b.right)


def leetcode_names():
    """What LeetCode defines for a program, below Python's own names: {name: object}."""
    names = {}
    for module in LEETCODE:
        exec(f"from {module} import *", names)
    for module in LEETCODE:
        names[module] = importlib.import_module(module)
    for x in (ListNode, TreeNode, list_node, tree_node, is_same_list, is_same_tree):
        names[x.__name__] = x
    return names | vars(builtins)


# ------------------------------------------------------------------------------- the two processes

class Names(dict):
    """The names of the tests: their own, then those of the program.

    A program may define `sum`, and the test sum(10, 15) is about it. In a test that is about
    something else of the program, sum(f(1)) is Python's, and so is math.isclose.
    """
    def __init__(self, program, python):
        super().__init__(__name__="tests", __builtins__=python)
        self.program, self.defined, self.hidden, self.modules = program, (), (), {}

    def read(self, tree):
        self.defined, self.modules = set(ask(self.program, "names")), {}
        nodes = list(ast.walk(tree))
        used = {n.id for n in nodes if isinstance(n, ast.Name)} & self.defined
        python = used & set(vars(builtins))
        self.hidden = python if used - python else ()
        for n in nodes:
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name):
                name = n.value.id
                if name in sys.stdlib_module_names & used:
                    module = importlib.import_module(name)
                    if hasattr(module, n.attr):
                        self.modules[name] = module

    def __missing__(self, name):
        if name not in self.defined or name in self.hidden or name.startswith("__"):
            raise KeyError(name)
        x = self.modules.get(name) or ask(self.program, "getattr", name)
        if type(x) is Remote and x._kind == "class" and name[0].isupper():
            vars(x)["_named"] = True
        return x


def main(leetcode):
    """leetcode: whether program and tests have LeetCode's names too."""
    global in_tests, read_line, write_line, refused
    add_methods()
    python = leetcode_names() if leetcode else vars(builtins)
    prctl = ctypes.CDLL(None).prctl
    prctl(4, 0)  # PR_SET_DUMPABLE: the program may not read or trace the tests' process
    from_tests, to_program = os.pipe()
    from_program, to_tests = os.pipe()
    if os.fork() == 0:
        os.closerange(3, 5)  # the tests and their report
        os.close(to_program)
        os.close(from_program)
        prctl(4, 1)
        read_line, write_line = open(from_tests, "rb"), open(to_tests, "wb")
        module = sys.modules["program"] = types.ModuleType("program")
        module.__builtins__ = python
        number_of(module)
        with open("program.py", encoding="utf-8") as f:
            exec(compile(f.read(), "program.py", "exec"), module.__dict__)
        receive({})
    os.close(from_tests)
    os.close(to_tests)
    read_line, write_line, in_tests = open(from_program, "rb"), open(to_program, "wb"), True
    sys.path.remove("")  # the folder in which the program may write a fractions.py
    with open(3, encoding="utf-8") as f:
        tests = json.load(f)
    program = Remote(0, None, "")
    module = sys.modules["program"] = types.ModuleType("program")
    module.__getattr__ = lambda name: ask(program, "getattr", name)
    names = Names(program, python)
    passed = []
    for test in tests:
        refused = False
        try:
            tree = ast.parse(test)
            names.read(tree)
            exec(compile(tree, "test", "exec"), names)
            passed.append(not refused)
        except BaseException:  # SystemExit too: exiting early is not passing
            passed.append(False)
    os.write(4, json.dumps(passed).encode())
    os._exit(0)
