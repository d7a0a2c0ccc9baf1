"""`python -m breakgraph`: the same as the `breakgraph` command."""

from breakgraph.cli.main import main

raise SystemExit(main())
