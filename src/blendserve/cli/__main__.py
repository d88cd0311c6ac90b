"""`python -m blendserve.cli`."""

from blendserve.cli import main

main()
