"""Runs ``sdiloco completion``, which enables shell completion of subcommands and options."""

from lightning_sdiloco.tools.cli import COMMANDS, parser_of


def completion(shell: str) -> str:
    """Print a shell completion script for this command.

    Args:
        shell: Name of the shell, such as bash or zsh.

    Examples:
        $ sdiloco completion bash > ~/.local/share/bash-completion/completions/sdiloco
    """
    try:
        import shtab
    except ImportError as error:
        raise ValueError(
            "The completion script requires shtab, which is not installed. To install it, run pip"
            " install shtab."
        ) from error
    if shell not in shtab.SUPPORTED_SHELLS:
        raise ValueError(
            f"shell={shell!r} is not supported. Choose one of {', '.join(shtab.SUPPORTED_SHELLS)}."
        )
    script: str = shtab.complete(parser_of(COMMANDS), shell)
    return script
