"""`localllm completion`: shell scripts that call `complete.py` when Tab is pressed.

Typer's own completion is not used: its main() exits with 1 on a broken pipe, it imports the whole program on each
press, and it loses names with a colon in bash.
"""

from enum import StrEnum
from typing import Annotated

import typer

from localllm.cli.io import StdoutWriter

# Bash splits words at colons and equals signs and replaces only the last part, so it gets only that part.
BASH = r"""_localllm() {
    local line="${COMP_LINE:0:COMP_POINT}" offer about
    local word="${line##*[[:space:]]}"
    local kept="${word%"${word##*["$COMP_WORDBREAKS"]}"}"
    COMPREPLY=()
    while IFS=$'\t' read -r offer about; do
        COMPREPLY+=("${offer#"$kept"}")
    done < <(_LOCALLLM_COMPLETE="$line" "$1" 2>/dev/null)
    [[ ${#COMPREPLY[@]} == 1 && $COMPREPLY == */ ]] && compopt -o nospace
}
complete -o bashdefault -o default -F _localllm localllm
"""

ZSH = r"""#compdef localllm
_localllm() {
    local -a offers folders
    local offer about
    while IFS=$'\t' read -r offer about; do
        if [[ $offer == */ ]]; then
            folders+=("$offer")
        else
            offers+=("${offer//:/\\:}${about:+:$about}")
        fi
    done < <(_LOCALLLM_COMPLETE="${(j: :)words[1,CURRENT-1]} $PREFIX" ${(Q)~words[1]} 2>/dev/null)
    (( $#folders )) && compadd -S '' -- "${folders[@]}"
    if (( $#offers )); then
        _describe -t offers localllm offers
    elif (( ! $#folders )); then
        _files
    fi
}
if [[ ${zsh_eval_context[-1]} == loadautofunc ]]; then
    _localllm "$@"
else
    compdef _localllm localllm
fi
"""

FISH = r"""function __localllm_offers
    set -l offers (_LOCALLLM_COMPLETE=(commandline -cp | string collect) localllm 2>/dev/null)
    if test (count $offers) -gt 0
        printf '%s\n' $offers
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c localllm -f -a '(__localllm_offers)'
"""


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


SCRIPTS = {Shell.BASH: BASH, Shell.ZSH: ZSH, Shell.FISH: FISH}


def completion(shell: Annotated[Shell, typer.Argument(metavar="SHELL", hidden=True)]) -> None:
    """Print a shell completion script.

    SHELL is bash, zsh or fish. For bash, add `eval "$(localllm completion bash)"` to ~/.bashrc; for zsh, add the
    same with zsh to ~/.zshrc. For fish: `localllm completion fish > ~/.config/fish/completions/localllm.fish`.
    """
    StdoutWriter().write(SCRIPTS[shell])
