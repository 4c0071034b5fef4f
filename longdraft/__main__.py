"""``python -m longdraft``."""

from longdraft.cli.app import main

main()
