"""``python -m verl_adaptor.cli`` is ``verl-adaptor``."""

from verl_adaptor.cli import main

main()
