"""`python -m harts_hf.cli` is the same as `harts`."""

import sys

from harts_hf.cli.main import main

sys.exit(main())
