"""Completion with the Tab key: a script for a shell, made from the commands and their options.

eval "$(flashspan --completion bash)"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args, get_origin

Options: TypeAlias = Mapping[str, tuple[str, ...]]
"""The options of a command, each with the values to choose from; with none where any value is allowed."""
Commands: TypeAlias = Mapping[str, Options]
"""The options of each command by its words: "" for flashspan itself, "plan", "plan draw"."""

BASH = """\
_flashspan() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="" names="" options=""
    ((COMP_CWORD > 1)) && [[ ${{COMP_WORDS[1]}} != -* ]] && command="${{COMP_WORDS[1]}}"
    ((COMP_CWORD > 2)) && case "$command ${{COMP_WORDS[2]}}" in {pairs}) command="$command ${{COMP_WORDS[2]}}" ;; esac
    {cases}
    [[ $word == -* ]] && names="$options"
    COMPREPLY=($(compgen -W "$names" -- "$word"))
}}
complete -o default -F _flashspan flashspan
"""
ZSH = """\
_flashspan() {{
    local word="${{words[CURRENT]}}" before="${{words[CURRENT-1]}}" command="" names="" options=""
    ((CURRENT > 2)) && [[ ${{words[2]}} != -* ]] && command="${{words[2]}}"
    ((CURRENT > 3)) && case "$command ${{words[3]}}" in {pairs}) command="$command ${{words[3]}}" ;; esac
    {cases}
    [[ $word == -* ]] && names="$options"
    if [[ -n $names ]]; then compadd -- ${{=names}}; else _files; fi
}}
compdef _flashspan flashspan
"""
FISH = """\
function __flashspan_runs
    set -l words (commandline -opc)
    set -l last (math 1 + (count $argv))
    test "$words[2..$last]" = "$argv"
end
"""


def choices_of(kind: Any) -> tuple[str, ...]:
    """The values of a type that lists them: Literal["a", "b"], also as one of several types."""
    kinds = [kind, *get_args(kind)]
    return next((tuple(map(str, get_args(each))) for each in kinds if get_origin(each) is Literal), ())


def read_options(kinds: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The options of a command, from the names and types of its parameters without the positional ones."""
    found: dict[str, tuple[str, ...]] = {"-h": (), "--help": ()}
    for name, kind in kinds.items():
        words = name.replace("_", "-")
        found[f"--{words}"] = choices_of(kind)
        if kind is bool:
            found[f"--no-{words}"] = ()
    return found


def write_script(shell: str, commands: Commands) -> str:
    """The text for `eval` in a shell's start file. The script offers commands, options and the values of options that
    list them; elsewhere the shell offers files."""
    return SHELLS[shell](commands)


def _names(command: str, commands: Commands) -> list[str]:
    """The words that may follow a command: after "bench", the names of the benchmarks."""
    return [other.rpartition(" ")[2] for other in commands if other and other.rpartition(" ")[0] == command]


def _cases(commands: Commands) -> str:
    """Statements of bash and zsh that set `names` and `options` by `command` and the word `before` the cursor."""
    lines = ['case "$command" in']
    for command, options in commands.items():
        names = " ".join(_names(command, commands))
        lines.append(f"    '{command}') names='{names}' options='{' '.join(options)}' ;;")
    lines += ["esac", 'case "$command $before" in']
    for command, options in commands.items():
        for option, choices in options.items():
            if choices:
                lines.append(f"    '{command} {option}') names='{' '.join(choices)}' options='' ;;")
    return "\n    ".join([*lines, "esac"])


def _pairs(commands: Commands) -> str:
    """The commands of two words, as a pattern of bash and zsh."""
    return "|".join(f"'{command}'" for command in commands if " " in command)


def _fish(commands: Commands) -> str:
    lines = [FISH]
    for command, options in commands.items():
        names, num_words = " ".join(_names(command, commands)), len(command.split())
        runs = f"__flashspan_runs {command}" if command else "true"
        here = f"test (count (commandline -opc)) = {num_words + 1}; and {runs}"
        if names:
            lines.append(f"complete -c flashspan -f -n '{here}' -a '{names}'")
        for option, choices in options.items():
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            values = f" -x -a '{' '.join(choices)}'" if choices else ""
            lines.append(f"complete -c flashspan -n '{runs if command or choices else here}' {flag}{values}")
    return "\n".join(lines)


def _tcsh(commands: Commands) -> str:
    """tcsh cannot tell the options of one command from those of another."""
    options = {name[2:]: choices for each in commands.values() for name, choices in each.items() if name[:2] == "--"}
    parts = [f"'c/--/({' '.join(options)})/'"]
    parts += [f"'n/--{name}/({' '.join(choices)})/'" for name, choices in options.items() if choices]
    parts += [f"'n/{name}/({' '.join(names)})/'" for name in commands if name and (names := _names(name, commands))]
    return f"complete flashspan {' '.join(parts)} 'p/1/({' '.join(_names('', commands))})/'"


SHELLS = {
    "bash": lambda commands: BASH.format(pairs=_pairs(commands), cases=_cases(commands)),
    "zsh": lambda commands: ZSH.format(pairs=_pairs(commands), cases=_cases(commands)),
    "fish": _fish,
    "tcsh": _tcsh,
}
