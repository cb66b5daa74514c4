"""``python -m nimblec`` is the command line."""

from nimblec.cli import main

if __name__ == "__main__":
    main()
