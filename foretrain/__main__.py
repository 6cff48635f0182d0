"""`python -m foretrain` is the command `foretrain`."""

from foretrain.cli import main

if __name__ == "__main__":
    main()
