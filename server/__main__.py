"""`python -m server` is `stepscope`."""

from server.cli import main

if __name__ == "__main__":
    main()
