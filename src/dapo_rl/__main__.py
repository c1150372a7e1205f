"""`python -m dapo_rl` is the command `dapo`."""

from dapo_rl.cli import main

if __name__ == "__main__":
    main()
