"""``python -m thinpipe``: the command line, also where nothing is installed, and for torchrun's ``-m``."""

from thinpipe.cli import main

if __name__ == "__main__":
    main()
