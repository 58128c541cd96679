"""`python -m mhctune`: the command line."""

from mhctune.cli import main

main()
