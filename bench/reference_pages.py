"""The pages of the reference that are made from the code: all commands with their options, and the Python functions.

    make reference          # writes docs/cli-reference.md and docs/python-reference.md

``tests/repository/test_docs.py`` fails if a page differs from the code.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import stepscope
from stepscope.cli.main import ALIASES, COMMANDS, build_parser, command_module

__all__ = ["PAGES", "cli_page", "main", "python_page"]

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- written by make reference; change the code instead -->"


# -- commands ---------------------------------------------------------------------------------------------------------


def cli_page() -> str:
    parsers = _command_parsers()
    other_names = {name: [alias for alias, of in ALIASES.items() if of == name] for name in COMMANDS}
    lines = [
        "# All commands and options",
        "",
        NOTE,
        "",
        "`stepscope COMMAND --help` prints the same. [The tour](tour.md) says what each command is for.",
        "",
        "| command | |",
        "|---|---|",
        *(f"| [`stepscope {name}`](#stepscope-{name}) | {_cell(command_module(name).HELP)} |" for name in COMMANDS),
        "",
    ]
    for name in COMMANDS:
        lines += [f"## stepscope {name}", "", *_describe(f"stepscope {name}", parsers[name])]
        if other_names[name]:
            lines += [f"Also: {', '.join(f'`stepscope {alias}`' for alias in other_names[name])}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _command_parsers() -> dict[str, argparse.ArgumentParser]:
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise AssertionError("the parser has no commands")


def _describe(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from (_prose(parser.description or ""), "")
    inner: dict[str, argparse.ArgumentParser] = {}
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                inner |= {f"{name} {word}": choice for word, choice in action.choices.items()}
            elif action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
                rows.append(f"| {_names(action)} | {_cell(_help(parser, action))} |")
        if rows:
            title = {"positional arguments": "argument", "options": "option"}.get(group.title or "", group.title)
            yield from (f"| {title} | |", "|---|---|", *rows, "")
    if parser.epilog:
        yield from ("```text", inspect.cleandoc(parser.epilog.replace("%%", "%")).rstrip(), "```", "")
    for inner_name, choice in inner.items():
        yield from (f"### {inner_name}", "", *_describe(inner_name, choice))


def _names(action: argparse.Action) -> str:
    words = list(dict.fromkeys(option.replace("_", "-") for option in action.option_strings))
    value = "" if action.nargs == 0 else _value(action)
    if not words:
        return f"`{_escaped(value)}`"
    return ", ".join(f"`{_escaped(f'{word} {value}'.strip())}`" for word in words)


def _value(action: argparse.Action) -> str:
    name: str
    if isinstance(action.metavar, tuple):
        name = " ".join(action.metavar)
    elif action.metavar is not None:
        name = action.metavar
    elif action.choices is not None:
        name = "{" + ",".join(str(choice) for choice in action.choices) + "}"
    else:
        name = action.dest.upper() if action.option_strings else action.dest
    several = action.nargs in ("*", "+", argparse.REMAINDER) and "…" not in name
    return f"{name} …" if several else name


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _prose(text: str) -> str:
    """A description as Markdown: indented lines stay as they are, the rest are paragraphs."""
    blocks = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text.replace("%%", "%"))):
        aligned = any(line.startswith("  ") for line in block.splitlines())
        blocks.append(f"```text\n{block}\n```" if aligned else _tagless(block))
    return "\n\n".join(blocks)


def _cell(text: str) -> str:
    return _escaped(_tagless(" ".join(text.split())))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _tagless(text: str) -> str:
    """Outside of code, ``<`` and ``*`` would be read as markup."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;").replace("*", "\\*") for part in parts)


# -- Python -----------------------------------------------------------------------------------------------------------


def python_page() -> str:
    names = [name for name in stepscope.__all__ if not name.startswith("__")]
    lines = [
        "# Python functions",
        "",
        NOTE,
        "",
        "Everything that `import stepscope` offers; all other modules are private and change without notice.",
        "[Running](running.md#the-api) says when a script needs which.",
        "",
    ]
    for name in names:
        lines += list(_object(name, getattr(stepscope, name)))
    return "\n".join(lines).rstrip() + "\n"


def _object(name: str, value: object) -> Iterator[str]:
    yield from (f"## stepscope.{name}", "")
    if inspect.isclass(value):
        yield from ("```python", f"class {name}{_signature(value)}", "```", "")
    elif callable(value):
        yield from ("```python", f"stepscope.{name}{_signature(value)}", "```", "")
    yield from (_docstring(value), "")
    if inspect.isclass(value):
        for member, inner in vars(value).items():
            if member.startswith("_") or not (callable(inner) or isinstance(inner, property)):
                continue
            signature = "" if isinstance(inner, property) else _signature(inner)
            yield from (f"### {name}.{member}", "", "```python", f"{member}{signature}", "```", "")
            yield from (_docstring(inner), "")


def _signature(value: object) -> str:
    try:
        text = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(…)"
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def _docstring(value: object) -> str:
    text = inspect.getdoc(value) or ""
    return _prose(text.replace("``", "`"))


PAGES = {"docs/cli-reference.md": cli_page, "docs/python-reference.md": python_page}


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / name).write_text(page())
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
