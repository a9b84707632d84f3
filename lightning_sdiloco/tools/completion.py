"""Runs ``sdiloco completion``, which lets a shell complete subcommands and options."""

from lightning_sdiloco.tools.cli import COMMANDS, parser_of


def completion(shell: str) -> str:
    """Print a shell completion script for this command.

    Args:
        shell: The shell, such as bash or zsh.

    Examples:
        $ sdiloco completion bash > ~/.local/share/bash-completion/completions/sdiloco
    """
    try:
        import shtab
    except ImportError as error:
        raise ValueError(
            "shtab, which writes the script, is not installed. Install it: pip install shtab."
        ) from error
    if shell not in shtab.SUPPORTED_SHELLS:
        raise ValueError(
            f"shell={shell!r} is not supported. Give one of {', '.join(shtab.SUPPORTED_SHELLS)}."
        )
    script: str = shtab.complete(parser_of(COMMANDS), shell)
    return script
