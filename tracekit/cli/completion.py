"""``tracekit completion SHELL``: the lines that make a shell complete commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from tracekit.errors import UsageError

_EPILOG = """\b
Examples:
  tracekit completion bash >> ~/.bashrc
  tracekit completion zsh >> ~/.zshrc
  tracekit completion fish > ~/.config/fish/completions/tracekit.fish

\b
Exit codes: 0 printed; 2 there is no such shell."""


@click.command("completion", epilog=_EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print what SHELL has to run to complete tracekit's commands, options and names."""
    found = get_completion_class(shell)
    if found is None:
        raise UsageError(f"click knows no completion for {shell}", "choose bash, zsh or fish")
    click.echo(found(context.find_root().command, {}, "tracekit", "_TRACEKIT_COMPLETE").source())
