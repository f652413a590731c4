"""The command itself: arguments in, exit code out, and one line for every error of our tree.

Exit codes: 0 all is well; 1 a backend failed, or something is broken; 2 the command or a configuration is wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Final

from l2kit import __version__
from l2kit.cli import archives, eviction, objects, plugins
from l2kit.errors import ConfigError, L2Error
from l2kit.registry import default_registry

_BROKEN_PIPE: Final = 128 + 13  # as if SIGPIPE had ended us, which is what a shell expects of `l2kit ls | head`
_INTERRUPTED: Final = 128 + 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``arguments`` are the process's own by default."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    registry = default_registry()
    # Errors are told once, here; what the library and its plugins log on the way repeats them with tracebacks.
    try:
        if words and words[0] in registry.commands():
            code = registry.command(words[0])(words[1:])
        else:
            options = _parser(registry.commands()).parse_args(words)
            logging.getLogger().addHandler(logging.NullHandler())
            code = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter fails again at exit
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ConfigError as error:
        return _complain(error, 2)
    except L2Error as error:
        return _complain(error, 1)
    return code


def _complain(error: L2Error, code: int) -> int:
    print(f"error: {one_line(error)}", file=sys.stderr)
    return code


def one_line(error: object) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split())


def _parser(more: Sequence[str]) -> argparse.ArgumentParser:
    """Of our own commands; ``more`` are those of plugins, which see to their arguments themselves."""
    parser = argparse.ArgumentParser(
        prog="l2kit",
        description="KV cache of LLM servers: tools around its storage.",
        epilog=f"Commands of plugins: {', '.join(more)}." if more else None,
    )
    parser.add_argument("--version", action="version", version=f"l2kit {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = commands.add_parser("plugins", help="list installed adapters, codecs and policies, and what is broken")
    command.add_argument("--json", action="store_true", help="print one JSON array")
    command.set_defaults(run=plugins.run)

    command = commands.add_parser("probe", help="write, read, compare and delete one small object")
    command.add_argument("url", metavar="URL", help="SCHEME://…?option=value")
    command.set_defaults(run=objects.run_probe)

    command = commands.add_parser("ls", help="list the objects of a backend: size in bytes and key")
    command.add_argument("url", metavar="URL", help="SCHEME://…?option=value")
    command.set_defaults(run=objects.run_ls)

    command = commands.add_parser("verify", help="load every object of a backend and check it")
    command.add_argument("url", metavar="URL", help="SCHEME://…?option=value")
    command.add_argument("--delete", action="store_true", help="delete damaged objects; then they are no failure")
    command.set_defaults(run=objects.run_verify)

    command = commands.add_parser("evict", help="remove objects: by key, namespace or age, or down to a size")
    command.add_argument("url", metavar="URL", help="SCHEME://…?option=value")
    eviction.add_arguments(command)
    command.set_defaults(run=eviction.run)

    command = commands.add_parser("export", help="write every object of a backend that is whole into one file")
    command.add_argument("url", metavar="URL", help="SCHEME://…?option=value")
    archives.add_export_arguments(command)
    command.set_defaults(run=archives.run_export)

    command = commands.add_parser("import", help="store the objects of an export in a backend, but for those it has")
    archives.add_import_arguments(command)
    command.add_argument("url", metavar="URL", help="SCHEME://…?option=value")
    command.set_defaults(run=archives.run_import)
    return parser
