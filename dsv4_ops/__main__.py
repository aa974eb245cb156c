"""``python -m dsv4_ops``: see ``--help``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ._version import __version__

EXIT_CODES = """exit codes:
  0    done, and every check held
  1    a check failed: --verify found a difference, or the self-test a wrong result
  2    the command line is wrong
  3    some requests were refused (the others were served)
  4    nothing could be done: a file, a model or a library is missing or does not fit
  130  interrupted by SIGINT (143: SIGTERM); finished requests are in the results file
"""


def parser() -> argparse.ArgumentParser:
    from .engine import cli

    top = argparse.ArgumentParser(
        prog="python -m dsv4_ops", description="DeepSeek-V4 sparse MLA decode: ops, passes and a small engine.", epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--version", action="version", version=f"dsv4_ops {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    cli.add_commands(commands, EXIT_CODES)

    doctor = commands.add_parser("doctor", help="what each op runs on here, what is missing, how to get it", description="What each op runs on here, what is missing and how to get it.")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument("--selftest", action="store_true", help="run every op's samples against its reference on the devices here; exit code 1 when one differs")

    doctor.add_argument("--verbose", action="store_true", help="also PyTorch's own report of the machine (--json always has it)")

    ops = commands.add_parser("ops", help="table of the ops", description="The ops: schema, back ends, whether a CUDA graph may hold them.")
    ops.add_argument("name", nargs="?", metavar="NAME", help="all about one op: its arguments, how to call it, an example that runs")
    ops.add_argument("--markdown", action="store_true", help="as the Markdown table of README")
    ops.add_argument("--reference", action="store_true", help="the API reference as Markdown: docstrings and signatures of all that is public")
    ops.add_argument("--write", metavar="PAGE", help="put the Markdown table between the ops:begin and ops:end markers of PAGE; with --reference, write PAGE as a whole")

    from .bench import cli as bench

    bench.add_command(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    top = parser()
    options = top.parse_args(arguments)
    if options.command is None:
        top.print_help(sys.stderr)
        return 2
    try:
        return _run(options)
    except BrokenPipeError:
        # The reader has gone (`| head`). Nothing more can be said, and flushing at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _write_reference(page: str) -> bool:
    """Write the API reference to ``page``; returns whether it changed."""
    from . import reference

    path, text = Path(page), reference.reference_text()
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def _run(options: argparse.Namespace) -> int:
    if options.command == "doctor":
        from . import doctor

        return doctor.main(options.json, options.selftest, options.verbose)
    if options.command == "ops":
        from . import doctor

        if options.name is not None:
            try:
                sys.stdout.write(doctor.op_text(options.name))
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
        elif options.write:
            try:
                changed = _write_reference(options.write) if options.reference else doctor.write_ops_table(options.write)
            except (OSError, ValueError) as error:
                print(f"error: {error}", file=sys.stderr)
                return 4
            print(f"{options.write}: {'written' if changed else 'up to date'}")
        elif options.reference:
            from . import reference

            sys.stdout.write(reference.reference_text())
        else:
            sys.stdout.write(doctor.ops_markdown() if options.markdown else doctor.ops_text())
        return 0
    if options.command == "bench":
        from .bench import cli as bench

        return bench.main(options)
    from .engine import cli

    return cli.main(options)


if __name__ == "__main__":
    sys.exit(main())
