"""The command line: ``train``, ``serve``, ``backends``, ``doctor``, ``check``, ``matrix``, ``new-plugin``, ``fetch``.

Exit codes that scripts may rely on: 0 done, 2 refused before any work, 3 failed while running (resumable), 130
interrupted (resumable). An error of ours is printed as its sentence; ``VERL_ADAPTOR_TRACEBACK=1`` shows the traceback too.
Each command imports what it needs when it runs, so that a listing never waits for torch.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from verl_adaptor.errors import ConfigError, VerlAdaptorError

REFUSED, FAILED, INTERRUPTED = 2, 3, 130

app = typer.Typer(
    name="verl-adaptor",
    help="One argument swaps the framework under an RL post-training loop.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: error sentences stay whole in a log
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


class RunFailed(Exception):
    """Work had begun when the cause was raised: exit code 3."""


@contextmanager
def running() -> Iterator[None]:
    """Within this block work is under way: an error in it ends the command with exit code 3 instead of 2."""
    try:
        yield
    except typer.Exit:  # a command that ends itself names its own code
        raise
    except Exception as error:
        raise RunFailed from error


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code; `arguments` are those of the process unless given."""
    command = typer.main.get_command(app)
    try:
        command(args=arguments, prog_name="verl-adaptor")
    except RunFailed as failure:
        _report(failure.__cause__ or failure)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        _report(error)
        sys.exit(REFUSED)
    sys.exit(0)


def _report(error: BaseException) -> None:
    """The sentence of an error of ours; the traceback where it is none of ours, or asked for."""
    if not isinstance(error, VerlAdaptorError) or os.environ.get("VERL_ADAPTOR_TRACEBACK", "0") != "0":
        traceback.print_exception(error)
    else:
        typer.echo(f"verl-adaptor: {error}", err=True)


