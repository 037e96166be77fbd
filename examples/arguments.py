"""What the examples are started with; a script of your own needs none of it."""

import sys
from pathlib import Path

from harts_hf.names import check_model_name


def arguments(usage: str) -> list[str]:
    """The words of the command line, or a line of what is wrong with them and the end.

    Args:
        usage: their names, the model first; those in brackets may be left out.
    """
    words, names = sys.argv[1:], usage.split()
    needed = [name for name in names if not name.startswith("[")]
    if not len(needed) <= len(words) <= len(names):
        what = "MODEL: a folder, such as examples/tiny.py makes, or a name"
        sys.exit(f"usage: python examples/{Path(sys.argv[0]).name} {usage} ({what})")
    try:
        check_model_name("MODEL", words[0])
    except ValueError as error:
        sys.exit(str(error))
    return words
