"""`plancache completion`: a shell's completion of commands, options and their choices."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from plancache.cli.command import Command, print_json

_COMMON = ("--json", "--cache-dir", "--debug", "--help")
_SCRIPT = """\
_plancache() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command= words i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i]}} in
            {commands}) command=${{COMP_WORDS[i]}}; break ;;
        esac
    done
    case $command:$previous in
{choices}
        *) case $command in
{options}
            *) words="{all}" ;;
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _plancache plancache
"""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that reads it")


def _run(args: argparse.Namespace) -> int:
    head = "autoload -U +X bashcompinit && bashcompinit\n" if args.shell == "zsh" else ""
    script = head + _script()
    if args.json:
        print_json({"shell": args.shell, "script": script})
    else:
        print(script, end="")
    return 0


def _script() -> str:
    from plancache.cli import COMMANDS

    arguments = {name: list(_arguments(name)) for name in COMMANDS}
    choices = [
        f'        {name}:{flag}) words="{" ".join(map(str, action.choices))}" ;;'
        for name, actions in arguments.items()
        for action in actions
        if action.choices is not None
        for flag in action.option_strings or [name]
    ]
    options = [
        f'            {name}) words="{" ".join([*(flag for action in actions for flag in action.option_strings), *_COMMON])}" ;;'
        for name, actions in arguments.items()
    ]
    every = " ".join([*COMMANDS, "--cache-dir", "--debug", "--help", "--version"])
    return _SCRIPT.format(commands="|".join(COMMANDS), choices="\n".join(choices), options="\n".join(options), all=every)


def _arguments(name: str) -> Iterator[argparse.Action]:
    from plancache.cli import command

    parser = argparse.ArgumentParser(add_help=False)
    command(name).configure(parser)
    return (action for action in parser._actions if action.help != argparse.SUPPRESS)


COMMAND = Command(
    "completion",
    "print what a shell needs to complete commands and options",
    "File names are completed where nothing else fits.",
    "plancache completion bash\n"
    "source <(plancache completion bash)    # in ~/.bashrc\n"
    "source <(plancache completion zsh)     # in ~/.zshrc",
    _configure,
    _run,
)
