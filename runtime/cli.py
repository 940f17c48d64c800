"""The command line of a flat dataclass: one flag per field, --help in groups."""
import ast
import dataclasses
import functools
import inspect
import textwrap
import typing


def given(argv, flag, default):
    """The value of a flag, before the command line is parsed as a whole."""
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            default = argv[i + 1]
        elif word.startswith(flag + "="):
            default = word.partition("=")[2]
    return default


@functools.cache
def fields_by_group(config):
    """{title: {field: help}} from the source of a dataclass.

    A comment line before a field begins a group and is its title. A comment behind a field is its help text.
    """
    lines = textwrap.dedent(inspect.getsource(config)).splitlines()
    groups = {}
    for node in ast.parse("\n".join(lines)).body[0].body:
        if isinstance(node, ast.AnnAssign):
            above = lines[node.lineno - 2].strip()
            if above.startswith("# "):
                fields = groups[above[2:]] = {}
            fields[node.target.id] = lines[node.end_lineno - 1].partition("  # ")[2]
    return groups


def parse(config, argv, defaults, description):
    """argv -> config(...). `defaults` replaces the defaults of some fields.

    Exits with the usage for --help, an unknown flag or a value of the wrong type.
    """
    import tyro
    hints, groups = typing.get_type_hints(config), {}
    for title, fields in fields_by_group(config).items():
        group = dataclasses.make_dataclass("Group", [
            (name, typing.Annotated[hints[name], tyro.conf.arg(help=text)]) for name, text in fields.items()])
        groups[title] = group(**{name: defaults.get(name, getattr(config, name)) for name in fields})
    parsed = tyro.cli(dict, args=argv, default=groups, description=description, use_underscores=True,
                      config=[tyro.conf.OmitArgPrefixes])
    return config(**{name: x for group in parsed.values() for name, x in vars(group).items()})
