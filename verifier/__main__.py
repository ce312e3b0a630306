"""`python -m verifier`."""

from verifier.cli.app import main

if __name__ == "__main__":
    main()
