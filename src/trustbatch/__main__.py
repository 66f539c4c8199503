"""`python -m trustbatch` is the command line."""

from trustbatch.cli import main

raise SystemExit(main())
