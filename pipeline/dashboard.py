"""W&B for a study: upload its runs and results, build its dashboard.

    python -m pipeline.dashboard sync results/embedded
    python -m pipeline.dashboard create results/embedded

`python -m pipeline.dashboard COMMAND --help` tells more.
"""

import argparse
import sys
from importlib import import_module
from types import ModuleType

_COMMANDS = {
    "sync": "upload a study's runs to W&B, or fill the gaps of their live copies, then compare W&B with the files",
    "create": "build or update the study's dashboard",
}


def _module(command: str) -> ModuleType:
    return import_module(f"pipeline.tracking.{command}")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.dashboard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in _COMMANDS.items():
        command = commands.add_parser(
            name, help=purpose, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if words[:1] == [name]:  # only the one that is asked for is imported
            command.description = _module(name).__doc__
            _module(name).add_arguments(command)
    options = parser.parse_args(words)
    return _module(options.command).run(options)


if __name__ == "__main__":
    sys.exit(main())