def _version(asked: bool) -> None:
    if asked:
        from verl_adaptor import __version__

        typer.echo(f"verl-adaptor {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """One argument swaps the framework under an RL post-training loop."""


@app.command("train")
def _train(
    recipe: Annotated[Path, typer.Argument(help="A recipe in YAML.")],
    output: Annotated[Path, typer.Option(help="Folder for metrics, report and checkpoints.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the recipe's: ppo.epochs=2"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in OUTPUT.")] = False,
) -> None:
    """Train a model as a recipe says; writes summary.json, metrics.jsonl and report.html into OUTPUT."""
    from verl_adaptor.cli.train import train as run

    run(recipe, overrides or [], output=output, resume=resume)


@app.command("serve")
def _serve(
    path: Annotated[str, typer.Argument(help="A Hugging Face model folder, or a hub id.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the engine: backend=vllm max_model_len=4096"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8000,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API that takes new weights while it runs."""
    from verl_adaptor.cli.serve import serve as run

    run(path, settings or [], host=host, port=port)


@app.command("backends")
def _backends(as_json: Json = False) -> None:
    """List every backend: where it comes from, whether it is usable here, and what it can do."""
    from verl_adaptor.cli.backends import backends as run

    run(as_json=as_json)


@app.command("doctor")
def _doctor(as_json: Json = False) -> None:
    """Look for what would go wrong in this environment; exits with 2 if anything is an error."""
    from verl_adaptor.cli.doctor import doctor as run

    if not run(as_json=as_json):
        raise typer.Exit(REFUSED)


@app.command("check")
def _check(
    what: Annotated[str, typer.Argument(metavar="BACKEND|RECIPE", help="A registered backend, or a recipe in YAML.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="What a backend is checked with: family=qwen2 roles=inference engine.mode=async "
            "trainer.data_parallel_size=2; or settings that replace the recipe's.",
        ),
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit report of a backend's laws there.")] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Longest that one of a backend's laws may take (600).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a backend against every law that its declaration asks for, and exit with 3 if one is broken; or find everything
    that would go wrong with a recipe on this machine, before anything loads, and exit with 2 if there is an error."""
    if what.endswith((".yaml", ".yml")):
        from verl_adaptor.cli.check_recipe import check_recipe

        if junit is not None or timeout is not None:
            raise ConfigError(
                "--junit and --timeout are for a backend's laws; a recipe's findings are written with --json."
            )
        if not check_recipe(Path(what), settings or [], as_json=as_json):
            raise typer.Exit(REFUSED)
        return
    from verl_adaptor.cli.check import check as run

    if not run(what, settings or [], junit=junit, timeout_s=timeout, as_json=as_json):
        raise typer.Exit(FAILED)


matrix_app = typer.Typer(
    help="Measure, compare and show which versions, layouts and models work.", no_args_is_help=True
)
app.add_typer(matrix_app, name="matrix")
MatrixFolder = Annotated[Path, typer.Option("--folder", help="Where cells.toml, envs/ and results/ are.")]
MATRIX = Path("compat_matrix")


@matrix_app.command("run")
def _matrix_run(
    environments: Annotated[
        list[str] | None, typer.Option("--env", help="Only this environment's cells; may be repeated.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only cells with this in ENVIRONMENT/NAME; may be repeated.")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Only the few that every change is measured with.")] = False,
    here: Annotated[
        bool, typer.Option("--here", help="With this interpreter, whatever it has; makes no environment.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Also what was measured with this source already.")] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="Show all cells and what was found, and measure none.")
    ] = False,
    results: Annotated[Path | None, typer.Option(help="Folder of the results; by default FOLDER/results.")] = None,
    pip_args: Annotated[
        list[str] | None, typer.Option("--pip-arg", help="Given to every pip install; may be repeated.")
    ] = None,
    folder: MatrixFolder = MATRIX,
    as_json: Json = False,
) -> None:
    """Measure cells, each in a process of its own; exits with 3 if any is declared other than it was observed."""
    from verl_adaptor.cli import matrix as command

    if listed:
        return command.list_cells(folder)
    with running():
        good = command.run(
            folder,
            environments=environments or [],
            only=only or [],
            smoke=smoke,
            here=here,
            again=again,
            results=results,
            pip_args=pip_args or [],
            as_json=as_json,
        )
    if not good:
        raise typer.Exit(FAILED)
    return None


@matrix_app.command("diff")
def _matrix_diff(
    base: Annotated[str, typer.Option(help="A commit, or a folder of results, to compare with.")] = "HEAD",
    results: Annotated[Path | None, typer.Option(help="Folder of the new results; by default FOLDER/results.")] = None,
    folder: MatrixFolder = MATRIX,
    as_json: Json = False,
) -> None:
    """Exit with 3 if something worked before and does not now, or is declared other than it was observed."""
    from verl_adaptor.cli import matrix as command

    if not command.diff(folder, base=base, results=results, as_json=as_json):
        raise typer.Exit(FAILED)


@matrix_app.command("render")
def _matrix_render(
    folder: MatrixFolder = MATRIX,
    docs: Annotated[Path, typer.Option(help="Folder for matrix.md and matrix.html.")] = Path("docs"),
) -> None:
    """Write the table and the page from the results."""
    from verl_adaptor.cli import matrix as command

    command.render(folder, docs)


@app.command("new-plugin")
def _new_plugin(
    name: Annotated[str, typer.Argument(help="What users will type as backend=NAME.")],
    output: Annotated[Path | None, typer.Option(help="Folder to write; by default verl-adaptor-NAME.")] = None,
) -> None:
    """Write a package with a small working backend, which passes `check NAME` as soon as it is installed."""
    from verl_adaptor.cli.new_plugin import new_plugin as run

    run(name, output)


@app.command("fetch")
def _fetch(
    name: Annotated[str, typer.Argument(help="Which model: smollm2.")] = "smollm2",
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("models/smollm2"),
) -> None:
    """Write a small ready-made model as a Hugging Face folder."""
    from verl_adaptor.cli.fetch import fetch as run

    run(name, output)
